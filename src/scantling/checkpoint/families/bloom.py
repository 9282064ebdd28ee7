"""BLOOM (arXiv:2211.05100): ALiBi, a norm on the embeddings, LayerNorm, biases everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scantling.cards import Card
from scantling.cards.schema import ALiBi, LayerNorm, MultiHead
from scantling.checkpoint.config_keys import Keys
from scantling.checkpoint.families.fused import by_head
from scantling.checkpoint.family import Family
from scantling.checkpoint.names import Row


def _card(keys: Keys) -> dict[str, Any]:
    d_model = keys.size(keys.spelled("hidden_size", "n_embed"))
    norm = {"kind": "layernorm", "eps": keys.number("layer_norm_epsilon", 1e-5)}
    keys.only("n_inner", 4 * d_model)
    keys.only("skip_bias_add_qkv", False)
    if keys.size("pretraining_tp", 1) > 1:
        # The original then sums its outputs slice by slice and forgets their biases.
        keys.only("slow_but_exact", False)
    return {
        "n_layers": keys.size(keys.spelled("n_layer", "num_hidden_layers")),
        "d_model": d_model,
        "vocab_size": keys.size("vocab_size"),
        # ALiBi sets no limit; every BLOOM was trained at 2048.
        "context": keys.size("seq_length", 2048),
        "attention": {
            "kind": "multi_head",
            "n_heads": keys.size(keys.spelled("n_head", "num_attention_heads")),
            "bias": ["q", "k", "v", "o"],
        },
        "position": {"kind": "alibi"},
        "norm": norm,
        "residual": {"from_norm": keys.flag("apply_residual_connection_post_layernorm", False)},
        "mlp": {"kind": "plain", "act": "gelu_tanh", "d_ff": 4 * d_model, "bias": True},
        "embedding": {"norm": norm},
        "dropout": {
            "attention": keys.number("attention_dropout", 0.0),
            "residual": keys.number("hidden_dropout", 0.0),
        },
    }


def _rows(card: Card) -> Sequence[Row]:
    theirs, ours = "transformer.h.{i}", "decoder.blocks.{i}"
    return (
        Row("transformer.word_embeddings", "embed"),
        Row("transformer.word_embeddings_layernorm", "decoder.embed_norm"),
        Row(f"{theirs}.input_layernorm", f"{ours}.attn_norm"),
        by_head(card, f"{theirs}.self_attention.query_key_value", f"{ours}.attn"),
        Row(f"{theirs}.self_attention.dense", f"{ours}.attn.o"),
        Row(f"{theirs}.post_attention_layernorm", f"{ours}.mlp_norm"),
        Row(f"{theirs}.mlp.dense_h_to_4h", f"{ours}.mlp.up"),
        Row(f"{theirs}.mlp.dense_4h_to_h", f"{ours}.mlp.down"),
        Row("transformer.ln_f", "decoder.final_norm"),
        Row("lm_head", "head.matrix"),
    )


def _config(card: Card) -> dict[str, Any] | None:
    if not isinstance(card.attention, MultiHead) or not isinstance(card.norm, LayerNorm):
        return None
    if not isinstance(card.position, ALiBi):
        return None
    return {
        "architectures": ["BloomForCausalLM"],
        "vocab_size": card.vocab_size,
        "hidden_size": card.d_model,
        "n_layer": card.n_layers,
        "n_head": card.attention.n_heads,
        "seq_length": card.context,
        "layer_norm_epsilon": card.norm.eps,
        "apply_residual_connection_post_layernorm": card.residual.from_norm,
        "attention_dropout": card.dropout.attention,
        "hidden_dropout": card.dropout.residual,
    }


FAMILY = Family(
    card=_card,
    config=_config,
    rows=_rows,
    prefix="transformer.",
    irrelevant=frozenset(
        {
            # How the training code ran, not what it computed.
            "attention_softmax_in_fp32",
            "bias_dropout_fusion",
            "masked_softmax_fusion",
            "offset_alibi",
            "skip_bias_add",
            "slow_but_exact",
        }
    ),
)
