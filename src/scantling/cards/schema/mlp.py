"""What works on each token by itself: plain and gated MLPs, and experts."""

from __future__ import annotations

from typing import Literal, TypeAlias

from scantling.cards.section import Positive, Section, Width

Act: TypeAlias = Literal["relu", "gelu", "gelu_tanh", "quick_gelu", "relu2", "silu", "tanh"]


class Plain(Section, tag_field="kind", tag="plain"):
    """down(act(up(x))).

    Attributes:
        d_ff: width of the hidden layer; default 4 d_model.
        bias: both matrices have a shift.
    """

    act: Act
    d_ff: Width | None = None
    bias: bool = False


class Clamp(Section):
    """gpt-oss's gate: gate at most `limit`, up within it, (up + 1) * gate * sigmoid(alpha * gate)."""

    limit: Positive
    alpha: Positive


class Gated(Section, tag_field="kind", tag="gated"):
    """down(act(gate(x)) * up(x)).

    Attributes:
        d_ff: width of one matrix; default 8 d_model / 3 rounded up to a multiple of 256.
        bias: the three matrices have a shift.
        clamp: default none; with it `act` must be silu.
    """

    act: Act
    d_ff: Width | None = None
    bias: bool = False
    clamp: Clamp | None = None


class MoE(Section, tag_field="kind", tag="moe"):
    """A router and many MLPs.

    Attributes:
        n_experts: MLPs per layer.
        top_k: experts that each token uses.
        normalize: the weights of the chosen experts are divided by their sum.
        expert: what each expert is.
        scores: softmax over all experts, sigmoid of each, or softmax over the chosen ones only (top_softmax).
        bias: the router's matrix has a shift.
        selection_bias: a learned shift that decides who is chosen and not with what weight (DeepSeek V3).
        scale: factor on the weights of the chosen.
        groups: experts in this many groups, of which only `top_groups` are looked at; default one.
        group_score: a group counts by its best expert (max) or by its two best (top2).
        shared: an MLP that every token uses besides; default none.
        shared_gate: a learned number from 0 to 1 per token on what the shared MLP gives (Qwen 1.5 MoE).
    """

    n_experts: Width
    top_k: Width
    expert: Plain | Gated
    normalize: bool = True
    scores: Literal["softmax", "sigmoid", "top_softmax"] = "softmax"
    bias: bool = False
    selection_bias: bool = False
    scale: Positive = 1.0
    groups: Width = 1
    top_groups: Width = 1
    group_score: Literal["max", "top2"] = "max"
    shared: Plain | Gated | None = None
    shared_gate: bool = False
