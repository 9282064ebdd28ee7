"""GPT-2: learned positions, LayerNorm, biases, one fused QKV matrix.

Source: llama.cpp, conversion/gpt2.py and src/models/gpt2.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scantling.cards import Card
from scantling.checkpoint.families.gguf.architecture import Architecture, Meta, Written
from scantling.checkpoint.families.gguf.llama import OURS, THEIRS, write_common
from scantling.checkpoint.names import Row, Split


def _read(meta: Meta) -> dict[str, Any]:
    heads, d_model = meta.size("attention.head_count"), meta.size("embedding_length")
    meta.only("attention.head_count_kv", heads)
    for name in ("attention.key_length", "attention.value_length"):
        meta.only(name, d_model // heads)
    meta.only("attention.causal", True)
    return {
        "n_layers": meta.size("block_count"),
        "d_model": d_model,
        "vocab_size": meta.vocab_size(),
        "context": meta.size("context_length"),
        "attention": {"kind": "multi_head", "n_heads": heads, "bias": ["q", "k", "v", "o"]},
        "position": {"kind": "learned"},
        "norm": {"kind": "layernorm", "eps": meta.number("attention.layer_norm_epsilon")},
        "mlp": {"kind": "plain", "act": "gelu_tanh", "d_ff": meta.size("feed_forward_length"), "bias": True},
        "tied": not meta.has("output.weight"),
    }


def _write(card: Card) -> Written:
    common, _ = write_common(card)
    names = ("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size")
    keys = {name: common[name] for name in names if name in common}
    heads = {key: value for key, value in common.items() if key.startswith("attention.") and "norm" not in key}
    return {**keys, **heads, "attention.layer_norm_epsilon": card.norm.eps}, {}


def _rows(card: Card) -> Sequence[Row]:
    return (
        Row("token_embd", "embed"),
        Row("position_embd", "decoder.position.table"),
        Row(f"{THEIRS}.attn_norm", f"{OURS}.attn_norm"),
        Row(f"{THEIRS}.attn_qkv", tuple(f"{OURS}.attn.{p}" for p in "qkv"), Split()),
        Row(f"{THEIRS}.attn_output", f"{OURS}.attn.o"),
        Row(f"{THEIRS}.ffn_norm", f"{OURS}.mlp_norm"),
        Row(f"{THEIRS}.ffn_up", f"{OURS}.mlp.up"),
        Row(f"{THEIRS}.ffn_down", f"{OURS}.mlp.down"),
        Row("output_norm", "decoder.final_norm"),
        Row("output", "head.matrix"),
    )


GPT2 = Architecture(_read, _write, _rows, {})
