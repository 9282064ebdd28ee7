"""A stack: positions at the bottom, equal or patterned blocks, one norm on top where the placement asks for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from scantling.parts.leaf import Norm
from scantling.parts.part import Child, Part, Step, Workload, cycles
from scantling.parts.position import Position


@dataclass(frozen=True)
class Stack(Part):
    """x (B, T, d) -> (B, T, d). Pre-norm stacks end in one `final_norm`, post-norm stacks in none.

    Attributes:
        embed_norm: on the vectors with their positions, before the first block (BLOOM, BERT), or None.
    """

    position: Position
    blocks: tuple[Part, ...]
    final_norm: Norm | None
    embed_norm: Norm | None = None
    dropout: float = 0.0

    def children(self) -> Mapping[str, Child]:
        named: dict[str, Child | None] = {
            "position": self.position,
            "embed_norm": self.embed_norm,
            "blocks": self.blocks,
            "final_norm": self.final_norm,
        }
        return {name: part for name, part in named.items() if part is not None}

    def steps(self, w: Workload) -> Iterator[Step]:
        yield from self.steps_of("position", w)
        if self.embed_norm:
            yield from self.steps_of("embed_norm", w)
        runs = [(0, len(self.blocks), 1)] if w.unrolled else cycles(self.blocks)
        for start, period, times in runs:
            for i in range(start, start + period):
                for step in self.blocks[i].steps(w):
                    yield step.under(f"blocks.{i}").times(times)
        if self.final_norm:
            yield from self.steps_of("final_norm", w)

    def forward(self, net: Any, x: Any, ctx: Any) -> Any:
        x = self.position.embed(net.position, x, ctx)
        if self.embed_norm:
            x = net.embed_norm(x)
        x = ctx.drop(net, x, self.dropout)
        for block in net.blocks:
            x = block(x, ctx)
        return net.final_norm(x) if self.final_norm else x
