"""RoPE in GGUF metadata: its keys, and the tensors of divisors that stand for Llama 3's scaling and for LongRoPE.

Source of what each key means: llama.cpp (src/llama-model.cpp, src/llama-context.cpp, `ggml_rope_ext`).
"""

from __future__ import annotations

import math
from typing import Any

from scantling.cards import Card
from scantling.cards.schema import LinearScaling, Llama3Scaling, LongRopeScaling, RoPE, YarnScaling
from scantling.checkpoint.families.gguf.architecture import Meta, Value, Written, short
from scantling.errors import ScantlingInputError

FREQS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
BESIDE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that belong to the metadata: what they say is in the card."""
_LOW, _HIGH = 1.0, 4.0
_CLOSE = 1e-5


def read_rope(meta: Meta, d_head: int, context: int, *, partial: bool = True) -> dict[str, Any]:
    """The card's position section.

    Args:
        partial: fewer than all channels of a head may be turned.
    """
    if not partial:
        meta.only("rope.dimension_count", d_head)
    width, theta = meta.size("rope.dimension_count", d_head), meta.number("rope.freq_base", 10000.0)
    found: dict[str, Any] = {"kind": "rope", "theta": theta, "d_rotary": width}
    if scaling := _read_scaling(meta, theta, width, context):
        found["scaling"] = scaling
    return found


def write_rope(card: Card) -> Written:
    """Keys and tensors of the card's own position; those of scalings that GGUF has no name for are left out."""
    position = card.position
    if not isinstance(position, RoPE):
        return {}, {}
    keys: dict[str, Value] = {"rope.freq_base": float(position.theta)}
    if position.d_rotary is not None:
        keys["rope.dimension_count"] = position.d_rotary
    scaling = position.scaling
    if isinstance(scaling, LinearScaling):
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": scaling.factor}
    elif isinstance(scaling, YarnScaling):
        keys |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": scaling.factor,
            "rope.scaling.original_context_length": scaling.trained_length,
            "rope.scaling.yarn_beta_fast": scaling.beta_fast,
            "rope.scaling.yarn_beta_slow": scaling.beta_slow,
        }
    elif isinstance(scaling, Llama3Scaling | LongRopeScaling):
        if (divisors := divisors_of(position, card.context)) is not None:
            return keys, {FREQS: divisors}
        assert isinstance(scaling, LongRopeScaling)
        keys |= {
            "rope.scaling.type": "longrope",
            "rope.scaling.original_context_length": scaling.trained_length,
            "rope.scaling.attn_factor": attention_factor(scaling, card.context),
        }
        return keys, {LONG: scaling.long_factor, SHORT: scaling.short_factor}
    return keys, {}


def divisors_of(position: RoPE, context: int) -> list[float] | None:
    """What each pair's frequency is divided by, at every length; None where a scaling is no such list."""
    scaling, width = position.scaling, position.d_rotary
    if isinstance(scaling, LongRopeScaling):
        one = scaling.short_factor == scaling.long_factor and attention_factor(scaling, context) == 1.0
        return scaling.short_factor if one else None
    if not isinstance(scaling, Llama3Scaling) or width is None:
        return None
    return _llama3_divisors(
        position.theta,
        width,
        scaling.factor,
        scaling.trained_length,
        scaling.low_freq_factor,
        scaling.high_freq_factor,
    )


def attention_factor(scaling: LongRopeScaling, context: int) -> float:
    """LongRoPE's factor on cosines and sines, stated or by default (arXiv:2402.13753)."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    stretch = context / scaling.trained_length
    return math.sqrt(1 + math.log(stretch) / math.log(scaling.trained_length)) if stretch > 1 else 1.0


def _read_scaling(meta: Meta, theta: float, width: int, context: int) -> dict[str, Any] | None:
    kind = meta.raw("rope.scaling.type", "linear")
    # 0 stands for no factor, as in llama.cpp; scale_linear is the key's first name.
    factor = meta.number("rope.scaling.factor", meta.number("rope.scale_linear", 1.0)) or 1.0
    meta.only("rope.scaling.finetuned", True, False)
    trained = meta.size("rope.scaling.original_context_length", context)
    if kind == "yarn":
        return {"kind": "yarn", "factor": factor, "trained_length": trained, **_yarn(meta)}
    if kind not in ("none", "linear", "longrope"):
        raise meta.refuse("rope.scaling.type", "known: none, linear, yarn, longrope")
    lists = [name for name in (LONG, SHORT) if meta.has(name)]
    if lists or kind == "longrope":
        return _longrope(meta, lists, factor, width, trained, context)
    meta.only("rope.scaling.attn_factor", 1.0)
    if meta.has(FREQS):
        if factor != 1.0 and kind != "none":
            raise meta.refuse("rope.scaling.factor", f"beside tensor {FREQS!r} it must be 1 or missing")
        return _frequencies(meta.floats(FREQS, width // 2), theta, width, context)
    return {"kind": "linear", "factor": factor} if factor != 1.0 and kind == "linear" else None


def _yarn(meta: Meta) -> dict[str, Any]:
    """The ramp; what would change YaRN's own factor on cosines and sines is refused."""
    for name in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor"):
        meta.only(name, 1.0)
    meta.only("rope.scaling.yarn_log_multiplier", 0.0)
    if lists := [name for name in BESIDE if meta.has(name)]:
        raise meta.refuse("rope.scaling.type", f"beside tensor {lists[0]!r} it cannot be yarn")
    return {
        "beta_fast": meta.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": meta.number("rope.scaling.yarn_beta_slow", 1.0),
    }


def _longrope(meta: Meta, lists: list[str], factor: float, width: int, trained: int, context: int) -> dict[str, Any]:
    if len(lists) < 2 or meta.has(FREQS):
        lacking = next((name for name in (LONG, SHORT) if name not in lists), None)
        fault = f"beside LongRoPE's lists there is {FREQS!r}" if lacking is None else f"tensor {lacking!r} is missing"
        raise ScantlingInputError(f"{meta.where}: {fault}; LongRoPE has a long and a short list of divisors")
    if factor != 1.0:
        raise meta.refuse("rope.scaling.factor", "LongRoPE's divisors are in its tensors, so it must be 1 or missing")
    scaling = LongRopeScaling(
        trained_length=trained,
        short_factor=meta.floats(SHORT, width // 2),
        long_factor=meta.floats(LONG, width // 2),
    )
    found = {
        "kind": "longrope",
        "trained_length": trained,
        "short_factor": scaling.short_factor,
        "long_factor": scaling.long_factor,
    }
    stated = meta.number("rope.scaling.attn_factor", 1.0)
    if trained < 2 or stated != short(attention_factor(scaling, context)):
        found["attention_factor"] = stated
    return found


def _frequencies(divisors: list[float], theta: float, width: int, context: int) -> dict[str, Any] | None:
    """Llama 3's scaling where its rule gives these divisors, or else the divisors themselves.

    The rule's three lengths appear only as ratios, so one may be chosen: long waves begin at the trained length.
    """
    factor = divisors[-1]
    if all(divisor == 1.0 for divisor in divisors):
        return None
    for trained in sorted({2**power for power in range(4, 24)} | {context}, key=lambda n: (n != context, n)):
        rule = _llama3_divisors(theta, width, factor, trained, _LOW, _HIGH)
        if all(abs(a - b) <= _CLOSE * b for a, b in zip(divisors, rule, strict=True)):
            return {
                "kind": "llama3",
                "factor": factor,
                "trained_length": trained,
                "low_freq_factor": _LOW,
                "high_freq_factor": _HIGH,
            }
    # The same list at every length.
    return {
        "kind": "longrope",
        "trained_length": context,
        "short_factor": divisors,
        "long_factor": divisors,
        "attention_factor": 1.0,
    }


def _llama3_divisors(theta: float, width: int, factor: float, trained: int, low: float, high: float) -> list[float]:
    """Llama 3.1's rule: waves longer than trained / low are divided by factor, shorter than trained / high kept."""
    out = []
    for i in range(width // 2):
        turns = trained * theta ** (-2 * i / width) / (2 * math.pi)
        blend = min(max((turns - low) / (high - low), 0.0), 1.0)
        out.append(short(1 / ((1 - blend) / factor + blend)))
    return out
