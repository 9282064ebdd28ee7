"""Falcon (arXiv:2311.16867): RoPE or ALiBi, multi-query or grouped KV heads, parallel or sequential sublayers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scantling.cards import Card
from scantling.cards.schema import ALiBi, LayerNorm, MultiHead, Plain, RoPE
from scantling.checkpoint.config_keys import Keys
from scantling.checkpoint.config_write import ACTIVATIONS, rope_keys
from scantling.checkpoint.families.fused import by_head
from scantling.checkpoint.family import Family
from scantling.checkpoint.names import Row
from scantling.checkpoint.rope_keys import reach, rope


def _card(keys: Keys) -> dict[str, Any]:
    hidden = keys.spelled("hidden_size", "n_embed")
    d_model, heads = keys.size(hidden), keys.size("num_attention_heads")
    context = keys.size("max_position_embeddings", 2048)
    keys.only("apply_residual_connection_post_layernorm", False)
    position = rope(keys, d_model // heads, context)
    if keys.flag("alibi", False):
        # Falcon adds slopes times positions, both in bfloat16, before it scales the scores.
        position = {"kind": "alibi", "scaled": True, "rounded": True}
    bias = keys.flag("bias", False)
    residual = _residual(keys)
    hidden_dropout = keys.number("hidden_dropout", 0.0)
    if not residual["parallel"]:
        # Here the original drops attention's update by attention_dropout; a card has one chance for both updates.
        keys.only("attention_dropout", hidden_dropout, *([0] if hidden_dropout == 0 else []))
    return {
        "n_layers": keys.size("num_hidden_layers"),
        "d_model": d_model,
        "vocab_size": keys.size("vocab_size"),
        "context": reach(position, context),
        "attention": {
            "kind": "multi_head",
            "n_heads": heads,
            "n_kv_heads": _kv_heads(keys, heads),
            "bias": ["q", "k", "v", "o"] if bias else [],
        },
        "position": position,
        "norm": {"kind": "layernorm", "eps": keys.number("layer_norm_epsilon", 1e-5)},
        "residual": residual,
        "mlp": {
            "kind": "plain",
            "act": keys.activation("activation", "gelu"),
            "d_ff": keys.size("ffn_hidden_size", 4 * d_model),
            "bias": bias,
        },
        "dropout": {"attention": keys.number("attention_dropout", 0.0), "residual": hidden_dropout},
    }


def _residual(keys: Keys) -> dict[str, bool]:
    if keys.flag("new_decoder_architecture", False):
        keys.only("parallel_attn", True)
        keys.only("num_ln_in_parallel_attn", 1, 2)
        return {"parallel": True, "shared_norm": keys.raw("num_ln_in_parallel_attn", 2) == 1}
    keys.only("num_ln_in_parallel_attn", 1)
    parallel = keys.flag("parallel_attn", True)
    return {"parallel": parallel, "shared_norm": parallel}


def _kv_heads(keys: Keys, heads: int) -> int:
    multi_query, kv_heads = keys.flag("multi_query", True), keys.size("num_kv_heads", heads)
    if keys.flag("new_decoder_architecture", False):
        return kv_heads
    if multi_query:
        return 1
    keys.only("num_kv_heads", heads)
    return heads


def _rows(card: Card) -> Sequence[Row]:
    theirs, ours = "transformer.h.{i}", "decoder.blocks.{i}"
    two_norms = card.residual.parallel and not card.residual.shared_norm
    attn_norm, mlp_norm = ("ln_attn", "ln_mlp") if two_norms else ("input_layernorm", "post_attention_layernorm")
    return (
        Row("transformer.word_embeddings", "embed"),
        Row(f"{theirs}.{attn_norm}", f"{ours}.attn_norm"),
        by_head(card, f"{theirs}.self_attention.query_key_value", f"{ours}.attn"),
        Row(f"{theirs}.self_attention.dense", f"{ours}.attn.o"),
        Row(f"{theirs}.{mlp_norm}", f"{ours}.mlp_norm"),
        Row(f"{theirs}.mlp.dense_h_to_4h", f"{ours}.mlp.up"),
        Row(f"{theirs}.mlp.dense_4h_to_h", f"{ours}.mlp.down"),
        Row("transformer.ln_f", "decoder.final_norm"),
        Row("lm_head", "head.matrix"),
    )


def _config(card: Card) -> dict[str, Any] | None:
    attention, mlp = card.attention, card.mlp
    alibi = {"max_position_embeddings": card.context} if isinstance(card.position, ALiBi) else None
    turns = alibi or rope_keys(card)
    if turns is None or not isinstance(attention, MultiHead) or not isinstance(mlp, Plain):
        return None
    if not isinstance(card.norm, LayerNorm):
        return None
    if isinstance(card.position, RoPE) and card.position.d_rotary != attention.d_head:
        return None
    return {
        "architectures": ["FalconForCausalLM"],
        "vocab_size": card.vocab_size,
        "hidden_size": card.d_model,
        "num_hidden_layers": card.n_layers,
        "num_attention_heads": attention.n_heads,
        "num_kv_heads": attention.n_kv_heads,
        "multi_query": attention.n_kv_heads == 1,
        **_blocks(card, attention),
        "alibi": alibi is not None,
        "bias": mlp.bias,
        "ffn_hidden_size": mlp.d_ff,
        "activation": ACTIVATIONS[mlp.act],
        "layer_norm_epsilon": card.norm.eps,
        "attention_dropout": card.dropout.attention,
        "hidden_dropout": card.dropout.residual,
        **turns,
    }


def _blocks(card: Card, attention: MultiHead) -> dict[str, Any]:
    """How the sublayers of a block lie, which the newer architecture alone can say of any number of KV heads."""
    shared, old = card.residual.shared_norm, attention.n_kv_heads in (1, attention.n_heads)
    new = card.residual.parallel and not (shared and old)
    found: dict[str, Any] = {"parallel_attn": card.residual.parallel, "new_decoder_architecture": new}
    if new:
        return found | {"num_ln_in_parallel_attn": 1 if shared else 2}
    # Here the number of KV heads follows from multi_query.
    return found | {"num_kv_heads": attention.n_heads}


FAMILY = Family(
    card=_card,
    config=_config,
    rows=_rows,
    prefix="transformer.",
    ignored=(r"h\.\d+\.self_attention\.(maybe_)?rotary(_emb)?\.inv_freq",),
)
