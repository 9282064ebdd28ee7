"""A preset made small: every choice of it kept, every size cut, so that the real computation runs in milliseconds."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

import scantling as sc
from scantling.cards.rules import complete
from scantling.cards.schema import Gated, Latent, Layer, LongRopeScaling, MoE, MultiHead, Plain, RoPE

D_HEAD, WINDOW = 8, 8


def shrunk(card: sc.Card) -> sc.Card:
    """The same drawing with at most four layers, a stream of 32 and 64 tokens."""
    pattern = [replace(_layer(layer), times=min(layer.times, 2)) for layer in card.pattern]
    layers = sum(layer.times for layer in pattern) or 2
    embedding = replace(card.embedding, vocab_multiple=min(card.embedding.vocab_multiple, 8))
    if embedding.width is not None:
        embedding = replace(embedding, width=16)
    small = replace(
        card,
        n_layers=min(layers, card.n_layers, 4),
        d_model=32,
        vocab_size=61,
        context=64,
        attention=_attention(card.attention),
        position=_position(card.position, card.attention),
        mlp=_mlp(card.mlp),
        pattern=pattern,
        embedding=embedding,
        published=None,
    )
    return complete(small)


def _layer(layer: Layer) -> Layer:
    attention = None if layer.attention is None else _attention(layer.attention)
    position = None if layer.position is None else _position(layer.position, layer.attention)
    return replace(layer, attention=attention, position=position, mlp=None if layer.mlp is None else _mlp(layer.mlp))


def _attention(spec: Any) -> Any:
    if isinstance(spec, Latent):
        rank = None if spec.q_rank is None else 9
        return replace(spec, n_heads=3, kv_rank=10, q_rank=rank, d_nope=6, d_rope=4, d_value=5, scale=None)
    assert isinstance(spec, MultiHead)
    assert spec.n_kv_heads is not None
    kv_heads = min(spec.n_kv_heads, 2)
    heads = kv_heads * min(spec.n_heads // spec.n_kv_heads, 3)
    window = None if spec.window is None else WINDOW
    scale = None if spec.scale is None else D_HEAD**-0.5
    return replace(spec, n_heads=heads, n_kv_heads=kv_heads, d_head=D_HEAD, window=window, scale=scale)


def _position(spec: Any, attention: Any) -> Any:
    if not isinstance(spec, RoPE):
        return spec
    if isinstance(attention, Latent):
        return replace(spec, d_rotary=4)
    whole = None if attention is None else attention.d_head
    turned = D_HEAD if whole is None or spec.d_rotary == whole else 4
    scaling = spec.scaling
    if isinstance(scaling, LongRopeScaling):
        pairs = turned // 2
        scaling = replace(scaling, short_factor=scaling.short_factor[:pairs], long_factor=scaling.long_factor[:pairs])
    return replace(spec, d_rotary=turned, scaling=scaling)


def _mlp(spec: Any) -> Any:
    if not isinstance(spec, MoE):
        assert isinstance(spec, Plain | Gated)
        return replace(spec, d_ff=24)
    groups = min(spec.groups, 2)
    shared = None if spec.shared is None else replace(spec.shared, d_ff=12)
    few = {"n_experts": 4, "top_k": min(spec.top_k, 2), "groups": groups, "top_groups": min(spec.top_groups, groups)}
    return replace(spec, **few, expert=replace(spec.expert, d_ff=12), shared=shared)
