"""Fused queries, keys and values, as the families that have them lay them out."""

from __future__ import annotations

from scantling.cards import Card
from scantling.cards.schema import MultiHead
from scantling.checkpoint.names import Interleave, Row


def by_head(card: Card, theirs: str, ours: str) -> Row:
    """One matrix ordered head by head: for each KV head its queries, its key, its value.

    Args:
        theirs: the fused matrix.
        ours: the attention part that holds q, k and v.
    """
    assert isinstance(card.attention, MultiHead)
    assert card.attention.n_kv_heads is not None
    return Row(theirs, tuple(f"{ours}.{p}" for p in "qkv"), Interleave(card.attention.n_kv_heads))
