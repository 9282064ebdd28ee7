"""T5's relative positions: a learned shift of the scores per bucket of distances and head, one table per stack."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from scantling.parts.dims import ONE, Dim
from scantling.parts.leaf import Embedding
from scantling.parts.part import Part, Step, Workload
from scantling.parts.position import Position, Shift
from scantling.parts.saved import Value


@dataclass(frozen=True)
class RelativeBias(Position):
    """Scores + table[bucket(key - query), head] (Raffel et al., arXiv:1910.10683, section 2.1).

    The stack owns the table and looks every distance up once per pass; the layers' attention reads what was found.

    Attributes:
        buckets: rows of the table.
        max_distance: from here on all distances share the last bucket.
        both_ways: half of the buckets are for keys after the query.
    """

    n_heads: int
    buckets: int
    max_distance: int
    both_ways: bool

    def children(self) -> Mapping[str, Part]:
        return {"table": Embedding(self.buckets, self.n_heads)}

    def steps(self, w: Workload) -> Iterator[Step]:
        distances = replace(w, lead=(w.S + w.T - ONE,), x=None)
        sizes = {"d": Dim("H", self.n_heads), "rows": Dim("buckets", self.buckets)}
        note = "One learned shift per distance and head; all layers of the stack share them."
        for step in self.steps_of("table", distances, "bias per distance", note, sizes):
            yield replace(step, out=w.read(0))

    def shift(self, w: Workload, rows: int) -> Shift:
        numel = self.n_heads * rows * w.keys
        return Shift(numel, trained=True, saved=(Value("distances", rows * w.keys, "int64"),))

    def embed(self, net: Any, x: Any, ctx: Any) -> Any:
        ctx.hold(self, net.table(ctx.buckets(self.buckets, self.max_distance, self.both_ways)))
        return x

    def bias(self, net: Any, ctx: Any) -> Any:
        return ctx.shifts(ctx.held(self))
