"""GPT-NeoX and Pythia (arXiv:2204.06745): partial RoPE, LayerNorm, biases, parallel sublayers with their own norms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scantling.cards import Card
from scantling.cards.schema import LayerNorm, MultiHead, Plain, RoPE
from scantling.checkpoint.config_keys import Keys
from scantling.checkpoint.config_write import ACTIVATIONS, has_all_biases, rope_keys
from scantling.checkpoint.families.fused import by_head
from scantling.checkpoint.family import Family
from scantling.checkpoint.names import Row
from scantling.checkpoint.rope_keys import reach, rope


def _card(keys: Keys) -> dict[str, Any]:
    d_model, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    context = keys.size("max_position_embeddings", 2048)
    own = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
    position = rope(keys, d_model // heads, context, fraction=0.25, spelled=own)
    hidden_dropout = keys.number(keys.spelled("hidden_dropout", "hidden_dropout_prob"), 0.0)
    return {
        "n_layers": keys.size("num_hidden_layers"),
        "d_model": d_model,
        "vocab_size": keys.size("vocab_size"),
        "context": reach(position, context),
        "attention": {
            "kind": "multi_head",
            "n_heads": heads,
            "bias": ["q", "k", "v", "o"] if keys.flag("attention_bias", True) else [],
        },
        "position": position,
        "norm": {"kind": "layernorm", "eps": keys.number("layer_norm_eps", 1e-5)},
        "residual": {"parallel": keys.flag("use_parallel_residual", True)},
        "mlp": {
            "kind": "plain",
            "act": keys.activation("hidden_act", "gelu"),
            "d_ff": keys.size("intermediate_size"),
            "bias": True,
        },
        "dropout": {
            "embedding": hidden_dropout,
            "attention": keys.number(keys.spelled("attention_dropout", "attention_probs_dropout_prob"), 0.0),
            "residual": hidden_dropout,
        },
    }


def _rows(card: Card) -> Sequence[Row]:
    theirs, ours = "gpt_neox.layers.{i}", "decoder.blocks.{i}"
    return (
        Row("gpt_neox.embed_in", "embed"),
        Row(f"{theirs}.input_layernorm", f"{ours}.attn_norm"),
        by_head(card, f"{theirs}.attention.query_key_value", f"{ours}.attn"),
        Row(f"{theirs}.attention.dense", f"{ours}.attn.o"),
        Row(f"{theirs}.post_attention_layernorm", f"{ours}.mlp_norm"),
        Row(f"{theirs}.mlp.dense_h_to_4h", f"{ours}.mlp.up"),
        Row(f"{theirs}.mlp.dense_4h_to_h", f"{ours}.mlp.down"),
        Row("gpt_neox.final_layer_norm", "decoder.final_norm"),
        Row("embed_out", "head.matrix"),
    )


def _config(card: Card) -> dict[str, Any] | None:
    attention, mlp, norm, turns = card.attention, card.mlp, card.norm, rope_keys(card)
    if not isinstance(attention, MultiHead) or not isinstance(mlp, Plain) or not isinstance(norm, LayerNorm):
        return None
    if turns is None or not isinstance(card.position, RoPE) or not attention.d_head or not card.position.d_rotary:
        return None
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "vocab_size": card.vocab_size,
        "hidden_size": card.d_model,
        "num_hidden_layers": card.n_layers,
        "num_attention_heads": attention.n_heads,
        "intermediate_size": mlp.d_ff,
        "hidden_act": ACTIVATIONS[mlp.act],
        "layer_norm_eps": norm.eps,
        "attention_bias": has_all_biases(card),
        "use_parallel_residual": card.residual.parallel,
        "hidden_dropout": card.dropout.residual,
        "attention_dropout": card.dropout.attention,
        "rotary_pct": card.position.d_rotary / attention.d_head,
        "rotary_emb_base": turns.pop("rope_theta"),
        **turns,
    }


FAMILY = Family(
    card=_card,
    config=_config,
    rows=_rows,
    prefix="gpt_neox.",
    ignored=(r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
    irrelevant=frozenset({"classifier_dropout"}),
    renamed=((r"^lm_head\.", "embed_out."),),
    tied_by_default=False,
)
