"""The block: residual sublayers in a list, norms wherever the placement puts them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from scantling.parts.leaf import Norm
from scantling.parts.part import Part, Step, Workload


@dataclass(frozen=True)
class Sublayer:
    """One residual sublayer: x = out_norm(x + res_norm(f(in_norm(x)))).

    Attributes:
        name: of the part in the block: ``attn``, ``cross`` or ``mlp``.
        norms: by place: ``in`` (pre-norm), ``res`` (before the addition), ``out`` (post-norm).
    """

    name: str
    part: Part
    norms: tuple[tuple[str, Norm], ...]

    def norm_name(self, place: str) -> str | None:
        """Name of the norm at a place: ``attn_norm``, ``attn_res_norm``, ``attn_out_norm``; None for none."""
        if place not in dict(self.norms):
            return None
        return f"{self.name}_norm" if place == "in" else f"{self.name}_{place}_norm"


@dataclass(frozen=True)
class Block(Part):
    """Sublayers that each read the residual stream and add to it (placements: Xiong et al., arXiv:2002.04745)."""

    d_model: int
    sublayers: tuple[Sublayer, ...]
    dropout: float = 0.0

    def children(self) -> Mapping[str, Part]:
        named: dict[str, Part] = {}
        for sub in self.sublayers:
            named |= {str(sub.norm_name(place)): norm for place, norm in sub.norms if place == "in"}
            named[sub.name] = sub.part
            named |= {str(sub.norm_name(place)): norm for place, norm in sub.norms if place != "in"}
        return named

    def steps(self, w: Workload) -> Iterator[Step]:
        for sub in self.sublayers:
            for name in (sub.norm_name("in"), sub.name, sub.norm_name("res")):
                if name is not None:
                    yield from self.steps_of(name, w)
            shape = (w.batch, w.tokens, self.d_model)
            yield Step(f":after_{sub.name}", "residual add", shape, formula="x + f(x)", note="Nothing is overwritten.")
            if (name := sub.norm_name("out")) is not None:
                yield from self.steps_of(name, w)

    def forward(self, net: Any, x: Any, ctx: Any) -> Any:
        for sub in self.sublayers:
            into, res, out = (sub.norm_name(place) for place in ("in", "res", "out"))
            update = getattr(net, sub.name)(getattr(net, into)(x) if into else x, ctx)
            if res:
                update = getattr(net, res)(update)
            x = ctx.mark(net, f"after_{sub.name}", x + ctx.drop(net, update, self.dropout))
            if out:
                x = getattr(net, out)(x)
        return x
