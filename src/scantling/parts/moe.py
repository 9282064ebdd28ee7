"""Mixture of experts: a router sends each token to a few of many MLPs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from scantling.parts.dims import ONE, Dim, Shape, elements
from scantling.parts.leaf import WIDE, Linear
from scantling.parts.mlp import MLP, GatedMLP
from scantling.parts.part import Part, Step, Workload
from scantling.parts.saved import Value

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Router(Part):
    """Scores every expert and keeps the best `top_k`.

    Mixtral (arXiv:2401.04088, section 2.1) takes a softmax and divides the kept weights by their sum; DeepSeek V3
    (arXiv:2412.19437, section 2.1.2) takes sigmoids, looks into the best groups only and selects with a bias.

    Attributes:
        scores: ``softmax`` over all experts, ``sigmoid`` of each, ``top_softmax`` over the kept ones only.
        normalize: the kept weights are divided by their sum.
        bias: the matrix has a shift.
        selection_bias: a stored shift that decides who is kept and not with what weight; it is set by counting, not
            by gradients, so it is a buffer and no parameter.
        scale: factor on the kept weights.
        groups, top_groups: experts in groups, of which only the best are looked at.
        group_score: ``max`` or ``top2``: a group counts by its best expert or by the sum of its two best.
    """

    d_model: int
    n_experts: int
    top_k: int
    normalize: bool = True
    scores: str = "softmax"
    bias: bool = False
    selection_bias: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_score: str = "max"
    role = "router"

    @property
    def initial(self) -> Mapping[str, float]:
        return {"selection_bias": 0.0}

    def children(self) -> Mapping[str, Part]:
        return {"choose": Linear(self.d_model, self.n_experts, self.bias)}

    def buffers(self) -> Mapping[str, Shape]:
        return {"selection_bias": (self.n_experts,)} if self.selection_bias else {}

    def steps(self, w: Workload) -> Iterator[Step]:
        d, E, k = Dim("d_model", self.d_model), Dim("E", self.n_experts), Dim("k", self.top_k)
        note = "Scores every expert for each token."
        logits = yield from self.steps_of("choose", w, "router", note, {"d_in": d, "d_out": E})
        if self.selection_bias:
            note = "Decides who is chosen, not with what weight."
            yield Step(":selection", "selection bias", (*w.rows, E), formula="s + b", note=note)
        kind = {"softmax": "softmax", "sigmoid": "sigmoid", "top_softmax": "scores, then softmax"}[self.scores]
        formula = f"top-{self.top_k} of {kind}" + (", divided by their sum" if self.normalize else "")
        out, saved = (*w.rows, k), w.keep(*self._saved(w, logits))
        kept, note = Value("weights of the chosen", elements(out), w.read(0).dtype), "The weights of the chosen."
        op, dtype = "choose experts", kept.dtype
        yield Step(":kept", op, out, formula=formula, note=note, dtype=dtype, saved=saved, out=kept)

    def _saved(self, w: Workload, logits: Value) -> tuple[Value, ...]:
        """What each choice keeps; who is chosen gets no gradient, the weights of the chosen do."""
        rows = elements(w.rows)
        chosen = Value("the chosen experts", rows * self.top_k, "int64")
        kept = Value("their scores", rows * self.top_k, WIDE)
        every = Value("scores of all experts", rows * self.n_experts, WIDE)
        first = (chosen, kept) if self.scores == "top_softmax" else (every, chosen)
        sums = (kept, Value("sums of the chosen", rows, WIDE)) if self.normalize else ()
        return *first, *sums

    def forward(self, net: Any, x: Any, ctx: Any) -> tuple[Any, Any]:
        """x (B, T, d) -> weights (B, T, top_k) in x's dtype, expert ids (B, T, top_k)."""
        logits = net.choose(x).float()
        if self.scores == "top_softmax":
            kept, experts = logits.topk(self.top_k, -1)
            kept = kept.softmax(-1)
        else:
            scores = logits.softmax(-1) if self.scores == "softmax" else logits.sigmoid()
            wanted = ctx.mark(net, "selection", scores + net.selection_bias) if self.selection_bias else scores
            # Who is chosen has no gradient, so nothing is kept for one.
            experts = self._in_best_groups(wanted.detach()).topk(self.top_k, -1).indices
            kept = scores.gather(-1, experts)
        ctx.routed(net, logits, experts, self.scores)
        if self.normalize:
            # Sigmoids can all be 0; any other sum is too large to notice (DeepSeek's constant).
            kept = kept / (kept.sum(-1, keepdim=True) + 1e-20)
        return ctx.mark(net, "kept", (kept * self.scale).to(x.dtype)), experts

    def _in_best_groups(self, scores: Any) -> Any:
        """Scores (..., E) with the experts of all but the best groups out of reach."""
        if self.groups == 1:
            return scores
        grouped = scores.unflatten(-1, (self.groups, -1))
        best = grouped.topk(2 if self.group_score == "top2" else 1, -1).values.sum(-1)
        chosen = best.topk(self.top_groups, -1).indices
        out = best.new_ones(best.shape).scatter(-1, chosen, 0.0).bool()
        return grouped.masked_fill(out[..., None], float("-inf")).flatten(-2)


@dataclass(frozen=True)
class MoE(Part):
    """sum over the chosen experts of weight * expert(x), plus the shared MLP; no token is dropped.

    Rows are sorted by expert, so every shape is static: T * top_k rows whatever the router decides.

    Attributes:
        shared: an MLP that every token uses, or None.
        shared_gate: a learned number from 0 to 1 per token on what the shared MLP gives (Qwen 1.5 MoE).
    """

    router: Router
    experts: MLP | GatedMLP
    shared: MLP | GatedMLP | None = None
    shared_gate: bool = False

    def __post_init__(self) -> None:
        assert self.experts.n_experts == self.router.n_experts

    def children(self) -> Mapping[str, Part]:
        named: dict[str, Part] = {"router": self.router, "experts": self.experts}
        if self.shared:
            named["shared"] = self.shared
        return named | {"shared_gate": Linear(self.router.d_model, 1)} if self.shared_gate else named

    def module(self, path: str) -> nn.Module:
        # A counter of FLOPs knows only the operators that are there when it is made.
        import scantling.tensor.experts  # noqa: F401

        return super().module(path)

    def idle_params(self) -> int:
        router = self.router
        return self.experts.params // router.n_experts * (router.n_experts - router.top_k)

    def steps(self, w: Workload) -> Iterator[Step]:
        d, rows = Dim("d_model", self.router.d_model), Dim("k", self.router.top_k)
        for axis in reversed(w.rows):
            rows = axis * rows
        sent, size, out = rows.size, elements((rows, d)), (*w.rows, d)
        kept = yield from self.steps_of("router", w)
        note = "Each token once per chosen expert, sorted by expert."
        copies, saved = (
            Value("tokens by expert", size, w.read(0).dtype),
            w.keep(Value("token of each row", sent, "int64")),
        )
        op, dtype = "send to experts", copies.dtype
        yield Step(":sent", op, (rows, d), formula="x[order]", note=note, dtype=dtype, saved=saved, out=copies)
        ends = Value("where each expert's rows end", self.router.n_experts, "int32")
        made = yield from self.steps_of("experts", replace(w.on(copies), lead=(rows,), beside=ends))
        given = Value("outputs by token", size, made.dtype)
        note, dtype = "Each token's expert outputs, weighted and added.", w.joint(given, kept)
        saved = w.keep(Value("row of each choice", sent, "int64"), given, kept)
        yield Step(":combined", "combine", out, formula="sum_e weight_e y_e", note=note, dtype=dtype, saved=saved)
        if self.shared:
            yield from self._shared_steps(w, d, Value("combined", elements(out), dtype))

    def _shared_steps(self, w: Workload, d: Dim, combined: Value) -> Iterator[Step]:
        given, out = (yield from self.steps_of("shared", w)), (*w.rows, d)
        if self.shared_gate:
            note, sizes = "How much of the shared MLP each token takes.", {"d_in": d, "d_out": ONE}
            gate = yield from self.steps_of("shared_gate", w, "shared gate", note, sizes)
            saved = w.keep(Value("sigmoid(g)", elements(w.rows), gate.dtype), given)
            dtype, op = w.joint(gate, given), "gate the shared MLP"
            yield Step(":gated_shared", op, out, formula="sigmoid(g) shared(x)", dtype=dtype, saved=saved)
        dtype, note, op = w.joint(combined, given), "Used by every token.", "add the shared MLP"
        yield Step(":with_shared", op, out, formula="y + shared(x)", note=note, dtype=dtype)

    def forward(self, net: Any, x: Any, ctx: Any) -> Any:
        kept, experts = net.router(x, ctx)
        groups = ctx.group(experts, self.router.n_experts)
        out = net.experts(ctx.mark(net, "sent", groups.send(x)), ctx, groups)
        combined = ctx.mark(net, "combined", groups.combine(out, kept))
        if not self.shared:
            return combined
        shared = net.shared(x, ctx)
        if self.shared_gate:
            shared = ctx.mark(net, "gated_shared", net.shared_gate(x).sigmoid() * shared)
        return ctx.mark(net, "with_shared", combined + shared)
