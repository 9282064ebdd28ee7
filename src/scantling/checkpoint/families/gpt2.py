"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm, biases, one fused and transposed QKV matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scantling.cards import Card
from scantling.cards.schema import Learned, MultiHead
from scantling.checkpoint.config_keys import Keys
from scantling.checkpoint.config_write import gpt_keys
from scantling.checkpoint.family import Family
from scantling.checkpoint.names import Row, Split, Transpose


def dropout(keys: Keys, usual: float) -> dict[str, float]:
    """The section of GPT-1, GPT-2 and GPT-J, whose config without a key means `usual`."""
    names = {"embedding": "embd_pdrop", "attention": "attn_pdrop", "residual": "resid_pdrop"}
    return {ours: keys.number(theirs, usual) for ours, theirs in names.items()}


def _card(keys: Keys) -> dict[str, Any]:
    d_model = keys.size("n_embd", 768)
    keys.only("add_cross_attention", False)
    keys.only("reorder_and_upcast_attn", False)
    keys.only("n_ctx", keys.size("n_positions", 1024))
    attention = {
        "kind": "multi_head",
        "n_heads": keys.size("n_head", 12),
        "bias": ["q", "k", "v", "o"],
        "scale_by_layer": keys.flag("scale_attn_by_inverse_layer_idx", False),
    }
    if not keys.flag("scale_attn_weights", True):
        attention["scale"] = 1.0
    return {
        "n_layers": keys.size("n_layer", 12),
        "d_model": d_model,
        "vocab_size": keys.size("vocab_size", 50257),
        "context": keys.size("n_positions", 1024),
        "attention": attention,
        "position": {"kind": "learned"},
        "norm": {"kind": "layernorm", "eps": keys.number("layer_norm_epsilon", 1e-5)},
        "mlp": {
            "kind": "plain",
            "act": keys.activation("activation_function"),
            "d_ff": keys.optional_size("n_inner") or 4 * d_model,
            "bias": True,
        },
        "dropout": dropout(keys, 0.1),
    }


def _rows(card: Card) -> Sequence[Row]:
    theirs, ours = "transformer.h.{i}", "decoder.blocks.{i}"
    return (
        Row("transformer.wte", "embed"),
        Row("transformer.wpe", "decoder.position.table"),
        Row(f"{theirs}.ln_1", f"{ours}.attn_norm"),
        Row(f"{theirs}.attn.c_attn", tuple(f"{ours}.attn.{p}" for p in "qkv"), Split(Transpose())),
        Row(f"{theirs}.attn.c_proj", f"{ours}.attn.o", Transpose()),
        Row(f"{theirs}.ln_2", f"{ours}.mlp_norm"),
        Row(f"{theirs}.mlp.c_fc", f"{ours}.mlp.up", Transpose()),
        Row(f"{theirs}.mlp.c_proj", f"{ours}.mlp.down", Transpose()),
        Row("transformer.ln_f", "decoder.final_norm"),
        Row("lm_head", "head.matrix"),
    )


def _config(card: Card) -> dict[str, Any] | None:
    attention, common = card.attention, gpt_keys(card)
    if common is None or not isinstance(attention, MultiHead) or not isinstance(card.position, Learned):
        return None
    return {
        "architectures": ["GPT2LMHeadModel"],
        **common,
        "scale_attn_weights": attention.scale is None,
        "scale_attn_by_inverse_layer_idx": attention.scale_by_layer,
    }


FAMILY = Family(
    card=_card,
    config=_config,
    rows=_rows,
    prefix="transformer.",
    ignored=(r"h\.\d+\.attn\.(bias|masked_bias)",),
    irrelevant=frozenset(
        {
            "n_special",
            "predict_special_tokens",
            "summary_activation",
            "summary_first_dropout",
            "summary_proj_to_labels",
            "summary_type",
            "summary_use_proj",
        }
    ),
)
