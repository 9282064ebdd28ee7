"""How documents are put into rows, and numbers that change over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scantling.errors import ScantlingInputError, nearest

MODES = ("packed", "padded", "concatenated")
LONG = ("split", "refuse", "truncate", "drop")

Schedule = int | Sequence[tuple[int, int]]
"""A number, or pairs of the step from which on it holds and the number; the first step is 0."""


@dataclass(frozen=True)
class Layout:
    """How documents are put into rows.

    Attributes:
        mode: packed: whole documents side by side, each in its own world; padded: one document a row; concatenated:
            one stream of tokens, where a row may begin and end anywhere and documents see each other.
        long: what happens to a document that is longer than a row: split (it goes on in another row, with positions
            from 0 again), refuse, truncate (its end is left out) or drop. None is split for texts and conversations,
            and refuse for pairs, which cannot be split. A stream has no long documents.
    """

    mode: str = "packed"
    long: Literal["split", "refuse", "truncate", "drop"] | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ScantlingInputError(
                f"batches are made {self.mode!r}: use one of {', '.join(MODES)}{nearest(self.mode, MODES)}"
            )
        if self.long is not None and self.long not in LONG:
            raise ScantlingInputError(f"long documents are {self.long!r}: use one of {', '.join(LONG)}")


def at(schedule: Schedule, step: int) -> int:
    """What a schedule says of a step."""
    if isinstance(schedule, int):
        return schedule
    return [value for start, value in schedule if start <= step][-1]


def check_schedule(schedule: Schedule, what: str, ranks: int = 1) -> None:
    pairs = [(0, schedule)] if isinstance(schedule, int) else list(schedule)
    starts = [start for start, _ in pairs]
    if not pairs or starts[0] != 0 or starts != sorted(set(starts)):
        raise ScantlingInputError(f"{what} change at steps {starts}: they must begin with 0 and grow")
    for _, value in pairs:
        if value < 1:
            raise ScantlingInputError(f"{what} is {value}; at least 1 is needed")
        if value % ranks:
            raise ScantlingInputError(f"a batch of {value} rows cannot be shared by {ranks} ranks: take a multiple")
