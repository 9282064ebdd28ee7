"""gpt-oss (arXiv:2508.10925): attention sinks, every other layer with a window, YaRN, experts with clamped gates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scantling.cards import Card
from scantling.cards.schema import Gated, MoE, RoPE
from scantling.checkpoint.config_keys import Keys
from scantling.checkpoint.config_write import has_all_biases, llama_keys, window_keys
from scantling.checkpoint.family import Family
from scantling.checkpoint.layer_keys import FULL, SLIDING, n_layers, pattern, window, windows
from scantling.checkpoint.names import Alternate, Row, TransposeEach
from scantling.checkpoint.rope_keys import reach, rope, section

_USUAL_SCALING = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _card(keys: Keys) -> dict[str, Any]:
    context, layers = keys.size("max_position_embeddings"), n_layers(keys)
    usual = [FULL if i % 2 else SLIDING for i in range(layers)]
    position = _position(keys, context)
    return {
        "n_layers": layers,
        "d_model": keys.size("hidden_size"),
        "vocab_size": keys.size("vocab_size"),
        "context": reach(position, context),
        "attention": {
            "kind": "multi_head",
            "n_heads": keys.size("num_attention_heads"),
            "n_kv_heads": keys.size("num_key_value_heads"),
            "d_head": keys.size("head_dim"),
            "bias": ["q", "k", "v", "o"] if keys.flag("attention_bias", True) else [],
            "sinks": True,
        },
        "position": position,
        "norm": {"kind": "rmsnorm", "eps": keys.number("rms_norm_eps", 1e-5), "rounded": False},
        "mlp": _experts(keys),
        "pattern": pattern(windows(keys, window(keys, 128), usual)),
        "dropout": {"attention": keys.number("attention_dropout", 0.0)},
    }


def _position(keys: Keys, context: int) -> dict[str, Any]:
    d_head, theta = keys.size("head_dim"), 150000.0
    if keys.raw("rope_parameters") is None and not keys.raw("rope_scaling"):
        values = {**_USUAL_SCALING, "rope_theta": keys.number("rope_theta", theta)}
        return section(keys.where, values, d_head, context)
    return rope(keys, d_head, context, theta=theta)


def _experts(keys: Keys) -> dict[str, Any]:
    keys.only("hidden_act", "silu")
    top_k = keys.size("num_experts_per_tok")
    keys.only("experts_per_token", top_k)
    return {
        "kind": "moe",
        "n_experts": keys.size(keys.spelled("num_local_experts", "num_experts")),
        "top_k": top_k,
        "normalize": False,
        "scores": "top_softmax",
        "bias": True,
        "expert": {
            "kind": "gated",
            "act": "silu",
            "d_ff": keys.size("intermediate_size"),
            "bias": True,
            "clamp": {"limit": keys.number("swiglu_limit", 7.0), "alpha": keys.number("swiglu_alpha", 1.702)},
        },
    }


def _rows(card: Card) -> Sequence[Row]:
    theirs, ours = "model.layers.{i}", "decoder.blocks.{i}"
    experts, part = f"{theirs}.mlp.experts", f"{ours}.mlp.experts"
    fused = (("", ".weight"), ("_bias", ".bias"))
    return (
        Row("model.embed_tokens", "embed"),
        Row(f"{theirs}.input_layernorm", f"{ours}.attn_norm"),
        *(Row(f"{theirs}.self_attn.{p}_proj", f"{ours}.attn.{p}") for p in "qkvo"),
        Row(f"{theirs}.self_attn.sinks", f"{ours}.attn.sinks", suffixes=(("", ""),)),
        Row(f"{theirs}.post_attention_layernorm", f"{ours}.mlp_norm"),
        Row(f"{theirs}.mlp.router", f"{ours}.mlp.router.choose"),
        Row(f"{experts}.gate_up_proj", (f"{part}.gate", f"{part}.up"), Alternate(TransposeEach()), fused),
        Row(f"{experts}.down_proj", f"{part}.down", TransposeEach(), fused),
        Row("model.norm", "decoder.final_norm"),
        Row("lm_head", "head.matrix"),
    )


def _config(card: Card) -> dict[str, Any] | None:
    common, mlp = llama_keys(card), card.mlp
    if common is None or not isinstance(mlp, MoE) or not isinstance(mlp.expert, Gated) or mlp.expert.clamp is None:
        return None
    # Silence about a scaling means the published one.
    scaled = isinstance(card.position, RoPE) and card.position.scaling is not None
    plain = {} if scaled else {"rope_parameters": {"rope_type": "default", "rope_theta": common["rope_theta"]}}
    return {
        "architectures": ["GptOssForCausalLM"],
        **common,
        **plain,
        "hidden_act": "silu",
        "attention_bias": has_all_biases(card),
        "intermediate_size": mlp.expert.d_ff,
        "num_local_experts": mlp.n_experts,
        "num_experts_per_tok": mlp.top_k,
        "swiglu_limit": mlp.expert.clamp.limit,
        "swiglu_alpha": mlp.expert.clamp.alpha,
        **window_keys(card),
    }


FAMILY = Family(
    card=_card,
    config=_config,
    rows=_rows,
    prefix="model.",
    irrelevant=frozenset({"initial_context_length", "output_router_logits", "router_aux_loss_coef"}),
    tied_by_default=False,
)
