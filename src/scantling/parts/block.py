"""The block: residual sublayers in a list, norms wherever the placement puts them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from scantling.parts.dims import Dim, elements
from scantling.parts.leaf import Norm
from scantling.parts.part import Part, Step, Workload
from scantling.parts.saved import Value


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

    def children(self) -> dict[str, Part]:
        """The part and its norms by name, in the order of execution."""
        named: dict[str, Part] = {}
        for place in ("in", "part", "res", "out"):
            if place == "part":
                named[self.name] = self.part
            elif (name := self.norm_name(place)) is not None:
                named[name] = dict(self.norms)[place]
        return named


@dataclass(frozen=True)
class Block(Part):
    """Sublayers that each read the residual stream and add to it (placements: Xiong et al., arXiv:2002.04745).

    Attributes:
        from_norm: what a sublayer adds to is the normed stream, not the stream itself (BLOOM's option).
    """

    d_model: int
    sublayers: tuple[Sublayer, ...]
    dropout: float = 0.0
    from_norm: bool = False

    def children(self) -> Mapping[str, Part]:
        return {name: part for sub in self.sublayers for name, part in sub.children().items()}

    def steps(self, w: Workload) -> Iterator[Step]:
        formula = "norm(x) + f(norm(x))" if self.from_norm else "x + f(x)"
        for sub in self.sublayers:
            inner, stream = w, w
            if (name := sub.norm_name("in")) is not None:
                inner = w.on((yield from self.steps_of(name, w, sizes=self._sizes)))
                stream = inner if self.from_norm else w
            update = yield from self.steps_of(sub.name, inner)
            if (name := sub.norm_name("res")) is not None:
                update = yield from self.steps_of(name, w.on(update), sizes=self._sizes)
            yield (added := _added(f":after_{sub.name}", stream, self.d_model, formula, self.dropout, update))
            w = w.on(added.out)
            if (name := sub.norm_name("out")) is not None:
                w = w.on((yield from self.steps_of(name, w, sizes=self._sizes)))

    @property
    def _sizes(self) -> Mapping[str, Dim]:
        return {"d": Dim("d_model", self.d_model)}

    def forward(self, net: Any, x: Any, ctx: Any) -> Any:
        for sub in self.sublayers:
            into, res, out = (sub.norm_name(place) for place in ("in", "res", "out"))
            read = getattr(net, into)(x) if into else x
            update = getattr(net, sub.name)(read, ctx)
            if res:
                update = getattr(net, res)(update)
            x = read if self.from_norm else x
            x = ctx.mark(net, f"after_{sub.name}", x + ctx.drop(net, update, self.dropout))
            if out:
                x = getattr(net, out)(x)
        return x


@dataclass(frozen=True)
class ParallelBlock(Part):
    """x + f(norm_f(x)) + g(norm_g(x)): every sublayer reads the same stream (GPT-J; arXiv:2204.02311, section 2).

    A sublayer without a norm of its own shares the first one's.
    """

    d_model: int
    sublayers: tuple[Sublayer, ...]
    dropout: float = 0.0

    def children(self) -> Mapping[str, Part]:
        return {name: part for sub in self.sublayers for name, part in sub.children().items()}

    def steps(self, w: Workload) -> Iterator[Step]:
        read, updates, sizes = w, [], {"d": Dim("d_model", self.d_model)}
        for sub in self.sublayers:
            if (name := sub.norm_name("in")) is not None:
                read = w.on((yield from self.steps_of(name, w, sizes=sizes)))
            updates.append((yield from self.steps_of(sub.name, read)))
        yield _added(":after_all", w, self.d_model, "x + f(x) + g(x)", self.dropout, *updates)

    def forward(self, net: Any, x: Any, ctx: Any) -> Any:
        total, read = x, x
        for sub in self.sublayers:
            if (into := sub.norm_name("in")) is not None:
                read = getattr(net, into)(x)
            total = total + ctx.drop(net, getattr(net, sub.name)(read, ctx), self.dropout)
        return ctx.mark(net, "after_all", total)


def _added(path: str, w: Workload, d_model: int, formula: str, dropout: float, *updates: Value) -> Step:
    note, axes = "Adds to the stream; nothing is overwritten.", (w.B, w.T, Dim("d_model", d_model))
    numel = elements(axes)
    dtype = w.joint(w.read(numel), *updates)
    saved = w.keep(*(w.dropped(update, numel) for update in updates)) if dropout else ()
    out = Value("stream", numel, dtype)
    return Step(path, "residual add", axes, formula=formula, note=note, dtype=dtype, saved=saved, out=out)
