"""GGUF architectures: their metadata as a card, their tensor names and ours."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scantling.cards import Card
from scantling.cards.read import from_dict
from scantling.cards.schema import MultiHead
from scantling.checkpoint.config_keys import Keys
from scantling.checkpoint.names import Halves, Row
from scantling.errors import ScantlingInputError, nearest


@dataclass(frozen=True)
class Architecture:
    """One value of ``general.architecture``."""

    card: Callable[[Keys, Mapping[str, Any]], dict[str, Any]]
    rows: Callable[[Card], Sequence[Row]]


def card_of_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Any], where: str) -> Card:
    """The card that GGUF metadata describes.

    Args:
        tensors: by name; whether ``output.weight`` is there tells an untied head.

    Raises:
        ScantlingInputError: an unknown architecture, or a key missing or out of range.
    """
    kind = architecture(metadata, where)
    keys = Keys(metadata, where)
    sections = kind.card(keys, tensors)
    own = f"{metadata['general.architecture']}."
    keys.finish(frozenset(key for key in metadata if not key.startswith(own)))
    name = metadata.get("general.name")
    plain = str(name) if isinstance(name, str) and name else "model"
    return from_dict({"name": plain, "family": "decoder", **sections}, where)


def architecture(metadata: Mapping[str, Any], where: str) -> Architecture:
    """The architecture of a GGUF file."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ScantlingInputError(
            f"{where}: general.architecture is {name!r}; known: {known}{nearest(str(name), ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def _llama_card(keys: Keys, tensors: Mapping[str, Any]) -> dict[str, Any]:
    heads = keys.size("llama.attention.head_count")
    d_model = keys.size("llama.embedding_length")
    d_ff = keys.size("llama.feed_forward_length")
    keys.only("llama.rope.scaling.type", "none")
    if "rope_freqs.weight" in tensors:
        raise ScantlingInputError(
            f"{keys.where}: tensor 'rope_freqs.weight' asks for a RoPE scaling that is not supported"
        )
    d_head = keys.size("llama.attention.key_length", d_model // heads)
    keys.only("llama.attention.value_length", d_head)
    n_experts = keys.raw("llama.expert_count", 0)
    mlp: dict[str, Any] = {"kind": "gated", "act": "silu", "d_ff": d_ff}
    if n_experts:
        top_k = keys.size("llama.expert_used_count")
        mlp = {"kind": "moe", "n_experts": keys.size("llama.expert_count"), "top_k": top_k, "expert": mlp}
    return {
        "n_layers": keys.size("llama.block_count"),
        "d_model": d_model,
        "vocab_size": _vocab_size(keys, tensors),
        "context": keys.size("llama.context_length"),
        "attention": {
            "kind": "multi_head",
            "n_heads": heads,
            "n_kv_heads": keys.size("llama.attention.head_count_kv", heads),
            "d_head": d_head,
        },
        "position": {
            "kind": "rope",
            "theta": _short(keys.number("llama.rope.freq_base", 10000.0)),
            "d_rotary": keys.size("llama.rope.dimension_count", d_head),
        },
        "norm": {"kind": "rmsnorm", "eps": _short(keys.number("llama.attention.layer_norm_rms_epsilon"))},
        "mlp": mlp,
        "tied": "output.weight" not in tensors,
    }


def _short(value: float) -> float:
    """The shortest decimal that is the same float32: GGUF stores 1e-5 as 9.999999747378752e-06."""
    single = struct.pack("<f", value)
    shortest = next(text for n in range(1, 10) if struct.pack("<f", float(text := f"{value:.{n}g}")) == single)
    return float(shortest)


def _vocab_size(keys: Keys, tensors: Mapping[str, Any]) -> int:
    """Rows of the token table: what the tensor says, since the key is optional."""
    table = tensors.get("token_embd.weight")
    if table is None:
        raise ScantlingInputError(f"{keys.where}: tensor 'token_embd.weight' is missing")
    rows = int(table.shape[0])
    stated = keys.raw("llama.vocab_size", rows)
    if stated != rows:
        raise ScantlingInputError(f"{keys.where}: llama.vocab_size is {stated} and 'token_embd.weight' has {rows} rows")
    return rows


def _llama_rows(card: Card) -> Sequence[Row]:
    theirs, ours = "blk.{i}", "decoder.blocks.{i}"
    assert isinstance(card.attention, MultiHead)
    heads, kv_heads = card.attention.n_heads, card.attention.n_kv_heads or card.attention.n_heads
    return (
        Row("token_embd", "embed"),
        Row(f"{theirs}.attn_norm", f"{ours}.attn_norm"),
        Row(f"{theirs}.attn_q", f"{ours}.attn.q", Halves(heads)),
        Row(f"{theirs}.attn_k", f"{ours}.attn.k", Halves(kv_heads)),
        Row(f"{theirs}.attn_v", f"{ours}.attn.v"),
        Row(f"{theirs}.attn_output", f"{ours}.attn.o"),
        Row(f"{theirs}.ffn_norm", f"{ours}.mlp_norm"),
        *(Row(f"{theirs}.ffn_{p}", f"{ours}.mlp.{p}") for p in ("gate", "up", "down")),
        Row(f"{theirs}.ffn_gate_inp", f"{ours}.mlp.router.choose"),
        *(Row(f"{theirs}.ffn_{p}_exps", f"{ours}.mlp.experts.{p}") for p in ("gate", "up", "down")),
        Row("output_norm", "decoder.final_norm"),
        Row("output", "head.matrix"),
    )


ARCHITECTURES = {"llama": Architecture(_llama_card, _llama_rows)}
"""By ``general.architecture``; Llama, Mistral, Mixtral and SmolLM are all ``llama`` there."""
