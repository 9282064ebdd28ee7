"""What a head does to each vector before its output matrix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from scantling.parts.dims import Dim, elements
from scantling.parts.leaf import Linear, Norm
from scantling.parts.mlp import activated
from scantling.parts.part import Part, Step, Workload


@dataclass(frozen=True)
class Transform(Part):
    """norm(act(x W^T + b)): (..., d_in) -> (..., d_out), before the output matrix (BERT, arXiv:1810.04805)."""

    d_in: int
    d_out: int
    act: str
    bias: bool = True
    norm: Norm | None = None

    def children(self) -> Mapping[str, Part]:
        named: dict[str, Part] = {"dense": Linear(self.d_in, self.d_out, self.bias)}
        return named | ({"norm": self.norm} if self.norm else {})

    def steps(self, w: Workload) -> Iterator[Step]:
        out, note = Dim("d_out", self.d_out), "One more look at each vector before the scores."
        dense = yield from self.steps_of("dense", w, "transform", note)
        axes = (*w.rows, out)
        acted, kept = activated(self.act, dense, elements(axes))
        formula, saved = f"{self.act}(x W^T)", w.keep(*kept)
        yield Step(":acted", self.act, axes, formula=formula, dtype=acted.dtype, saved=saved, out=acted)
        if self.norm:
            yield from self.steps_of("norm", w.on(acted), sizes={"d": out})

    def forward(self, net: Any, x: Any, ctx: Any) -> Any:
        x = ctx.mark(net, "acted", ctx.activate(self.act, net.dense(x)))
        return net.norm(x) if self.norm else x
