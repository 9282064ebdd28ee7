"""Gemma 1 to 3: norms stored as the gain itself, 1 + w; a scaled and tied token table; windows by a period.

Source: llama.cpp, conversion/gemma.py and src/models/{gemma,gemma2,gemma3}.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scantling.cards import Card
from scantling.cards.schema import MultiHead, RoPE
from scantling.checkpoint.families.gguf.architecture import Architecture, Meta, Value, Written
from scantling.checkpoint.families.gguf.differ import layers
from scantling.checkpoint.families.gguf.llama import OURS, THEIRS, read_common, write_common
from scantling.checkpoint.layer_keys import pattern
from scantling.checkpoint.names import Row, Shape, Transform

_SWA_BASE = 10000.0


@dataclass(frozen=True)
class PlusOne(Transform):
    """Theirs is the gain, ours the weight that 1 is added to.

    Exact there and back for every gain that is a float32 rounding of 1 + w, as those of converted models are.
    """

    def load(self, theirs: Sequence[Any], shapes: Sequence[Shape]) -> list[Any]:
        return [x - 1 for x in theirs]

    def save(self, ours: Sequence[Any]) -> list[Any]:
        return [x + 1 for x in ours]


def _read_gemma(meta: Meta) -> dict[str, Any]:
    sections = read_common(meta)
    sections["attention"]["bias"] = []
    sections["norm"]["plus_one"] = True
    sections["mlp"] |= {"act": "gelu_tanh", "bias": False}
    return sections | {
        "embedding": {"scale": math.sqrt(sections["d_model"]), "scale_rounded": True},
        "tied": True,
    }


def _read_gemma2(meta: Meta) -> dict[str, Any]:
    sections = _sandwich(meta, 46)
    sections["attention"]["softcap"] = meta.number("attn_logit_softcapping", 50.0)
    sections["head"] = {"softcap": meta.number("final_logit_softcapping", 30.0)}
    window = {"attention": {"window": meta.size("attention.sliding_window", 4096)}}
    if meta.number("rope.freq_base_swa", theta := sections["position"]["theta"]) != theta:
        raise meta.refuse("rope.freq_base_swa", f"it must be that of the other layers, {theta}")
    return sections | {"pattern": pattern([window if near else {} for near in _near(meta, 2, sections["n_layers"])])}


def _read_gemma3(meta: Meta) -> dict[str, Any]:
    sections = _sandwich(meta, 62)
    sections["attention"]["qk_norm"] = {"kind": "rmsnorm", "eps": sections["norm"]["eps"], "plus_one": True}
    if meta.raw("final_logit_softcapping") is not None:
        sections["head"] = {"softcap": meta.number("final_logit_softcapping")}
    size = meta.size("attention.sliding_window", 0, least=0)
    turns = {"kind": "rope", "theta": meta.number("rope.freq_base_swa", _SWA_BASE), "scaling": None}
    near = _near(meta, 6, sections["n_layers"])
    if not size:
        return sections
    layer = {"attention": {"window": size}, "position": turns | {"d_rotary": sections["position"]["d_rotary"]}}
    return sections | {"pattern": pattern([layer if slides else {} for slides in near])}


def _sandwich(meta: Meta, largest: int) -> dict[str, Any]:
    """What Gemma 2 and 3 share.

    Args:
        largest: layers of the one model whose scores are scaled by d_model / n_heads instead of by d_head, which no
            key says: llama.cpp knows it by this number too.
    """
    sections = _read_gemma(meta)
    attention = sections["attention"]
    sections["norm"]["at"] = ["in", "res"]
    width = sections["d_model"] // attention["n_heads"] if sections["n_layers"] == largest else attention["d_head"]
    stated = meta.raw("attention.scale")
    attention["scale"] = max(width, 1) ** -0.5 if stated is None else meta.number("attention.scale")
    return sections


def _near(meta: Meta, usual: int, n_layers: int) -> list[bool]:
    """Which layers have a window: all but the last of each period, or as listed."""
    name = "attention.sliding_window_pattern"
    found = meta.raw(name, usual)
    if isinstance(found, Sequence) and not isinstance(found, str):
        if len(found) != n_layers or any(type(value) is not bool for value in found):
            raise meta.refuse(name, f"a true or false for each of the {n_layers} layers is needed")
        return list(found)
    period = meta.size(name, usual)
    return [i % period < period - 1 for i in range(n_layers)]


def _write_gemma2(card: Card) -> Written:
    keys, tensors = _write_sandwich(card, 46, 2)
    if isinstance(card.attention, MultiHead) and card.attention.softcap is not None:
        keys["attn_logit_softcapping"] = card.attention.softcap
    return keys, tensors


def _write_gemma3(card: Card) -> Written:
    keys, tensors = _write_sandwich(card, 62, 6)
    local = next((p for a, p, _ in layers(card) if isinstance(p, RoPE) and getattr(a, "window", None)), None)
    if local is not None:
        keys["rope.freq_base_swa"] = local.theta
    return keys, tensors


def _write_sandwich(card: Card, largest: int, usual: int) -> Written:
    keys, tensors = write_common(card)
    if card.head.softcap is not None:
        keys["final_logit_softcapping"] = card.head.softcap
    attention = card.attention
    if isinstance(attention, MultiHead) and attention.scale is not None:
        width = card.d_model // attention.n_heads if card.n_layers == largest else attention.d_head or 1
        if not math.isclose(attention.scale, width**-0.5, rel_tol=1e-6):
            keys["attention.scale"] = attention.scale
    windows = [getattr(a, "window", None) for a, _, _ in layers(card)]
    if (size := next((w for w in windows if w), None)) is not None:
        keys["attention.sliding_window"] = size
        keys |= _period([w is not None for w in windows], usual)
    return keys, tensors


def _period(near: list[bool], usual: int) -> dict[str, Value]:
    """The key that says which layers have a window, where it is not the usual period."""

    def fits(period: int) -> bool:
        return near == [i % period < period - 1 for i in range(len(near))]

    if fits(usual):
        return {}
    period = next((p for p in range(1, len(near) + 2) if fits(p)), None)
    return {"attention.sliding_window_pattern": near if period is None else period}


def _rows(card: Card) -> Sequence[Row]:
    norms = {"attn_norm": "attn_norm", "ffn_norm": "mlp_norm"}
    return _table(card, norms)


def _sandwich_rows(card: Card) -> Sequence[Row]:
    norms = {
        "attn_norm": "attn_norm",
        "post_attention_norm": "attn_res_norm",
        "ffn_norm": "mlp_norm",
        "post_ffw_norm": "mlp_res_norm",
        "attn_q_norm": "attn.q_norm",
        "attn_k_norm": "attn.k_norm",
    }
    return _table(card, norms)


def _table(card: Card, norms: Mapping[str, str]) -> Sequence[Row]:
    return (
        Row("token_embd", "embed"),
        *(Row(f"{THEIRS}.{theirs}", f"{OURS}.{ours}", PlusOne()) for theirs, ours in norms.items()),
        *(Row(f"{THEIRS}.attn_{p}", f"{OURS}.attn.{p}") for p in "qkv"),
        Row(f"{THEIRS}.attn_output", f"{OURS}.attn.o"),
        *(Row(f"{THEIRS}.ffn_{p}", f"{OURS}.mlp.{p}") for p in ("gate", "up", "down")),
        Row("output_norm", "decoder.final_norm", PlusOne()),
    )


_SCALE = {"attention.scale": "scales scores by the width of a head"}

GEMMA = Architecture(_read_gemma, write_common, _rows, {})
GEMMA2 = Architecture(_read_gemma2, _write_gemma2, _sandwich_rows, _SCALE)
GEMMA3 = Architecture(_read_gemma3, _write_gemma3, _sandwich_rows, _SCALE)
