"""DeepSeek V2 (arXiv:2405.04434) and V3 (arXiv:2412.19437): latent attention, many small experts and shared ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scantling.cards import Card
from scantling.cards.schema import Gated, Latent, MoE, RMSNorm, RoPE
from scantling.checkpoint import layer_keys
from scantling.checkpoint.config_keys import Keys
from scantling.checkpoint.config_write import ACTIVATIONS, layers_of, rope_keys
from scantling.checkpoint.families.llama import gated
from scantling.checkpoint.family import Family
from scantling.checkpoint.names import Row, Stack
from scantling.checkpoint.rope_keys import rope

_LATENT_EPS = 1e-6
"""Of the norms on the latents, whatever rms_norm_eps says of the others."""


def _v2(keys: Keys) -> dict[str, Any]:
    # The published code scales no normalised weights and transformers normalises none, so they part ways here.
    keys.only("norm_topk_prob", False)
    keys.only("scoring_func", "softmax")
    keys.only("mlp_bias", False)
    experts = _experts(keys, shared=2) | {"normalize": False, "scale": keys.number("routed_scaling_factor", 1.0)}
    if _method(keys) == "group_limited_greedy":
        experts |= {"groups": keys.size("n_group"), "top_groups": keys.size("topk_group"), "group_score": "max"}
    return _common(keys, experts, interleaved=True, dense=0)


def _v3(keys: Keys) -> dict[str, Any]:
    keys.only("scoring_func", "sigmoid")
    keys.only("topk_method", "noaux_tc")
    keys.size("num_nextn_predict_layers", 1, least=0)
    experts = _experts(keys, shared=1) | {
        "normalize": keys.flag("norm_topk_prob", True),
        "scores": "sigmoid",
        "selection_bias": True,
        "scale": keys.number("routed_scaling_factor", 2.5),
        "groups": keys.size("n_group", 8),
        "top_groups": keys.size("topk_group", 4),
        "group_score": "top2",
    }
    return _common(keys, experts, interleaved=keys.flag("rope_interleave", True), dense=3)


def _method(keys: Keys) -> Any:
    keys.only("topk_method", "greedy", "group_limited_greedy")
    return keys.raw("topk_method", "greedy")


def _experts(keys: Keys, shared: int) -> dict[str, Any]:
    """Routed and shared experts; `shared` is their number where the config is silent."""
    keys.only("moe_layer_freq", 1)
    d_ff = keys.size("moe_intermediate_size")
    expert = gated(keys, False) | {"d_ff": d_ff}
    n_shared = _or_null(keys, "n_shared_experts", shared)
    return {
        "kind": "moe",
        "n_experts": keys.size("n_routed_experts"),
        "top_k": keys.size("num_experts_per_tok"),
        "expert": expert,
        # One MLP as wide as all shared experts together computes what they compute side by side.
        "shared": None if n_shared is None else {**expert, "d_ff": n_shared * d_ff},
    }


def _common(keys: Keys, experts: dict[str, Any], interleaved: bool, dense: int) -> dict[str, Any]:
    """All sections; `dense` is the number of first layers with a plain MLP where the config is silent."""
    heads, d_nope, d_rope = (keys.size(k) for k in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim"))
    for name, only in (("num_key_value_heads", heads), ("head_dim", d_rope), ("qk_head_dim", d_nope + d_rope)):
        keys.only(name, only)
    keys.only("attention_bias", False)
    n_layers = layer_keys.n_layers(keys)
    n_dense = min(keys.size("first_k_dense_replace", dense, least=0), n_layers)
    mlp = gated(keys, False)
    layers = [{"mlp": mlp} if i < n_dense else {} for i in range(n_layers)]
    context = keys.size("max_position_embeddings")
    return {
        "n_layers": n_layers,
        "d_model": keys.size("hidden_size"),
        "vocab_size": keys.size("vocab_size"),
        "context": context,
        "attention": {
            "kind": "latent",
            "n_heads": heads,
            "kv_rank": keys.size("kv_lora_rank"),
            "q_rank": _or_null(keys, "q_lora_rank", 1536),
            "d_nope": d_nope,
            "d_rope": d_rope,
            "d_value": keys.size("v_head_dim"),
            "eps": _LATENT_EPS,
        },
        "position": {**rope(keys, d_rope, context), "interleaved": interleaved},
        "norm": {"kind": "rmsnorm", "eps": keys.number("rms_norm_eps", 1e-6)},
        "mlp": mlp if n_dense == n_layers else experts,
        "pattern": [] if n_dense == n_layers else layer_keys.pattern(layers),
        "dropout": {"attention": keys.number("attention_dropout", 0.0)},
    }


def _or_null(keys: Keys, name: str, silent: int) -> int | None:
    """A size; None where the config says null, `silent` where it says nothing."""
    return keys.optional_size(name) if name in keys.data else silent


def _rows(card: Card) -> Sequence[Row]:
    theirs, ours = "model.layers.{i}", "decoder.blocks.{i}"
    attention = {
        "q_proj": "q",
        "q_a_proj": "q_down",
        "q_a_layernorm": "q_norm",
        "q_b_proj": "q_up",
        "kv_a_proj_with_mqa": "kv_down",
        "kv_a_layernorm": "kv_norm",
        "kv_b_proj": "kv_up",
        "o_proj": "o",
    }
    mlp = ("gate", "up", "down")
    return (
        Row("model.embed_tokens", "embed"),
        Row(f"{theirs}.input_layernorm", f"{ours}.attn_norm"),
        *(Row(f"{theirs}.self_attn.{name}", f"{ours}.attn.{part}") for name, part in attention.items()),
        Row(f"{theirs}.post_attention_layernorm", f"{ours}.mlp_norm"),
        *(Row(f"{theirs}.mlp.{p}_proj", f"{ours}.mlp.{p}") for p in mlp),
        Row(f"{theirs}.mlp.gate", f"{ours}.mlp.router.choose"),
        Row(
            f"{theirs}.mlp.gate",
            f"{ours}.mlp.router",
            suffixes=((".e_score_correction_bias", ".selection_bias"),),
        ),
        *(Row(f"{theirs}.mlp.experts.{{e}}.{p}_proj", f"{ours}.mlp.experts.{p}", Stack()) for p in mlp),
        *(Row(f"{theirs}.mlp.shared_experts.{p}_proj", f"{ours}.mlp.shared.{p}") for p in mlp),
        Row("model.norm", "decoder.final_norm"),
        Row("lm_head", "head.matrix"),
    )


def _v2_config(card: Card) -> dict[str, Any] | None:
    common, mlp = _common_config(card, interleaved=True), card.mlp
    if common is None or not isinstance(mlp, MoE):
        return None
    method = {"topk_method": "greedy"} if mlp.groups == 1 else {"topk_method": "group_limited_greedy", **_groups(mlp)}
    return {"architectures": ["DeepseekV2ForCausalLM"], **common, "scoring_func": "softmax", **method}


def _v3_config(card: Card) -> dict[str, Any] | None:
    interleaved = isinstance(card.position, RoPE) and card.position.interleaved
    common, mlp = _common_config(card, interleaved), card.mlp
    if common is None or not isinstance(mlp, MoE):
        return None
    own = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 0}
    turns = {"rope_interleave": interleaved}
    return {"architectures": ["DeepseekV3ForCausalLM"], **common, **own, **_groups(mlp), **turns}


def _groups(mlp: MoE) -> dict[str, Any]:
    return {"n_group": mlp.groups, "topk_group": mlp.top_groups}


def _common_config(card: Card, interleaved: bool) -> dict[str, Any] | None:
    attention, mlp, turns = card.attention, card.mlp, rope_keys(card, interleaved)
    if turns is None or not isinstance(attention, Latent) or not isinstance(mlp, MoE):
        return None
    dense = [layer.mlp for layer in layers_of(card) if isinstance(layer.mlp, Gated)]
    if not isinstance(card.norm, RMSNorm) or mlp.expert.d_ff is None:
        return None
    shared = 0 if mlp.shared is None or mlp.shared.d_ff is None else mlp.shared.d_ff // mlp.expert.d_ff
    return {
        "vocab_size": card.vocab_size,
        "hidden_size": card.d_model,
        "num_hidden_layers": card.n_layers,
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_heads,
        "kv_lora_rank": attention.kv_rank,
        "q_lora_rank": attention.q_rank,
        "qk_nope_head_dim": attention.d_nope,
        "qk_rope_head_dim": attention.d_rope,
        "v_head_dim": attention.d_value,
        "hidden_act": ACTIVATIONS[mlp.expert.act],
        "intermediate_size": dense[0].d_ff if dense else mlp.expert.d_ff,
        "first_k_dense_replace": len(dense),
        "n_routed_experts": mlp.n_experts,
        "num_experts_per_tok": mlp.top_k,
        "n_shared_experts": shared or None,
        "moe_intermediate_size": mlp.expert.d_ff,
        "norm_topk_prob": mlp.normalize,
        "routed_scaling_factor": mlp.scale,
        "rms_norm_eps": card.norm.eps,
        "attention_dropout": card.dropout.attention,
        **turns,
    }


_TRAINING = frozenset({"aux_loss_alpha", "seq_aux", "output_router_logits", "router_aux_loss_coef", "ep_size"})

V2 = Family(
    card=_v2,
    config=_v2_config,
    rows=_rows,
    prefix="model.",
    irrelevant=_TRAINING | {"n_group", "topk_group"},
    tied_by_default=False,
)
V3 = Family(
    card=_v3,
    config=_v3_config,
    rows=_rows,
    prefix="model.",
    irrelevant=_TRAINING,
    tied_by_default=False,
    extra_layers="num_nextn_predict_layers",
)
