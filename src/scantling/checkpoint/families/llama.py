"""Llama (arXiv:2302.13971) and its relatives: RoPE, RMSNorm before each sublayer, gated MLP, no biases by default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scantling.cards import Card
from scantling.checkpoint.config_keys import Keys
from scantling.checkpoint.family import Family
from scantling.checkpoint.names import Row, Stack
from scantling.checkpoint.rope_keys import rope


def _card(keys: Keys) -> dict[str, Any]:
    bias = ["q", "k", "v", "o"] if keys.flag("attention_bias", False) else []
    keys.only("rope_interleaved", False)
    return _common(keys, bias) | {"mlp": _gated(keys, keys.flag("mlp_bias", False))}


def _windowed(keys: Keys) -> dict[str, Any]:
    sections = _common(keys, [])
    sections["attention"]["window"] = keys.optional_size("sliding_window")
    return sections


def _mistral(keys: Keys) -> dict[str, Any]:
    return _windowed(keys) | {"mlp": _gated(keys, False)}


def _mixtral(keys: Keys) -> dict[str, Any]:
    experts = {
        "kind": "moe",
        "n_experts": keys.size("num_local_experts", 8),
        "top_k": keys.size("num_experts_per_tok", 2),
        "expert": _gated(keys, False),
    }
    return _windowed(keys) | {"mlp": experts}


def _common(keys: Keys, bias: list[str]) -> dict[str, Any]:
    d_model, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    d_head, context = keys.optional_size("head_dim"), keys.size("max_position_embeddings")
    position = rope(keys, d_head or d_model // heads, context)
    scaling = position.get("scaling", {})
    return {
        "n_layers": keys.size("num_hidden_layers"),
        "d_model": d_model,
        "vocab_size": keys.size("vocab_size"),
        # Dynamic scaling starts where the trained length ends.
        "context": int(context * scaling["factor"]) if scaling.get("kind") == "dynamic" else context,
        "attention": {
            "kind": "multi_head",
            "n_heads": heads,
            "n_kv_heads": keys.optional_size("num_key_value_heads"),
            "d_head": d_head,
            "bias": bias,
        },
        "position": position,
        "norm": {"kind": "rmsnorm", "eps": keys.number("rms_norm_eps", 1e-6)},
        "dropout": {"attention": keys.number("attention_dropout", 0.0)},
    }


def _gated(keys: Keys, bias: bool) -> dict[str, Any]:
    return {"kind": "gated", "act": keys.activation("hidden_act"), "d_ff": keys.size("intermediate_size"), "bias": bias}


def _rows(card: Card) -> Sequence[Row]:
    theirs, ours = "model.layers.{i}", "decoder.blocks.{i}"
    dense = [Row(f"{theirs}.mlp.{p}_proj", f"{ours}.mlp.{p}") for p in ("gate", "up", "down")]
    sparse = [Row(f"{theirs}.block_sparse_moe.gate", f"{ours}.mlp.router.choose")]
    for theirs_w, part in (("w1", "gate"), ("w3", "up"), ("w2", "down")):
        expert = f"{theirs}.block_sparse_moe.experts.{{e}}.{theirs_w}"
        sparse.append(Row(expert, f"{ours}.mlp.experts.{part}", Stack()))
    return (
        Row("model.embed_tokens", "embed"),
        Row(f"{theirs}.input_layernorm", f"{ours}.attn_norm"),
        *(Row(f"{theirs}.self_attn.{p}_proj", f"{ours}.attn.{p}") for p in "qkvo"),
        Row(f"{theirs}.post_attention_layernorm", f"{ours}.mlp_norm"),
        *dense,
        *sparse,
        Row("model.norm", "decoder.final_norm"),
        Row("lm_head", "head.matrix"),
    )


_OLD_BUFFERS = (r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)

LLAMA = Family(
    card=_card,
    rows=_rows,
    prefix="model.",
    ignored=_OLD_BUFFERS,
    irrelevant=frozenset({"is_llama_config"}),
    tied_by_default=False,
)
MISTRAL = Family(card=_mistral, rows=_rows, prefix="model.", ignored=_OLD_BUFFERS, tied_by_default=False)
MIXTRAL = Family(
    card=_mixtral,
    rows=_rows,
    prefix="model.",
    ignored=_OLD_BUFFERS,
    irrelevant=frozenset({"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"}),
    tied_by_default=False,
)
