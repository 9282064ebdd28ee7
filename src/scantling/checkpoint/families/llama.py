"""Llama (arXiv:2302.13971) and its relatives: RoPE, RMSNorm before each sublayer, gated MLP, no biases by default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scantling.cards import Card
from scantling.cards.schema import Gated, MoE, MultiHead
from scantling.checkpoint.config_keys import Keys
from scantling.checkpoint.config_write import ACTIVATIONS, gated_keys, has_all_biases, llama_keys
from scantling.checkpoint.family import Family
from scantling.checkpoint.names import Row, Stack
from scantling.checkpoint.rope_keys import reach, rope


def _card(keys: Keys) -> dict[str, Any]:
    bias = ["q", "k", "v", "o"] if keys.flag("attention_bias", False) else []
    keys.only("rope_interleaved", False)
    return common(keys, bias) | {"mlp": gated(keys, keys.flag("mlp_bias", False))}


def _windowed(keys: Keys, theta: float, eps: float) -> dict[str, Any]:
    sections = common(keys, [], kv_heads=8, eps=eps, theta=theta)
    sections["attention"]["window"] = keys.optional_size("sliding_window")
    return sections


def _mistral(keys: Keys) -> dict[str, Any]:
    return _windowed(keys, 1e4, 1e-6) | {"mlp": gated(keys, False)}


def _mixtral(keys: Keys) -> dict[str, Any]:
    experts = {
        "kind": "moe",
        "n_experts": keys.size("num_local_experts", 8),
        "top_k": keys.size("num_experts_per_tok", 2),
        "expert": gated(keys, False),
    }
    return _windowed(keys, 1e6, 1e-5) | {"mlp": experts}


def common(
    keys: Keys,
    bias: list[str],
    *,
    kv_heads: int | None = None,
    d_head: int | None = None,
    eps: float = 1e-6,
    theta: float = 1e4,
    trained: int | None = None,
    fraction: float | None = None,
) -> dict[str, Any]:
    """All sections of Llama and its relatives but the MLP; the named arguments are what a missing key means."""
    d_model, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    d_head, context = keys.optional_size("head_dim") or d_head, keys.size("max_position_embeddings")
    position = rope(keys, d_head or d_model // heads, context, theta=theta, trained=trained, fraction=fraction)
    return {
        "n_layers": keys.size("num_hidden_layers"),
        "d_model": d_model,
        "vocab_size": keys.size("vocab_size"),
        "context": reach(position, context),
        "attention": {
            "kind": "multi_head",
            "n_heads": heads,
            # Null is not missing: it means as many as query heads, in every relative.
            "n_kv_heads": keys.optional_size("num_key_value_heads") if "num_key_value_heads" in keys.data else kv_heads,
            "d_head": d_head,
            "bias": bias,
        },
        "position": position,
        "norm": {"kind": "rmsnorm", "eps": keys.number("rms_norm_eps", eps)},
        "dropout": {"attention": keys.number("attention_dropout", 0.0)},
    }


def gated(keys: Keys, bias: bool) -> dict[str, Any]:
    """The gated MLP of one width."""
    return {"kind": "gated", "act": keys.activation("hidden_act"), "d_ff": keys.size("intermediate_size"), "bias": bias}


def rows(card: Card) -> Sequence[Row]:
    """Llama's names; the relatives add theirs."""
    theirs, ours = "model.layers.{i}", "decoder.blocks.{i}"
    return (
        Row("model.embed_tokens", "embed"),
        Row(f"{theirs}.input_layernorm", f"{ours}.attn_norm"),
        *(Row(f"{theirs}.self_attn.{p}_proj", f"{ours}.attn.{p}") for p in "qkvo"),
        Row(f"{theirs}.post_attention_layernorm", f"{ours}.mlp_norm"),
        *(Row(f"{theirs}.mlp.{p}_proj", f"{ours}.mlp.{p}") for p in ("gate", "up", "down")),
        Row("model.norm", "decoder.final_norm"),
        Row("lm_head", "head.matrix"),
    )


def _mixtral_rows(card: Card) -> Sequence[Row]:
    theirs, ours = "model.layers.{i}.block_sparse_moe", "decoder.blocks.{i}.mlp"
    parts = (("w1", "gate"), ("w3", "up"), ("w2", "down"))
    return (
        *rows(card),
        Row(f"{theirs}.gate", f"{ours}.router.choose"),
        *(Row(f"{theirs}.experts.{{e}}.{w}", f"{ours}.experts.{part}", Stack()) for w, part in parts),
    )


def _llama_config(card: Card) -> dict[str, Any] | None:
    common, mlp = llama_keys(card), gated_keys(card)
    if common is None or mlp is None or not isinstance(card.mlp, Gated):
        return None
    biases = {"attention_bias": has_all_biases(card), "mlp_bias": card.mlp.bias}
    return {"architectures": ["LlamaForCausalLM"], **common, **mlp, **biases}


def _mistral_config(card: Card) -> dict[str, Any] | None:
    common, mlp = llama_keys(card), gated_keys(card)
    if common is None or mlp is None or not isinstance(card.attention, MultiHead):
        return None
    return {"architectures": ["MistralForCausalLM"], **common, **mlp, "sliding_window": card.attention.window}


def _mixtral_config(card: Card) -> dict[str, Any] | None:
    common, mlp = llama_keys(card), card.mlp
    if common is None or not isinstance(mlp, MoE) or not isinstance(card.attention, MultiHead):
        return None
    return {
        "architectures": ["MixtralForCausalLM"],
        **common,
        "hidden_act": ACTIVATIONS[mlp.expert.act],
        "intermediate_size": mlp.expert.d_ff,
        "num_local_experts": mlp.n_experts,
        "num_experts_per_tok": mlp.top_k,
        "sliding_window": card.attention.window,
    }


OLD_BUFFERS = (r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)

LLAMA = Family(
    card=_card,
    rows=rows,
    prefix="model.",
    ignored=OLD_BUFFERS,
    irrelevant=frozenset({"is_llama_config"}),
    tied_by_default=False,
    config=_llama_config,
)
MISTRAL = Family(
    card=_mistral,
    rows=rows,
    prefix="model.",
    ignored=OLD_BUFFERS,
    tied_by_default=False,
    config=_mistral_config,
)
MIXTRAL = Family(
    card=_mixtral,
    rows=_mixtral_rows,
    prefix="model.",
    ignored=OLD_BUFFERS,
    irrelevant=frozenset({"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"}),
    tied_by_default=False,
    config=_mixtral_config,
)
