"""Attention by the card."""

from __future__ import annotations

from scantling.assembly.norm import rms_norm
from scantling.assembly.position import score_position
from scantling.cards import schema
from scantling.cards.schema import Card
from scantling.parts import rope
from scantling.parts.attention import Attention
from scantling.parts.cross import CrossAttention
from scantling.parts.latent import LatentAttention
from scantling.parts.leaf import HeadNorm, LayerNorm, Norm
from scantling.parts.part import Part
from scantling.parts.rope import RoPE
from scantling.visibility import Visibility


def attention(
    card: Card, stack: str, index: int, spec: schema.MultiHead | schema.Latent, position: schema.Section
) -> Part:
    """Attention of the layer `index` within a stack."""
    if isinstance(spec, schema.Latent):
        return _latent(card, spec, position)
    assert spec.n_kv_heads is not None
    assert spec.d_head is not None
    scale = spec.d_head**-0.5 if spec.scale is None else spec.scale
    q_norm, k_norm = (_qk_norm(spec.qk_norm, heads, spec.d_head) for heads in (spec.n_heads, spec.n_kv_heads))
    return Attention(
        d_model=card.d_model,
        n_heads=spec.n_heads,
        n_kv_heads=spec.n_kv_heads,
        d_head=spec.d_head,
        scale=scale / (index + 1) if spec.scale_by_layer else scale,
        visibility=_visibility(spec, causal=stack == "decoder"),
        position=score_position(card, position, spec.n_heads, scale, stack == "encoder"),
        biases=frozenset(spec.bias),
        q_norm=q_norm,
        k_norm=k_norm,
        softcap=spec.softcap,
        sinks=spec.sinks,
        clip=spec.clip,
        dropout=card.dropout.attention,
    )


def cross_attention(card: Card, spec: schema.MultiHead | None) -> CrossAttention:
    """Attention to the encoder: as `spec`, or as the stack's own attention where none is given."""
    own = card.attention if spec is None else spec
    assert isinstance(own, schema.MultiHead)
    assert own.n_kv_heads is not None
    assert own.d_head is not None
    return CrossAttention(
        d_model=card.d_model,
        n_heads=own.n_heads,
        n_kv_heads=own.n_kv_heads,
        d_head=own.d_head,
        scale=own.d_head**-0.5 if own.scale is None else own.scale,
        biases=frozenset(own.bias),
        softcap=own.softcap,
        dropout=card.dropout.attention,
    )


def _visibility(spec: schema.MultiHead, causal: bool) -> Visibility:
    stride = spec.stride
    every, last = (None, None) if stride is None else (stride.every, stride.last)
    return Visibility(causal, spec.window, spec.chunk, every, last, spec.prefix)


def _latent(card: Card, spec: schema.Latent, position: schema.Section) -> LatentAttention:
    scale = (spec.d_nope + spec.d_rope) ** -0.5 if spec.scale is None else spec.scale
    turns = score_position(card, position, spec.n_heads, scale)
    if spec.scale is None and isinstance(turns, RoPE) and isinstance(turns.scaling, rope.Yarn):
        scale *= turns.scaling.factor_on_scores
    return LatentAttention(
        d_model=card.d_model,
        n_heads=spec.n_heads,
        kv_rank=spec.kv_rank,
        d_nope=spec.d_nope,
        d_rope=spec.d_rope,
        d_value=spec.d_value,
        eps=spec.eps,
        scale=scale,
        q_rank=spec.q_rank,
        position=turns,
        dropout=card.dropout.attention,
    )


def _qk_norm(spec: schema.QKNorm | None, heads: int, d_head: int) -> Norm | HeadNorm | None:
    if spec is None:
        return None
    if spec.over == "each_head":
        return HeadNorm(heads, d_head, spec.eps, centred=spec.kind == "layernorm")
    width = d_head if spec.over == "head" else heads * d_head
    if spec.kind == "rmsnorm":
        return rms_norm(width, spec)
    return LayerNorm(width, spec.eps, spec.bias)
