"""Gemma (arXiv:2403.08295), Gemma 2 (arXiv:2408.00118) and Gemma 3 (arXiv:2503.19786).

Gains of 1 + weight, a scaled and tied token table, GELU gates; from the second on, norms on both sides of a sublayer
and layers with a window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from scantling.cards import Card
from scantling.cards.schema import MultiHead, RoPE
from scantling.checkpoint.config_keys import Keys
from scantling.checkpoint.config_write import gated_keys, has_all_biases, layers_of, llama_keys, window_keys
from scantling.checkpoint.families import llama
from scantling.checkpoint.family import Family
from scantling.checkpoint.layer_keys import FULL, SLIDING, n_layers, pattern, window, windows
from scantling.checkpoint.names import Row
from scantling.checkpoint.rope_keys import by_layer_type, reach, rope
from scantling.errors import ScantlingInputError


def _gemma(keys: Keys) -> dict[str, Any]:
    position = rope(keys, keys.size("head_dim"), keys.size("max_position_embeddings"))
    return _common(keys, position, _act(keys, "hidden_act", "hidden_activation"))


def _gemma2(keys: Keys) -> dict[str, Any]:
    position = rope(keys, keys.size("head_dim"), keys.size("max_position_embeddings"))
    usual = [FULL if i % 2 else SLIDING for i in range(n_layers(keys))]
    layers = windows(keys, window(keys, 4096), usual)
    sections = _sandwich(keys, position, _cap(keys, "final_logit_softcapping", 30.0))
    sections["attention"]["softcap"] = _cap(keys, "attn_logit_softcapping", 50.0)
    return sections | {"pattern": pattern(layers)}


def _gemma3(keys: Keys) -> dict[str, Any]:
    bases = {FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)}
    turns = by_layer_type(keys, keys.size("head_dim"), keys.size("max_position_embeddings"), bases, scaled=FULL)
    layers = windows(keys, window(keys, 4096), _by_period(keys))
    # A section of a layer is laid over the card's, so it must say that it has no scaling.
    near = {"position": {"scaling": None, **turns[SLIDING]}}
    sections = _sandwich(keys, turns[FULL], _cap(keys, "final_logit_softcapping", None))
    # No published model has one, and the original implementation does not apply it.
    keys.only("attn_logit_softcapping")
    sections["attention"]["qk_norm"] = {"kind": "rmsnorm", "eps": sections["norm"]["eps"], "plus_one": True}
    return sections | {"pattern": pattern([{**layer, **near} if layer else {} for layer in layers])}


def _by_period(keys: Keys) -> list[str]:
    """One layer in `sliding_window_pattern` reads everything; where the layers are listed, the list decides."""
    names = ("sliding_window_pattern", "_sliding_window_pattern")
    if keys.raw("layer_types") is not None:
        period = 1
        for name in names:
            keys.raw(name)
    else:
        period = keys.size(names[0], 6)
        keys.only(names[1], period)
    return [SLIDING if (i + 1) % period else FULL for i in range(n_layers(keys))]


def _sandwich(keys: Keys, position: dict[str, Any], cap_on_logits: float | None) -> dict[str, Any]:
    """What Gemma 2 and 3 share."""
    sections = _common(keys, position, _act(keys, "hidden_activation", "hidden_act"))
    sections["norm"]["at"] = ["in", "res"]
    sections["attention"]["scale"] = keys.size("query_pre_attn_scalar", 256) ** -0.5
    sections["head"] = {"softcap": cap_on_logits}
    return sections


def _cap(keys: Keys, name: str, usual: float | None) -> float | None:
    """null means no cap, which is not the same as a missing key."""
    if name not in keys.data:
        return usual
    return None if keys.raw(name) is None else keys.number(name)


def _common(keys: Keys, position: dict[str, Any], act: str) -> dict[str, Any]:
    d_model = keys.size("hidden_size")
    keys.only("use_bidirectional_attention", False)
    return {
        "n_layers": keys.size("num_hidden_layers"),
        "d_model": d_model,
        "vocab_size": keys.size("vocab_size"),
        "context": reach(position, keys.size("max_position_embeddings")),
        "attention": {
            "kind": "multi_head",
            "n_heads": keys.size("num_attention_heads"),
            "n_kv_heads": keys.size("num_key_value_heads"),
            "d_head": keys.size("head_dim"),
            "bias": ["q", "k", "v", "o"] if keys.flag("attention_bias", False) else [],
        },
        "position": position,
        "norm": {"kind": "rmsnorm", "eps": keys.number("rms_norm_eps", 1e-6), "plus_one": True},
        "mlp": {"kind": "gated", "act": act, "d_ff": keys.size("intermediate_size")},
        "embedding": {"scale": math.sqrt(d_model), "scale_rounded": True},
        "dropout": {"attention": keys.number("attention_dropout", 0.0)},
    }


def _act(keys: Keys, decides: str, other: str) -> str:
    """The activation under its two keys, of which one decides and the other must agree.

    The first files have the exact GELU's name under hidden_act and mean its approximation.
    """

    def named(key: str) -> str:
        act = keys.activation(key, "gelu_pytorch_tanh")
        return "gelu_tanh" if (key, act) == ("hidden_act", "gelu") else act

    act = named(decides)
    if keys.raw(other) is not None and named(other) != act:
        raise ScantlingInputError(f"{keys.where}: {decides} is {act} and {other} is {named(other)}; they must agree")
    return act


def _sandwich_rows(card: Card) -> Sequence[Row]:
    theirs, ours = "model.layers.{i}", "decoder.blocks.{i}"
    norms = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "attn_res_norm",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "mlp_res_norm",
        "self_attn.q_norm": "attn.q_norm",
        "self_attn.k_norm": "attn.k_norm",
    }
    return (
        Row("model.embed_tokens", "embed"),
        *(Row(f"{theirs}.self_attn.{p}_proj", f"{ours}.attn.{p}") for p in "qkvo"),
        *(Row(f"{theirs}.{name}", f"{ours}.{norm}") for name, norm in norms.items()),
        *(Row(f"{theirs}.mlp.{p}_proj", f"{ours}.mlp.{p}") for p in ("gate", "up", "down")),
        Row("model.norm", "decoder.final_norm"),
        Row("lm_head", "head.matrix"),
    )


def _gemma_config(card: Card) -> dict[str, Any] | None:
    common, mlp = llama_keys(card), gated_keys(card)
    if common is None or mlp is None:
        return None
    both = {"hidden_activation": mlp["hidden_act"], "attention_bias": has_all_biases(card)}
    return {"architectures": ["GemmaForCausalLM"], **common, **mlp, **both}


def _gemma2_config(card: Card) -> dict[str, Any] | None:
    common, mlp, attention = llama_keys(card), gated_keys(card), card.attention
    if common is None or mlp is None or not isinstance(attention, MultiHead):
        return None
    return {
        "architectures": ["Gemma2ForCausalLM"],
        **common,
        "hidden_activation": mlp["hidden_act"],
        **mlp,
        "attention_bias": has_all_biases(card),
        "query_pre_attn_scalar": attention.d_head if attention.scale is None else round(attention.scale**-2),
        "attn_logit_softcapping": attention.softcap,
        "final_logit_softcapping": card.head.softcap,
        **window_keys(card),
    }


def _gemma3_config(card: Card) -> dict[str, Any] | None:
    second = _gemma2_config(card)
    if second is None or not isinstance(card.position, RoPE):
        return None
    near = next((layer.position for layer in layers_of(card) if isinstance(layer.position, RoPE)), card.position)
    own = {"architectures": ["Gemma3ForCausalLM"], "rope_local_base_freq": near.theta}
    return {key: value for key, value in second.items() if key != "attn_logit_softcapping"} | own


GEMMA = Family(card=_gemma, rows=llama.rows, prefix="model.", ignored=llama.OLD_BUFFERS, config=_gemma_config)
GEMMA2 = Family(
    card=_gemma2,
    rows=_sandwich_rows,
    prefix="model.",
    irrelevant=frozenset({"cache_implementation"}),
    config=_gemma2_config,
)
GEMMA3_TEXT = Family(
    card=_gemma3,
    rows=_sandwich_rows,
    prefix="model.",
    irrelevant=frozenset({"cache_implementation"}),
    config=_gemma3_config,
)
