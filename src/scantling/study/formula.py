"""A popular formula beside the exact number that it stands for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Formula:
    """A formula and what it is compared with.

    Attributes:
        subject: parameters, FLOPs, KV cache or memory.
        name: the formula in symbols.
        estimate: what it gives for this card.
        exact: the number it stands for.
        exact_is: that number in words.
        assumes: what has to hold for the formula to be exact.
        terms: what it leaves out (positive) or counts too much (negative); they add up to exact - estimate.
        source: where it is from.
    """

    subject: str
    name: str
    estimate: int
    exact: int
    exact_is: str
    assumes: str
    source: str
    terms: Mapping[str, int] = field(default_factory=dict)

    @property
    def error(self) -> float | None:
        """estimate / exact - 1; None where the exact number is 0."""
        return self.estimate / self.exact - 1 if self.exact else None


def formula(
    subject: str, name: str, exact: tuple[int, str], terms: Mapping[str, int], assumes: str, source: str
) -> Formula:
    """A formula whose estimate is what the terms leave of the exact number."""
    value, what = exact
    kept = {why: n for why, n in terms.items() if n}
    return Formula(subject, name, value - sum(kept.values()), value, what, assumes, source, kept)
