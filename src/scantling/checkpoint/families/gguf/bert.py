"""BERT and DistilBERT: an encoder with norms after its sublayers, learned positions, segments, and a pooled vector.

Source: llama.cpp, conversion/bert.py and src/models/bert.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scantling.cards import Card
from scantling.checkpoint.families.gguf.architecture import Architecture, Meta, Written
from scantling.checkpoint.families.gguf.llama import THEIRS, write_common
from scantling.checkpoint.names import Row

_OURS = "encoder.blocks.{i}"
_POOLS = {0: None, 1: "mean", 2: "first", 3: "last"}
"""By the number of `gguf.PoolingType`; 0 gives the vectors of all tokens."""
_TYPES = "tokenizer.ggml.token_type_count"
_NOTES = (
    "llama.cpp computes GELU by its tanh form in float16, takes every token to be of kind 0, and divides a text's "
    "vector by its length unless it is told not to",
)


def _read(meta: Meta) -> dict[str, Any]:
    heads, d_model = meta.size("attention.head_count"), meta.size("embedding_length")
    meta.only("attention.head_count_kv", heads)
    for name in ("attention.key_length", "attention.value_length"):
        meta.only(name, d_model // heads)
    # Without the key llama.cpp lets no token read those after it.
    if meta.raw("attention.causal") is not False:
        raise meta.refuse("attention.causal", "it must be false, as an encoder reads both ways")
    eps = meta.number("attention.layer_norm_epsilon")
    return {
        "family": "encoder",
        "n_layers": meta.size("block_count"),
        "d_model": d_model,
        "vocab_size": meta.vocab_size(),
        "context": meta.size("context_length"),
        "attention": {
            "kind": "multi_head",
            "n_heads": heads,
            "bias": [p for p in "qkvo" if meta.has(f"blk.0.attn_{'output' if p == 'o' else p}.bias")],
        },
        "position": {"kind": "learned"},
        "norm": {"kind": "layernorm", "eps": eps, "at": ["out"]},
        "mlp": {
            "kind": "plain",
            "act": "gelu",
            "d_ff": meta.size("feed_forward_length"),
            "bias": meta.has("blk.0.ffn_up.bias"),
        },
        "embedding": {"norm": {"kind": "layernorm", "eps": eps}, "types": _types(meta)},
        "head": _head(meta),
        "tied": False,
    }


def _types(meta: Meta) -> int | None:
    """Rows of the table of token types; where there is none the key says 1, as llama.cpp asks for it."""
    table = meta.tensors.get("token_types.weight")
    rows = None if table is None else int(table.shape[0])
    meta.only_beside(_TYPES, rows or 1)
    return rows


def _head(meta: Meta) -> dict[str, Any]:
    """A pooled vector has length 1: no key says so, and it is what llama.cpp gives out."""
    if (kind := meta.size("pooling_type", 0, least=0)) not in _POOLS:
        known = "0 (the vectors of all tokens), 1 (their mean), 2 (the first) and 3 (the last) are read"
        raise meta.refuse("pooling_type", known)
    return {"kind": "none"} if kind == 0 else {"kind": "embedding", "pool": _POOLS[kind], "normalize": True}


def _write(card: Card) -> Written:
    common, _ = write_common(card)
    names = ("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size")
    keys = {name: common[name] for name in (*names, "attention.head_count") if name in common}
    pooling = next(number for number, pool in _POOLS.items() if pool == card.head.pool)
    return {
        **keys,
        "attention.layer_norm_epsilon": card.norm.eps,
        "attention.causal": False,
        "pooling_type": pooling,
        _TYPES: card.embedding.types or 1,
    }, {}


def _rows(card: Card) -> Sequence[Row]:
    return (
        Row("token_embd", "embed"),
        Row("token_types", "encoder.types.table"),
        Row("position_embd", "encoder.position.table"),
        Row("token_embd_norm", "encoder.embed_norm"),
        *(Row(f"{THEIRS}.attn_{p}", f"{_OURS}.attn.{p}") for p in "qkv"),
        Row(f"{THEIRS}.attn_output", f"{_OURS}.attn.o"),
        Row(f"{THEIRS}.attn_output_norm", f"{_OURS}.attn_out_norm"),
        Row(f"{THEIRS}.ffn_up", f"{_OURS}.mlp.up"),
        Row(f"{THEIRS}.ffn_down", f"{_OURS}.mlp.down"),
        Row(f"{THEIRS}.layer_output_norm", f"{_OURS}.mlp_out_norm"),
    )


BERT = Architecture(_read, _write, _rows, {}, _NOTES)
