"""Phi (arXiv:2306.11644, arXiv:2309.05463): parallel sublayers behind one norm, biases everywhere, RoPE on a part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scantling.cards import Card
from scantling.cards.schema import LayerNorm, MultiHead, Plain
from scantling.checkpoint.config_keys import Keys
from scantling.checkpoint.config_write import FIRST_ACTIVATIONS, partial_rope_keys
from scantling.checkpoint.families import llama
from scantling.checkpoint.family import Family
from scantling.checkpoint.names import Row
from scantling.checkpoint.rope_keys import reach, rope


def _card(keys: Keys) -> dict[str, Any]:
    d_model, heads, context = (
        keys.size(name) for name in ("hidden_size", "num_attention_heads", "max_position_embeddings")
    )
    d_head = keys.optional_size("head_dim")
    position = rope(keys, d_head or d_model // heads, context, fraction=0.5)
    eps = keys.number("layer_norm_eps", 1e-5)
    norm = {"kind": "layernorm", "eps": eps, "bias": True}
    return {
        "n_layers": keys.size("num_hidden_layers"),
        "d_model": d_model,
        "vocab_size": keys.size("vocab_size"),
        "context": reach(position, context),
        "attention": {
            "kind": "multi_head",
            "n_heads": heads,
            "n_kv_heads": keys.optional_size("num_key_value_heads"),
            "d_head": d_head,
            "bias": ["q", "k", "v", "o"],
            "qk_norm": norm if keys.flag("qk_layernorm", False) else None,
        },
        "position": position,
        "norm": {"kind": "layernorm", "eps": eps},
        "residual": {"parallel": True, "shared_norm": True},
        "mlp": {
            "kind": "plain",
            "act": keys.activation("hidden_act"),
            "d_ff": keys.size("intermediate_size"),
            "bias": True,
        },
        "head": {"bias": True},
        "dropout": {
            "embedding": keys.number("embd_pdrop", 0.0),
            "attention": keys.number("attention_dropout", 0.0),
            "residual": keys.number("resid_pdrop", 0.0),
        },
    }


def _rows(card: Card) -> Sequence[Row]:
    theirs, ours = "model.layers.{i}", "decoder.blocks.{i}"
    return (
        Row("model.embed_tokens", "embed"),
        Row(f"{theirs}.input_layernorm", f"{ours}.attn_norm"),
        *(Row(f"{theirs}.self_attn.{p}_proj", f"{ours}.attn.{p}") for p in "qkv"),
        *(Row(f"{theirs}.self_attn.{p}_layernorm", f"{ours}.attn.{p}_norm") for p in "qk"),
        Row(f"{theirs}.self_attn.dense", f"{ours}.attn.o"),
        Row(f"{theirs}.mlp.fc1", f"{ours}.mlp.up"),
        Row(f"{theirs}.mlp.fc2", f"{ours}.mlp.down"),
        Row("model.final_layernorm", "decoder.final_norm"),
        # A tied head has a bias of its own and no matrix.
        Row("lm_head", "head" if card.tied else "head.matrix"),
    )


def _config(card: Card) -> dict[str, Any] | None:
    attention, mlp, turns = card.attention, card.mlp, partial_rope_keys(card)
    if turns is None or not isinstance(attention, MultiHead) or not isinstance(mlp, Plain):
        return None
    if not isinstance(card.norm, LayerNorm):
        return None
    return {
        "architectures": ["PhiForCausalLM"],
        "vocab_size": card.vocab_size,
        "hidden_size": card.d_model,
        "num_hidden_layers": card.n_layers,
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads,
        "head_dim": attention.d_head,
        "intermediate_size": mlp.d_ff,
        "hidden_act": FIRST_ACTIVATIONS[mlp.act],
        "layer_norm_eps": card.norm.eps,
        "qk_layernorm": attention.qk_norm is not None,
        "embd_pdrop": card.dropout.embedding,
        "attention_dropout": card.dropout.attention,
        "resid_pdrop": card.dropout.residual,
        **turns,
    }


FAMILY = Family(
    card=_card,
    config=_config,
    rows=_rows,
    prefix="model.",
    ignored=llama.OLD_BUFFERS,
    tied_by_default=False,
)
