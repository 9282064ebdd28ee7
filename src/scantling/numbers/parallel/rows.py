"""A block's rows in a training pass over one micro-batch: what they compute, and what they keep for the backward."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

from scantling.numbers.parallel.work import Place, Ways, kept, places
from scantling.parts.block import Block, ParallelBlock
from scantling.parts.part import Part, Step, Workload
from scantling.parts.saved import Value, settled


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of one block, of which another has made the input.

    Attributes:
        where: the places of its parts.
        w: the micro-batch, all of its positions.
        steps: with the bytes that each keeps, nothing computed again.
        selective: the same where the core of the attention is computed again.
        stream: bytes of the block's input.
        shared: bytes of what all blocks keep together, by name: tables of positions, an encoder's output.
    """

    block: Block | ParallelBlock
    where: dict[str, Place]
    w: Workload
    steps: tuple[Step, ...]
    selective: tuple[Step, ...]
    stream: int
    shared: Mapping[Hashable, int]

    def kept(self, policy: str, split: Ways) -> float:
        """Bytes that a rank keeps under a policy of `parts.saved`."""
        if policy == "block":
            return self.stream / split.stream
        return kept(self.selective if policy == "selective" else self.steps, self.where, split)


def rows_of(block: Part, w: Workload) -> Rows:
    """The rows of a block in a micro-batch."""
    assert isinstance(block, Block | ParallelBlock)
    x = Value("stream", w.batch * w.tokens * block.d_model)
    plain, selective = (list(block.steps(replace(w, recompute=p).on(x))) for p in ("none", "selective"))
    shared = {v.key: v.nbytes(w.dtype) for row in plain for v in row.saved if v.key is not None}
    own, core_again = (_settled(rows, w) for rows in (plain, selective))
    return Rows(block, places(block), w, own, core_again, x.nbytes(w.dtype), shared)


def _settled(rows: list[Step], w: Workload) -> tuple[Step, ...]:
    own = (replace(row, saved=tuple(v for v in row.saved if v.key is None)) for row in rows)
    return tuple(settled(own, w))
