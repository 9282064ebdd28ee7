"""How much an engine takes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scantling.errors import ScantlingInputError


@dataclass(frozen=True)
class Limits:
    """How much an engine takes on.

    Attributes:
        rows: requests that are decoded at once.
        positions: positions that the cache holds, of all of them together.
        block: positions of a block; a beginning is shared in whole blocks.
        chunk: tokens of prompts that go through in one step, and more only where a prompt cannot be cut.
        numbers: ``plain`` or ``int8``; see `tensor.store`.
        invariant: every request computes alone, so that not even a rounding depends on what else is in the batch. It
            costs what batching gains: weights are read once per request and token. The compiled pass always does so.
        sources: positions of encoder-decoders' sources that the cache holds, of all of them together; None for as many
            as `positions`.
    """

    rows: int = 16
    positions: int = 16384
    block: int = 16
    chunk: int = 256
    numbers: str = "plain"
    invariant: bool = False
    sources: int | None = None

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in ("rows", "positions", "block", "chunk")}
        for name, value in (given | {"sources": self.of_sources}).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ScantlingInputError(f"{name} is {value!r}; a whole number of at least 1 is needed")
        if not isinstance(self.invariant, bool):
            raise ScantlingInputError(f"invariant is {self.invariant!r}; True or False is needed")
        if (least := min(self.positions, self.of_sources)) < self.block:
            raise ScantlingInputError(f"a cache of {least} positions has no block of {self.block}")

    @property
    def of_sources(self) -> int:
        """Positions of sources."""
        return self.positions if self.sources is None else self.sources

    @classmethod
    def for_all(cls, needs: Sequence[tuple[int, int]], rows: int, most: int | None = None) -> Limits:
        """A cache that holds any `rows` of some requests together.

        Args:
            needs: `room.needed` of each.
            most: positions beyond which it holds fewer of them together, and the same of sources; None for no end.
        """
        positions, sources = (cls._enough(lengths, rows, most) for lengths in zip(*needs, strict=True))
        return cls(rows=rows, positions=positions, sources=sources or None)

    @classmethod
    def _enough(cls, lengths: Sequence[int], rows: int, most: int | None) -> int:
        whole = sorted(-(-length // cls.block) * cls.block for length in lengths)
        together = sum(whole[-rows:])
        return together if most is None else max(whole[-1], min(together, most))
