"""Heads that score nothing: they give vectors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from scantling.parts.dims import Dim
from scantling.parts.heads.pooling import pooled_step
from scantling.parts.heads.transform import Transform
from scantling.parts.part import Part, Step, Workload
from scantling.parts.saved import Value


@dataclass(frozen=True)
class TextVector(Part):
    """One vector for the whole text: (B, T, d) -> (B, d) (Reimers and Gurevych, arXiv:1908.10084, section 3).

    Attributes:
        pool: ``first``, ``mean`` over real tokens, or ``last``.
        transform: on the pooled vector, or None.
        spare: the transform reads the first token and nobody reads its result; in training it is left out.
        normalize: divided by its Euclidean length.
    """

    d_model: int
    pool: str
    transform: Transform | None = None
    spare: bool = False
    normalize: bool = False
    role = "head"

    def children(self) -> Mapping[str, Part]:
        return {} if self.transform is None else {"transform": self.transform}

    def steps(self, w: Workload) -> Iterator[Step]:
        text, d = replace(w, lead=(w.B,)), Dim("d_model", self.d_model)
        square = {"d_in": d, "d_out": d}
        if self.spare and not w.training:
            yield from self.steps_of("transform", text, note="In the file; nothing reads it.", sizes=square)
        yield (step := pooled_step(w, d, self.pool))
        text = text.on(step.out)
        if self.transform and not self.spare:
            text = text.on((yield from self.steps_of("transform", text, sizes=square)))
        if self.normalize:
            note = "Length 1, so that a product of two vectors is their cosine."
            x, names = text.read(w.batch * self.d_model), ("lengths", "lengths, at least 1e-12")
            saved = w.keep(x, *(Value(name, w.batch, x.dtype) for name in names))
            yield Step(":unit", "normalise", (w.B, d), formula="x / |x|", note=note, dtype=x.dtype, saved=saved)

    def forward(self, net: Any, x: Any, table: Any, ctx: Any) -> Any:
        if self.spare and not ctx.training:
            net.transform(ctx.pool(x, "first"), ctx)
        x = ctx.mark(net, "pooled", ctx.pool(x, self.pool))
        if self.transform and not self.spare:
            x = net.transform(x, ctx)
        return ctx.mark(net, "unit", ctx.unit(x)) if self.normalize else x

    def outcome_steps(self, w: Workload) -> Iterator[Step]:
        """Nothing is read from a vector."""
        return iter(())

    def outcome(self, net: Any, ids: Any, logits: Any, ctx: Any) -> tuple[Any, Any]:
        """Nothing."""
        return None, None


@dataclass(frozen=True)
class NoHead(Part):
    """The stream itself: (B, T, d)."""

    d_model: int
    role = "head"

    def steps(self, w: Workload) -> Iterator[Step]:
        return iter(())

    def forward(self, net: Any, x: Any, table: Any, ctx: Any) -> Any:
        return x

    def outcome_steps(self, w: Workload) -> Iterator[Step]:
        """Nothing is read from the stream."""
        return iter(())

    def outcome(self, net: Any, ids: Any, logits: Any, ctx: Any) -> tuple[Any, Any]:
        """Nothing."""
        return None, None
