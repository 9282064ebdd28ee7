"""Mixture of experts: a router sends each token to a few of many MLPs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from scantling.parts.leaf import Linear
from scantling.parts.mlp import MLP, GatedMLP
from scantling.parts.part import Part, Step, Workload


@dataclass(frozen=True)
class Router(Part):
    """Softmax over experts, the best `top_k` kept (Jiang et al., arXiv:2401.04088, section 2.1).

    Attributes:
        normalize: the kept weights are divided by their sum.
    """

    d_model: int
    n_experts: int
    top_k: int
    normalize: bool = True
    role = "router"

    def children(self) -> Mapping[str, Part]:
        return {"choose": Linear(self.d_model, self.n_experts)}

    def steps(self, w: Workload) -> Iterator[Step]:
        yield from self.steps_of("choose", w, "router", "Scores every expert for each token.")
        formula = f"top-{self.top_k} of softmax" + (", divided by their sum" if self.normalize else "")
        yield Step(":kept", "choose experts", (*w.rows, self.top_k), formula=formula)

    def forward(self, net: Any, x: Any, ctx: Any) -> tuple[Any, Any]:
        """x (B, T, d) -> weights (B, T, top_k) in x's dtype, expert ids (B, T, top_k)."""
        kept, experts = net.choose(x).float().softmax(-1).topk(self.top_k, -1)
        if self.normalize:
            kept = kept / kept.sum(-1, keepdim=True)
        return ctx.mark(net, "kept", kept.to(x.dtype)), experts


@dataclass(frozen=True)
class MoE(Part):
    """sum over the chosen experts of weight * expert(x); no token is dropped.

    Rows are sorted by expert, so every shape is static: T * top_k rows whatever the router decides.
    """

    router: Router
    experts: MLP | GatedMLP

    def __post_init__(self) -> None:
        assert self.experts.n_experts == self.router.n_experts

    def children(self) -> Mapping[str, Part]:
        return {"router": self.router, "experts": self.experts}

    def idle_params(self) -> int:
        router = self.router
        return self.experts.params // router.n_experts * (router.n_experts - router.top_k)

    def steps(self, w: Workload) -> Iterator[Step]:
        sent = math.prod(w.rows) * self.router.top_k
        yield from self.steps_of("router", w)
        note = "Each token once per chosen expert, sorted by expert."
        yield Step(":sent", "send to experts", (sent, self.router.d_model), formula="x[order]", note=note)
        yield from self.steps_of("experts", replace(w, lead=(sent,)))
        note = "Each token's expert outputs, weighted and added."
        yield Step(":combined", "combine", (*w.rows, self.router.d_model), formula="sum_e weight_e y_e", note=note)

    def forward(self, net: Any, x: Any, ctx: Any) -> Any:
        kept, experts = net.router(x, ctx)
        groups = ctx.group(experts, self.router.n_experts)
        out = net.experts(ctx.mark(net, "sent", groups.send(x)), ctx, groups)
        return ctx.mark(net, "combined", groups.combine(out, kept))
