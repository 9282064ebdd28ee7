"""FLOPs in three conventions at once."""

from __future__ import annotations

from typing import NamedTuple


class Cost(NamedTuple):
    """FLOPs of a matrix product, 2 per multiply-add, in three conventions.

    Attributes:
        full: attention over the full T x S square, as a kernel without a shortcut computes it.
        causal: attention over the pairs whose key is not after the query, in layers that hide what comes after:
            T (T + 1) / 2 of a row, whatever window the layer has.
        visible: attention over exactly the pairs that the layer's Visibility lets be seen, windows and all.
    """

    full: int = 0
    causal: int = 0
    visible: int = 0

    @classmethod
    def of(cls, flops: int) -> Cost:
        """A product that does not depend on which pairs are seen."""
        return cls(flops, flops, flops)

    def plus(self, other: Cost) -> Cost:
        """Both, each convention by itself."""
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))

    def scaled(self, factor: int) -> Cost:
        """So many times the cost."""
        return Cost(*(n * factor for n in self))


FREE = Cost()
"""No product."""
