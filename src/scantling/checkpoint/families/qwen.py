"""Qwen 2 (arXiv:2407.10671), its mixtures, and Qwen 3 (arXiv:2505.09388): Llama with biases on q, k, v or QK-norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scantling.cards import Card
from scantling.cards.schema import Gated, MoE, MultiHead
from scantling.checkpoint import layer_keys
from scantling.checkpoint.config_keys import Keys
from scantling.checkpoint.config_write import (
    ACTIVATIONS,
    gated_keys,
    has_all_biases,
    layers_of,
    llama_keys,
    window_keys,
)
from scantling.checkpoint.families import llama
from scantling.checkpoint.family import Family
from scantling.checkpoint.layer_keys import FULL, SLIDING
from scantling.checkpoint.names import Row, Stack


def _qwen2(keys: Keys) -> dict[str, Any]:
    return _dense(keys, llama.common(keys, ["q", "k", "v"], kv_heads=32))


def _qwen3(keys: Keys) -> dict[str, Any]:
    return _dense(keys, _normed(keys, kv_heads=32, d_head=128))


def _qwen2_moe(keys: Keys) -> dict[str, Any]:
    bias = ["q", "k", "v"] if keys.flag("qkv_bias", True) else []
    sections, window = llama.common(keys, bias, kv_heads=16), _window(keys)
    sparse = {
        **_experts(keys, n_experts=60, top_k=4, d_ff=1408),
        "shared": llama.gated(keys, False) | {"d_ff": keys.size("shared_expert_intermediate_size", 5632)},
        "shared_gate": True,
    }
    # Every other one of the layers before max_window_layers slides.
    start = keys.size("max_window_layers", 28, least=0)
    n_layers = layer_keys.n_layers(keys)
    usual = [SLIDING if window and i < start and not i % 2 else FULL for i in range(n_layers)]
    reach = layer_keys.windows(keys, window, usual)
    return sections | _mixed(keys, llama.gated(keys, False), sparse, reach)


def _qwen3_moe(keys: Keys) -> dict[str, Any]:
    sections = _normed(keys, kv_heads=4)
    if (window := _window(keys)) is not None:
        # Some releases of the original let every layer slide, some only those from max_window_layers on.
        keys.only("max_window_layers", 0)
        sections["attention"]["window"] = window
    sparse = _experts(keys, n_experts=128, top_k=8, d_ff=768)
    return sections | _mixed(keys, llama.gated(keys, False), sparse, [{}] * layer_keys.n_layers(keys))


def _mixed(
    keys: Keys, dense: dict[str, Any], sparse: dict[str, Any], layers: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """The MLP and the pattern of layers of which some are dense; `layers` is what else differs in each."""
    step, dense_layers = keys.size("decoder_sparse_step", 1), layer_keys.listed(keys, "mlp_only_layers", int) or []
    is_sparse = [i not in dense_layers and (i + 1) % step == 0 for i in range(len(layers))]
    if not any(is_sparse):
        return {"mlp": dense, "pattern": layer_keys.pattern(layers)}
    mixed = [layer if s else {**layer, "mlp": dense} for layer, s in zip(layers, is_sparse, strict=True)]
    return {"mlp": sparse, "pattern": layer_keys.pattern(mixed)}


def _dense(keys: Keys, sections: dict[str, Any]) -> dict[str, Any]:
    """The layers before max_window_layers read everything, the others within the window."""
    window, start = _window(keys), keys.size("max_window_layers", 28, least=0)
    usual = [SLIDING if window and i >= start else FULL for i in range(layer_keys.n_layers(keys))]
    pattern = layer_keys.pattern(layer_keys.windows(keys, window, usual))
    return sections | {"mlp": llama.gated(keys, False), "pattern": pattern}


def _normed(keys: Keys, **missing: int) -> dict[str, Any]:
    bias = ["q", "k", "v", "o"] if keys.flag("attention_bias", False) else []
    sections = llama.common(keys, bias, **missing)
    sections["attention"]["qk_norm"] = {"kind": "rmsnorm", "eps": sections["norm"]["eps"]}
    return sections


def _window(keys: Keys) -> int | None:
    if keys.flag("use_sliding_window", False):
        return layer_keys.window(keys, 4096)
    if keys.raw("sliding_window") is not None:
        # A window that is not in use is also written as 0.
        keys.size("sliding_window", least=0)
    return None


def _experts(keys: Keys, n_experts: int, top_k: int, d_ff: int) -> dict[str, Any]:
    """The mixture; the numbers are those of a silent config."""
    return {
        "kind": "moe",
        "n_experts": keys.size(keys.spelled("num_experts", "num_local_experts"), n_experts),
        "top_k": keys.size("num_experts_per_tok", top_k),
        "normalize": keys.flag("norm_topk_prob", False),
        "expert": llama.gated(keys, False) | {"d_ff": keys.size("moe_intermediate_size", d_ff)},
    }


def _rows(card: Card) -> Sequence[Row]:
    theirs, ours = "model.layers.{i}", "decoder.blocks.{i}"
    expert = f"{theirs}.mlp.experts.{{e}}"
    return (
        *llama.rows(card),
        *(Row(f"{theirs}.self_attn.{p}_norm", f"{ours}.attn.{p}_norm") for p in "qk"),
        Row(f"{theirs}.mlp.gate", f"{ours}.mlp.router.choose"),
        *(Row(f"{expert}.{p}_proj", f"{ours}.mlp.experts.{p}", Stack()) for p in ("gate", "up", "down")),
        *(Row(f"{theirs}.mlp.shared_expert.{p}_proj", f"{ours}.mlp.shared.{p}") for p in ("gate", "up", "down")),
        Row(f"{theirs}.mlp.shared_expert_gate", f"{ours}.mlp.shared_gate"),
    )


def _windows_config(card: Card) -> dict[str, Any]:
    keys = window_keys(card)
    if "sliding_window" not in keys:
        return {"use_sliding_window": False}
    return {"use_sliding_window": True, "max_window_layers": 0, **keys}


def _qwen2_config(card: Card) -> dict[str, Any] | None:
    common, mlp = llama_keys(card), gated_keys(card)
    if common is None or mlp is None:
        return None
    return {"architectures": ["Qwen2ForCausalLM"], **common, **mlp, **_windows_config(card)}


def _qwen3_config(card: Card) -> dict[str, Any] | None:
    common, mlp = llama_keys(card), gated_keys(card)
    if common is None or mlp is None:
        return None
    bias = {"attention_bias": has_all_biases(card)}
    return {"architectures": ["Qwen3ForCausalLM"], **common, **mlp, **bias, **_windows_config(card)}


def _qwen2_moe_config(card: Card) -> dict[str, Any] | None:
    common, mixture, mlp = llama_keys(card), _mixture_keys(card), card.mlp
    if common is None or mixture is None or not isinstance(mlp, MoE) or mlp.shared is None:
        return None
    biased = isinstance(card.attention, MultiHead) and bool(card.attention.bias)
    return {
        "architectures": ["Qwen2MoeForCausalLM"],
        **common,
        **mixture,
        "qkv_bias": biased,
        "shared_expert_intermediate_size": mlp.shared.d_ff,
        **_windows_config(card),
    }


def _qwen3_moe_config(card: Card) -> dict[str, Any] | None:
    common, mixture = llama_keys(card), _mixture_keys(card)
    if common is None or mixture is None:
        return None
    # This family has one reach for all layers, and no key that lists them.
    windows = {key: value for key, value in _windows_config(card).items() if key != "layer_types"}
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        **common,
        "attention_bias": has_all_biases(card),
        **mixture,
        **windows,
    }


def _mixture_keys(card: Card) -> dict[str, Any] | None:
    mlp = card.mlp
    if not isinstance(mlp, MoE):
        return None
    dense = {i: layer.mlp for i, layer in enumerate(layers_of(card)) if isinstance(layer.mlp, Gated)}
    return {
        "hidden_act": ACTIVATIONS[mlp.expert.act],
        "intermediate_size": next((layer.d_ff for layer in dense.values()), mlp.expert.d_ff),
        "moe_intermediate_size": mlp.expert.d_ff,
        "num_experts": mlp.n_experts,
        "num_experts_per_tok": mlp.top_k,
        "norm_topk_prob": mlp.normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(dense),
    }


_IRRELEVANT = frozenset({"output_router_logits", "router_aux_loss_coef", "max_window_layers"})

QWEN2 = Family(card=_qwen2, rows=_rows, prefix="model.", tied_by_default=False, config=_qwen2_config)
QWEN2_MOE = Family(
    card=_qwen2_moe,
    rows=_rows,
    prefix="model.",
    irrelevant=_IRRELEVANT,
    tied_by_default=False,
    config=_qwen2_moe_config,
)
QWEN3 = Family(card=_qwen3, rows=_rows, prefix="model.", tied_by_default=False, config=_qwen3_config)
QWEN3_MOE = Family(
    card=_qwen3_moe,
    rows=_rows,
    prefix="model.",
    irrelevant=_IRRELEVANT,
    tied_by_default=False,
    config=_qwen3_moe_config,
)
