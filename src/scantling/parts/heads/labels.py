"""The head that scores labels, of tokens or of a text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from scantling.parts.dims import Dim
from scantling.parts.heads.outcome import score_outcome, score_steps
from scantling.parts.heads.pooling import pooled_step
from scantling.parts.heads.transform import Transform
from scantling.parts.leaf import Linear
from scantling.parts.part import Part, Step, Workload


@dataclass(frozen=True)
class Labels(Part):
    """A score per label, of each token (B, T, n_labels) or, pooled, of the text (B, n_labels); reads (B, T, d).

    Attributes:
        pool: ``first``, ``mean`` or ``last``: the text's vector; None scores every token.
        scores: ``softmax`` where labels exclude each other, ``sigmoid`` where not.
        flat: the one label's axis is dropped: (B, T) (ELECTRA's replaced tokens, arXiv:2003.10555, section 2).
    """

    d_model: int
    n_labels: int
    transform: Transform | None = None
    pool: str | None = None
    bias: bool = True
    scores: str = "softmax"
    flat: bool = False
    role = "head"

    def children(self) -> Mapping[str, Part]:
        named: dict[str, Part] = {} if self.transform is None else {"transform": self.transform}
        return named | {"matrix": Linear(self.d_model, self.n_labels, self.bias)}

    def steps(self, w: Workload) -> Iterator[Step]:
        d, inner = Dim("d_model", self.d_model), w
        if self.pool:
            yield (step := pooled_step(w, d, self.pool))
            inner = replace(w.on(step.out), lead=(w.B,))
        if self.transform:
            inner = inner.on((yield from self.steps_of("transform", inner, sizes={"d_in": d, "d_out": d})))
        note, sizes = "A score for every label.", {"d_in": d, "d_out": Dim("n_labels", self.n_labels)}
        logits = yield from self.steps_of("matrix", inner, "classifier", note, sizes)
        if self.flat:
            note, op, dtype = "One score per token.", "drop the axis", logits.dtype
            flat = Step(":flat", op, inner.rows, formula="x[..., 0]", note=note, dtype=dtype, stored=False, out=logits)
            yield flat

    def forward(self, net: Any, x: Any, table: Any, ctx: Any) -> Any:
        if self.pool:
            x = ctx.mark(net, "pooled", ctx.pool(x, self.pool))
        if self.transform:
            x = net.transform(x, ctx)
        logits = net.matrix(x)
        return ctx.mark(net, "flat", logits[..., 0]) if self.flat else logits

    def outcome_steps(self, w: Workload) -> Iterator[Step]:
        """Rows of what is read from the logits."""
        lead = (w.B,) if self.pool else (w.B, w.T)
        axes = lead if self.flat else (*lead, Dim("n_labels", self.n_labels))
        yield from score_steps(w, axes, self.scores, "How likely each label is.")

    def outcome(self, net: Any, ids: Any, logits: Any, ctx: Any) -> tuple[Any, Any]:
        """Probabilities, None in training; and a loss in training."""
        return score_outcome(net, logits, ctx, self.scores)
