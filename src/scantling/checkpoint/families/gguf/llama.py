"""Llama and what GGUF writes like it: Mistral, Mixtral and SmolLM (``llama``), Qwen 2 and 3, and Phi 3.

Source: llama.cpp, conversion/{llama,qwen,phi}.py and src/models/{llama,qwen2,qwen3,qwen3moe,phi3}.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scantling.cards import Card
from scantling.cards.schema import MoE, MultiHead
from scantling.checkpoint.families.gguf.architecture import Architecture, Meta, Value, Written
from scantling.checkpoint.families.gguf.rope import read_rope, write_rope
from scantling.checkpoint.names import Halves, Row, Split, Transform

THEIRS, OURS = "blk.{i}", "decoder.blocks.{i}"


def read_common(meta: Meta, *, partial: bool = True, square: bool = False) -> dict[str, Any]:
    """The sections that all architectures with RMSNorm and RoPE share; the MLP is gated with SiLU.

    Args:
        partial: fewer than all channels of a head may be turned.
        square: queries are exactly as wide as the stream.
    """
    heads, d_model = meta.size("attention.head_count"), meta.size("embedding_length")
    d_head = max(d_model // heads, 1)
    if square:
        meta.only("attention.key_length", d_head)
    d_head = meta.size("attention.key_length", d_head)
    meta.only("attention.value_length", d_head)
    meta.only("attention.causal", True)
    context = meta.size("context_length")
    return {
        "n_layers": meta.size("block_count"),
        "d_model": d_model,
        "vocab_size": meta.vocab_size(),
        "context": context,
        "attention": {
            "kind": "multi_head",
            "n_heads": heads,
            "n_kv_heads": meta.size("attention.head_count_kv", heads),
            "d_head": d_head,
            "bias": [p for p in "qkvo" if meta.has(f"blk.0.attn_{'output' if p == 'o' else p}.bias")],
        },
        "position": read_rope(meta, d_head, context, partial=partial),
        "norm": {"kind": "rmsnorm", "eps": meta.number("attention.layer_norm_rms_epsilon")},
        "mlp": {
            "kind": "gated",
            "act": "silu",
            "d_ff": meta.size("feed_forward_length"),
            "bias": meta.has("blk.0.ffn_up.bias"),
        },
        "tied": not meta.has("output.weight"),
    }


def write_common(card: Card) -> Written:
    """The same as metadata."""
    keys: dict[str, Value] = {
        "block_count": card.n_layers,
        "context_length": card.context,
        "embedding_length": card.d_model,
        "vocab_size": card.vocab_size,
        "attention.layer_norm_rms_epsilon": card.norm.eps,
    }
    if (d_ff := _width(card)) is not None:
        keys["feed_forward_length"] = d_ff
    attention = card.attention
    if isinstance(attention, MultiHead):
        keys["attention.head_count"] = attention.n_heads
        keys["attention.head_count_kv"] = attention.n_kv_heads or attention.n_heads
        if attention.d_head is not None:
            keys |= {"attention.key_length": attention.d_head, "attention.value_length": attention.d_head}
    rope, tensors = write_rope(card)
    return keys | rope, tensors


def _width(card: Card) -> int | None:
    return card.mlp.expert.d_ff if isinstance(card.mlp, MoE) else card.mlp.d_ff


def _read_llama(meta: Meta) -> dict[str, Any]:
    sections = read_common(meta, partial=False)
    if meta.raw("expert_count", 0):
        meta.only("expert_weights_scale", 1.0)
        sections["mlp"] = _experts(meta, sections["mlp"])
    # How the first converter laid out Meta's own files, which is how all of them are laid out.
    meta.only("tensor_data_layout", "Meta AI original pth")
    return sections


def _experts(meta: Meta, expert: dict[str, Any]) -> dict[str, Any]:
    top_k = meta.size("expert_used_count")
    return {"kind": "moe", "n_experts": meta.size("expert_count"), "top_k": top_k, "expert": expert}


def _write_llama(card: Card) -> Written:
    keys, tensors = write_common(card)
    if isinstance(card.mlp, MoE):
        keys |= {"expert_count": card.mlp.n_experts, "expert_used_count": card.mlp.top_k}
    return keys, tensors


def _read_qwen2(meta: Meta) -> dict[str, Any]:
    sections = _read_qwen(meta, square=True)
    # Without a key: every model of the family has these.
    sections["attention"]["bias"] = ["q", "k", "v"]
    return sections


def _read_qwen(meta: Meta, *, square: bool = False) -> dict[str, Any]:
    sections = read_common(meta, partial=False, square=square)
    # Every model of the family is converted with 0, no pooling, or without the key.
    meta.only("pooling_type", 0)
    return sections


def _read_qwen3(meta: Meta) -> dict[str, Any]:
    sections = _read_qwen(meta)
    sections["attention"]["qk_norm"] = {"kind": "rmsnorm", "eps": sections["norm"]["eps"]}
    return sections


def _read_qwen3_moe(meta: Meta) -> dict[str, Any]:
    sections = _read_qwen3(meta)
    # feed_forward_length is of dense layers, which this architecture does not have.
    dense = sections["mlp"]["d_ff"]
    meta.only("expert_weights_scale", 1.0)
    top_k = meta.size("expert_used_count")
    width = meta.size("expert_feed_forward_length", max(dense // top_k, 1))
    return sections | {"mlp": _experts(meta, sections["mlp"] | {"d_ff": width})}


def _write_qwen3_moe(card: Card) -> Written:
    keys, tensors = _write_llama(card)
    if (width := _width(card)) is not None:
        keys["expert_feed_forward_length"] = width
    return keys, tensors


def _read_phi3(meta: Meta) -> dict[str, Any]:
    sections = read_common(meta, square=True)
    # 0 stands for none, so that the key can always be there.
    if window := meta.size("attention.sliding_window", 0, least=0):
        sections["attention"]["window"] = window
    return sections


def _write_phi3(card: Card) -> Written:
    keys, tensors = write_common(card)
    keys.setdefault("rope.scaling.original_context_length", card.context)
    keys["attention.sliding_window"] = getattr(card.attention, "window", None) or 0
    return keys, tensors


def table(card: Card, q: Transform | None = None, k: Transform | None = None) -> Sequence[Row]:
    """Names of a stack with norms before its sublayers; `q` and `k` are how the rows of theirs differ from ours."""
    return (
        Row("token_embd", "embed"),
        Row(f"{THEIRS}.attn_norm", f"{OURS}.attn_norm"),
        Row(f"{THEIRS}.attn_q", f"{OURS}.attn.q", q or Transform()),
        Row(f"{THEIRS}.attn_k", f"{OURS}.attn.k", k or Transform()),
        Row(f"{THEIRS}.attn_v", f"{OURS}.attn.v"),
        Row(f"{THEIRS}.attn_q_norm", f"{OURS}.attn.q_norm"),
        Row(f"{THEIRS}.attn_k_norm", f"{OURS}.attn.k_norm"),
        Row(f"{THEIRS}.attn_output", f"{OURS}.attn.o"),
        Row(f"{THEIRS}.ffn_norm", f"{OURS}.mlp_norm"),
        *(Row(f"{THEIRS}.ffn_{p}", f"{OURS}.mlp.{p}") for p in ("gate", "up", "down")),
        Row(f"{THEIRS}.ffn_gate_inp", f"{OURS}.mlp.router.choose"),
        *(Row(f"{THEIRS}.ffn_{p}_exps", f"{OURS}.mlp.experts.{p}") for p in ("gate", "up", "down")),
        Row("output_norm", "decoder.final_norm"),
        Row("output", "head.matrix"),
    )


def _llama_rows(card: Card) -> Sequence[Row]:
    """Queries and keys keep the two channels of a rotated pair as neighbours, each by its own number of heads."""
    if not isinstance(card.attention, MultiHead):
        return table(card)
    heads = card.attention.n_heads
    return table(card, Halves(heads), Halves(card.attention.n_kv_heads or heads))


def _phi3_rows(card: Card) -> Sequence[Row]:
    return (
        Row("token_embd", "embed"),
        Row(f"{THEIRS}.attn_norm", f"{OURS}.attn_norm"),
        Row(f"{THEIRS}.attn_qkv", tuple(f"{OURS}.attn.{p}" for p in "qkv"), Split()),
        Row(f"{THEIRS}.attn_output", f"{OURS}.attn.o"),
        Row(f"{THEIRS}.ffn_norm", f"{OURS}.mlp_norm"),
        Row(f"{THEIRS}.ffn_up", (f"{OURS}.mlp.gate", f"{OURS}.mlp.up"), Split()),
        Row(f"{THEIRS}.ffn_down", f"{OURS}.mlp.down"),
        Row("output_norm", "decoder.final_norm"),
        Row("output", "head.matrix"),
    )


LLAMA = Architecture(_read_llama, _write_llama, _llama_rows, {})
QWEN2 = Architecture(_read_qwen2, write_common, table, {})
QWEN3 = Architecture(_read_qwen3, write_common, table, {})
QWEN3_MOE = Architecture(_read_qwen3_moe, _write_qwen3_moe, table, {})
PHI3 = Architecture(_read_phi3, _write_phi3, _phi3_rows, {"attention.sliding_window": "attends without a window"})
