"""SmolLM3 (Bakouch et al. 2025): Llama whose every fourth layer has no position (NoPE, arXiv:2501.18795)."""

from __future__ import annotations

from typing import Any

from scantling.cards import Card
from scantling.cards.schema import Gated, NoPosition
from scantling.checkpoint import layer_keys
from scantling.checkpoint.config_keys import Keys
from scantling.checkpoint.config_write import gated_keys, has_all_biases, layers_of, llama_keys, window_keys
from scantling.checkpoint.families import llama
from scantling.checkpoint.family import Family
from scantling.checkpoint.layer_keys import FULL, SLIDING
from scantling.errors import ScantlingInputError


def _card(keys: Keys) -> dict[str, Any]:
    bias = ["q", "k", "v", "o"] if keys.flag("attention_bias", False) else []
    sections = llama.common(keys, bias, kv_heads=4, theta=2e6)
    turned = _turned(keys)
    window = keys.optional_size("sliding_window")
    window = window if keys.flag("use_sliding_window", False) else None
    usual = [FULL if turns or window is None else SLIDING for turns in turned]
    layers = [
        layer if turns else layer | {"position": {"kind": "none"}}
        for layer, turns in zip(layer_keys.windows(keys, window, usual), turned, strict=True)
    ]
    return sections | {
        "mlp": llama.gated(keys, keys.flag("mlp_bias", False)),
        "pattern": layer_keys.pattern(layers),
    }


def _turned(keys: Keys) -> list[bool]:
    """Which layers have RoPE: `no_rope_layers` is 1 where a layer has it, and may be longer than the model."""
    n, interval = layer_keys.n_layers(keys), keys.size("no_rope_layer_interval", 4)
    said = layer_keys.listed(keys, "no_rope_layers", int)
    if said is None:
        return [(i + 1) % interval != 0 for i in range(n)]
    if len(said) < n or any(value not in (0, 1) for value in said):
        raise ScantlingInputError(f"{keys.where}: no_rope_layers needs a 0 or 1 for each of the {n} layers")
    return [value == 1 for value in said[:n]]


def _config(card: Card) -> dict[str, Any] | None:
    common, mlp = llama_keys(card), gated_keys(card)
    if common is None or mlp is None or not isinstance(card.mlp, Gated):
        return None
    windows = window_keys(card)
    sliding = {"use_sliding_window": True, **windows} if "sliding_window" in windows else {"use_sliding_window": False}
    return {
        "architectures": ["SmolLM3ForCausalLM"],
        **common,
        **mlp,
        "attention_bias": has_all_biases(card),
        "mlp_bias": card.mlp.bias,
        "no_rope_layers": [0 if isinstance(layer.position, NoPosition) else 1 for layer in layers_of(card)],
        **sliding,
    }


FAMILY = Family(
    card=_card,
    config=_config,
    rows=llama.rows,
    prefix="model.",
    irrelevant=frozenset({"max_window_layers"}),
)
