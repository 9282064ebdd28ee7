"""From a card back to the keys of a config.json, in the spelling that every release of every tool reads.

Families say with these which keys are theirs; whether a config says all that the card says is not decided here but
found out by reading it back.
"""

from __future__ import annotations

from typing import Any

import msgspec

from scantling.cards import Card
from scantling.cards.schema import (
    DynamicScaling,
    Gated,
    Layer,
    LayerNorm,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    MultiHead,
    Plain,
    RMSNorm,
    RoPE,
    Scaling,
    YarnScaling,
)
from scantling.checkpoint.layer_keys import FULL, SLIDING

ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "quick_gelu": "quick_gelu",
    "relu2": "relu2",
    "silu": "silu",
    "tanh": "tanh",
}
"""Our names of activations and theirs."""

FIRST_ACTIVATIONS = ACTIVATIONS | {"gelu_tanh": "gelu_new"}
"""The same as the first families spell them."""

_SCALINGS: dict[type, str] = {
    LinearScaling: "linear",
    DynamicScaling: "dynamic",
    YarnScaling: "yarn",
    Llama3Scaling: "llama3",
    LongRopeScaling: "longrope",
}


def rope_keys(card: Card, interleaved: bool = False) -> dict[str, Any] | None:
    """The base and the scaling in the old spelling, and max_position_embeddings; None for another position.

    Args:
        interleaved: whether the family turns neighbouring channels.
    """
    position = card.position
    if not isinstance(position, RoPE) or position.interleaved != interleaved:
        return None
    scaling = position.scaling
    # Dynamic scaling starts where the config says that the positions end.
    context = scaling.trained_length if isinstance(scaling, DynamicScaling) else card.context
    found: dict[str, Any] = {"max_position_embeddings": context, "rope_theta": position.theta}
    return found if scaling is None else found | {"rope_scaling": _scaling(scaling)}


def _scaling(scaling: Scaling) -> dict[str, Any]:
    keys = {name: value for name, value in msgspec.structs.asdict(scaling).items() if value is not None}
    trained = keys.pop("trained_length", None)
    if trained is not None and not isinstance(scaling, DynamicScaling):
        keys["original_max_position_embeddings"] = trained
    if keys.get("truncate") is True:
        del keys["truncate"]
    return {"rope_type": _SCALINGS[type(scaling)], **keys}


def partial_rope_keys(card: Card, interleaved: bool = False) -> dict[str, Any] | None:
    """The same with the share of each head's channels that is turned."""
    turns, position, attention = rope_keys(card, interleaved), card.position, card.attention
    if turns is None or not isinstance(position, RoPE) or not isinstance(attention, MultiHead):
        return None
    assert position.d_rotary is not None
    assert attention.d_head is not None
    return turns | {"partial_rotary_factor": position.d_rotary / attention.d_head}


def gated_keys(card: Card) -> dict[str, Any] | None:
    """The gated MLP of one width; None for another."""
    mlp = card.mlp
    if not isinstance(mlp, Gated):
        return None
    return {"hidden_act": ACTIVATIONS[mlp.act], "intermediate_size": mlp.d_ff}


def gpt_keys(card: Card) -> dict[str, Any] | None:
    """What GPT-2 and GPT-J have in common; None for a card that is none of theirs."""
    attention, mlp, norm = card.attention, card.mlp, card.norm
    if not isinstance(attention, MultiHead) or not isinstance(mlp, Plain) or not isinstance(norm, LayerNorm):
        return None
    return {
        "vocab_size": card.vocab_size,
        "n_positions": card.context,
        "n_embd": card.d_model,
        "n_layer": card.n_layers,
        "n_head": attention.n_heads,
        "n_inner": mlp.d_ff,
        "activation_function": FIRST_ACTIVATIONS[mlp.act],
        "layer_norm_epsilon": norm.eps,
        "embd_pdrop": card.dropout.embedding,
        "attn_pdrop": card.dropout.attention,
        "resid_pdrop": card.dropout.residual,
    }


def llama_keys(card: Card) -> dict[str, Any] | None:
    """What Llama and all its relatives have in common but the MLP; None for a card that is none of theirs."""
    attention, norm, turns = card.attention, card.norm, rope_keys(card)
    if not isinstance(attention, MultiHead) or not isinstance(norm, RMSNorm) or turns is None:
        return None
    if not isinstance(card.position, RoPE) or card.position.d_rotary != attention.d_head:
        return None
    return {
        "vocab_size": card.vocab_size,
        "hidden_size": card.d_model,
        "num_hidden_layers": card.n_layers,
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads,
        "head_dim": attention.d_head,
        "rms_norm_eps": norm.eps,
        "attention_dropout": card.dropout.attention,
        **turns,
    }


def has_all_biases(card: Card) -> bool:
    """Whether each of the four projections of attention has a shift."""
    return isinstance(card.attention, MultiHead) and set(card.attention.bias) == set("qkvo")


def layers_of(card: Card) -> list[Layer]:
    """What differs in each layer: the pattern, repeated and cut to n_layers."""
    unit = [layer for layer in card.pattern for _ in range(layer.times)] or [Layer()]
    return [unit[i % len(unit)] for i in range(card.n_layers)]


def window_keys(card: Card) -> dict[str, Any]:
    """layer_types, and sliding_window where a layer has one: null would stop originals that prepare both masks."""
    attentions = [layer.attention or card.attention for layer in layers_of(card)]
    windows = [attention.window if isinstance(attention, MultiHead) else None for attention in attentions]
    types = [FULL if window is None else SLIDING for window in windows]
    first = next((window for window in windows if window is not None), None)
    return {"layer_types": types} | ({} if first is None else {"sliding_window": first})
