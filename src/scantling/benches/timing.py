"""Rounds in which every contender runs once, and what came of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Spread:
    """What was measured over the rounds, in one unit."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values))

    def rate(self, amount: float) -> Spread:
        """`amount` per second, where this one is in seconds."""
        return Spread(amount / self.median, amount / self.high, amount / self.low)

    def over(self, parts: int) -> Spread:
        """Of one of so many equal parts."""
        return Spread(self.median / parts, self.low / parts, self.high / parts)


def interleaved(
    contenders: Mapping[str, Callable[[], T]], rounds: int, said: Callable[[int, str], object] | None = None
) -> dict[str, list[T]]:
    """One unrecorded round to warm up, then `rounds` rounds: what each contender gave.

    Every contender runs once per round, so that drift of the machine hits all alike.

    Args:
        said: called before each run with the number of the round, 0 the unrecorded one, and the contender's name.
    """
    found: dict[str, list[T]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, run in contenders.items():
            if said is not None:
                said(number, name)
            figure = run()
            if number:
                found[name].append(figure)
    return found
