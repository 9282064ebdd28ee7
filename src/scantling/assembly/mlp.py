"""MLPs and experts by the card."""

from __future__ import annotations

from scantling.cards import schema
from scantling.parts.mlp import MLP, GatedMLP
from scantling.parts.moe import MoE, Router


def mlp(
    d_model: int, spec: schema.Plain | schema.Gated | schema.MoE, n_experts: int | None = None
) -> MLP | GatedMLP | MoE:
    """An MLP, or as many as there are experts; or a router with its own."""
    if isinstance(spec, schema.MoE):
        experts = mlp(d_model, spec.expert, spec.n_experts)
        shared = None if spec.shared is None else mlp(d_model, spec.shared)
        assert not isinstance(experts, MoE)
        assert not isinstance(shared, MoE)
        return MoE(_router(d_model, spec), experts, shared, spec.shared_gate)
    assert spec.d_ff is not None
    if isinstance(spec, schema.Plain):
        return MLP(d_model, spec.d_ff, spec.act, spec.bias, n_experts)
    clamp = None if spec.clamp is None else (spec.clamp.limit, spec.clamp.alpha)
    return GatedMLP(d_model, spec.d_ff, spec.act, spec.bias, n_experts, clamp)


def _router(d_model: int, spec: schema.MoE) -> Router:
    return Router(
        d_model=d_model,
        n_experts=spec.n_experts,
        top_k=spec.top_k,
        normalize=spec.normalize,
        scores=spec.scores,
        bias=spec.bias,
        selection_bias=spec.selection_bias,
        scale=spec.scale,
        groups=spec.groups,
        top_groups=spec.top_groups,
        group_score=spec.group_score,
    )
