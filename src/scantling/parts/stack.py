"""A stack: positions at the bottom, equal or patterned blocks, one norm on top where the placement asks for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from scantling.parts.dims import Dim
from scantling.parts.leaf import Embedding, Linear, Norm
from scantling.parts.part import Child, Part, Step, Workload, cycles
from scantling.parts.position import Position


@dataclass(frozen=True)
class TokenTypes(Part):
    """A trained vector per kind of token, added at the bottom: BERT's segments (arXiv:1810.04805, section 3)."""

    n_types: int
    d_model: int
    role = "types"

    def children(self) -> Mapping[str, Part]:
        return {"table": Embedding(self.n_types, self.d_model)}

    def steps(self, w: Workload) -> Iterator[Step]:
        d, note = Dim("d_model", self.d_model), "One trained vector per kind of token."
        yield from self.steps_of("table", w, "type lookup", note, {"d": d, "rows": Dim("types", self.n_types)})
        note = "Now it shows which text is which."
        yield Step(":added", "add types", (*w.rows, d), formula="x + S[types]", note=note)

    def forward(self, net: Any, x: Any, ctx: Any) -> Any:
        return ctx.mark(net, "added", x + net.table(ctx.types))


@dataclass(frozen=True)
class Stack(Part):
    """x (B, T, d) -> (B, T, d). Pre-norm stacks end in one `final_norm`, post-norm stacks in none.

    Attributes:
        embed_norm: on the vectors with their positions, before the first block (BLOOM, BERT), or None.
        types: a vector per kind of token, added to the token's, or None.
        widen: from the width of tables and `embed_norm` to that of the blocks (ELECTRA), or None.
    """

    position: Position
    blocks: tuple[Part, ...]
    final_norm: Norm | None
    embed_norm: Norm | None = None
    dropout: float = 0.0
    types: TokenTypes | None = None
    widen: Linear | None = None

    def children(self) -> Mapping[str, Child]:
        named: dict[str, Child | None] = {
            "types": self.types,
            "position": self.position,
            "embed_norm": self.embed_norm,
            "widen": self.widen,
            "blocks": self.blocks,
            "final_norm": self.final_norm,
        }
        return {name: part for name, part in named.items() if part is not None}

    def steps(self, w: Workload) -> Iterator[Step]:
        narrow: dict[str, Dim] = {}
        if self.widen:
            narrow = {name: Dim("d_embed", self.widen.d_in) for name in ("d", "d_model")}
        if self.types:
            yield from self.steps_of("types", w, sizes=narrow)
        yield from self.steps_of("position", w, sizes=narrow)
        if self.embed_norm:
            yield from self.steps_of("embed_norm", w, sizes=narrow or {"d": Dim("d_model", self.embed_norm.d)})
        if self.widen:
            sizes = {"d_in": narrow["d"], "d_out": Dim("d_model", self.widen.d_out)}
            yield from self.steps_of("widen", w, "widen", "From the tables' width to the stream's.", sizes)
        runs = [(0, len(self.blocks), 1)] if w.unrolled else cycles(self.blocks)
        for start, period, times in runs:
            for i in range(start, start + period):
                for step in self.blocks[i].steps(w):
                    yield step.under(f"blocks.{i}", times)
        if self.final_norm:
            yield from self.steps_of("final_norm", w, sizes={"d": Dim("d_model", self.final_norm.d)})

    def forward(self, net: Any, x: Any, ctx: Any) -> Any:
        if self.types:
            x = net.types(x, ctx)
        x = self.position.embed(net.position, x, ctx)
        if self.embed_norm:
            x = net.embed_norm(x)
        x = ctx.drop(net, x, self.dropout)
        if self.widen:
            x = net.widen(x)
        for block in net.blocks:
            x = block(x, ctx)
        return net.final_norm(x) if self.final_norm else x
