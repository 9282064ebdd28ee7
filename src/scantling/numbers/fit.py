"""Inversion of the account: the largest batch and the longest rows that a given memory holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from scantling.parts.part import Workload

MOST = 2**40
"""Nobody asks for more rows or tokens."""


@dataclass(frozen=True)
class Fit:
    """What a memory holds.

    Attributes:
        given: its bytes.
        least: bytes of one row of one token: more than `given` where not even that fits.
        batch: the most rows of the asked length; 0 for none.
        tokens: the longest rows, as many as asked; 0 for none.
        bound: the limit on `tokens` that is the model's and not the memory's, where that is what was reached.
    """

    given: int
    least: int
    batch: int
    tokens: int
    bound: int | None


def fit(need: Callable[[Workload], int], w: Workload, given: int, positions: int | None) -> Fit:
    """The largest batch at the tokens of `w`, and the most tokens at its batch, for which `need` is within `given`.

    Args:
        need: bytes of a workload; more rows or tokens never need less.
        positions: how many the model has, or None for no limit; those in the cache are among them.
    """
    most = MOST if positions is None else max(0, positions - w.past)
    tokens = largest(lambda n: need(_of_length(w, n)) <= given, most)
    return Fit(
        given,
        need(replace(_of_length(w, 1), batch=1)),
        largest(lambda n: need(replace(w, batch=n)) <= given, MOST),
        tokens,
        positions if tokens == most and positions is not None else None,
    )


def _of_length(w: Workload, tokens: int) -> Workload:
    """The same with rows of `tokens`; a source that was given keeps its length."""
    return replace(w, tokens=tokens)


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number from 1 to `most` that fits, where every smaller one fits too; 0 where 1 does not."""
    if most < 1 or not fits(1):
        return 0
    low, high = 1, 2
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
