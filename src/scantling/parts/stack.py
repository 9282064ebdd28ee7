"""A stack: positions at the bottom, equal or patterned blocks, one norm on top where the placement asks for it."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from scantling.parts.dims import Dim, elements
from scantling.parts.leaf import Embedding, Linear, Norm
from scantling.parts.part import Child, Part, Step, Workload, cycles
from scantling.parts.position import Position
from scantling.parts.saved import Value, region


@dataclass(frozen=True)
class TokenTypes(Part):
    """A trained vector per kind of token, added at the bottom: BERT's segments (arXiv:1810.04805, section 3)."""

    n_types: int
    d_model: int
    role = "types"

    def children(self) -> Mapping[str, Part]:
        return {"table": Embedding(self.n_types, self.d_model)}

    def steps(self, w: Workload) -> Iterator[Step]:
        kinds, d, note = replace(w, x=None), Dim("d_model", self.d_model), "One trained vector per kind of token."
        yield from self.steps_of("table", kinds, "type lookup", note, {"d": d, "rows": Dim("types", self.n_types)})
        note = "Now it shows which text is which."
        dtype = w.joint(w.read(0), Value("S", 0))
        yield Step(":added", "add types", (*w.rows, d), formula="x + S[types]", note=note, dtype=dtype)

    def forward(self, net: Any, x: Any, ctx: Any) -> Any:
        return ctx.mark(net, "added", x + net.table(ctx.types))


@dataclass(frozen=True)
class Stack(Part):
    """x (B, T, d) -> (B, T, d). Pre-norm stacks end in one `final_norm`, post-norm stacks in none.

    Attributes:
        width: of the vectors that come in.
        embed_norm: on the vectors with their positions, before the first block (BLOOM, BERT), or None.
        types: a vector per kind of token, added to the token's, or None.
        widen: from the width of tables and `embed_norm` to that of the blocks (ELECTRA), or None.
    """

    position: Position
    blocks: tuple[Part, ...]
    final_norm: Norm | None
    width: int
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
        width = self._dim_in
        narrow = {"d": width, "d_model": width}
        if self.types:
            w = w.on((yield from self.steps_of("types", w, sizes=narrow)))
        w = w.on((yield from self.steps_of("position", w, sizes=narrow)))
        if self.embed_norm:
            w = w.on((yield from self.steps_of("embed_norm", w, sizes=narrow)))
        if self.dropout and w.training:
            yield (step := self._dropout_step(w))
            w = w.on(step.out)
        if self.widen:
            sizes = {"d_in": width, "d_out": Dim("d_model", self.widen.d_out)}
            note = "From the tables' width to the stream's."
            w = w.on((yield from self.steps_of("widen", w, "widen", note, sizes)))
        runs = [(0, len(self.blocks), 1)] if w.unrolled else cycles(self.blocks)
        for start, period, times in runs:
            w = w.on((yield from self._run_steps(w, start, period, times)))
        if self.final_norm:
            yield from self.steps_of("final_norm", w, sizes={"d": Dim("d_model", self.final_norm.d)})

    @property
    def _dim_in(self) -> Dim:
        return Dim("d_embed" if self.widen else "d_model", self.width)

    def _dropout_step(self, w: Workload) -> Step:
        axes, note = (*w.rows, self._dim_in), "A part of the channels is 0 in each training pass."
        x, formula = w.read(elements(axes)), f"x * mask / {1 - self.dropout:g}"
        saved = (w.dropped(x, elements(axes)),)
        return Step(":dropped", "dropout", axes, formula=formula, note=note, dtype=x.dtype, saved=saved)

    def _run_steps(self, w: Workload, start: int, period: int, times: int) -> Generator[Step, None, Value]:
        """Rows of `period` blocks that repeat; the first ones apart, where autocast widens or narrows their stream."""
        unit: list[tuple[str, Step]] = []
        inner = w
        for i in range(start, start + period):
            rows = [*self._block_steps(i, inner)]
            inner = inner.on(rows[-1].out if rows else inner.read(0))
            unit += [(f"blocks.{i}", step) for step in rows]
        equal = w.read(0).dtype == inner.read(0).dtype
        yield from (step.under(path, times if equal else 1) for path, step in unit)
        if equal or times == 1:
            return inner.read(0)
        return (yield from self._run_steps(inner, start + period, period, times - 1))

    def _block_steps(self, i: int, w: Workload) -> Iterator[Step]:
        if not (w.training and w.recompute == "block" and w.x):
            return self.blocks[i].steps(w)
        kept = (w.x, w.beside) if w.beside else (w.x,)
        return region(self.blocks[i].steps(w), kept)

    def forward(self, net: Any, x: Any, ctx: Any) -> Any:
        if self.types:
            x = net.types(x, ctx)
        x = self.position.embed(net.position, x, ctx)
        if self.embed_norm:
            x = net.embed_norm(x)
        if self.dropout and ctx.training:
            x = ctx.mark(net, "dropped", ctx.drop(net, x, self.dropout))
        if self.widen:
            x = net.widen(x)
        for block in net.blocks:
            x = ctx.block(block, x)
        return net.final_norm(x) if self.final_norm else x
