"""Card to parts: the only file that knows both."""

from __future__ import annotations

from scantling.cards import schema
from scantling.cards.rules import MAX_PARAMS, table_rows
from scantling.cards.schema import Card
from scantling.errors import ScantlingInputError
from scantling.parts.attention import Attention
from scantling.parts.block import Block, Sublayer
from scantling.parts.leaf import Embedding, LayerNorm, Norm, RMSNorm
from scantling.parts.mlp import MLP, GatedMLP
from scantling.parts.moe import MoE, Router
from scantling.parts.part import Part
from scantling.parts.position import Learned, NoPosition, Position, RoPE, Sinusoidal
from scantling.parts.stack import Stack
from scantling.parts.transformer import Head, Transformer
from scantling.visibility import Visibility


def assemble(card: Card) -> Transformer:
    """The part tree of a card.

    Raises:
        ScantlingInputError: the model would have more than 10^15 parameters.
    """
    position = _position(card)
    model = Transformer(
        embed=Embedding(table_rows(card), card.d_model),
        decoder=Stack(
            position=position,
            blocks=tuple(_block(card, i, position) for i in range(card.n_layers)),
            final_norm=None if "out" in card.norm.at else _norm(card),
            dropout=card.dropout.embedding,
        ),
        head=Head(card.d_model, table_rows(card), card.vocab_size, card.tied, card.head.softcap),
        scale=card.embedding.scale,
    )
    if model.params > MAX_PARAMS:
        raise ScantlingInputError(f"card {card.name!r}: {model.params:.3g} parameters; the limit is {MAX_PARAMS:.0e}")
    return model


def _block(card: Card, layer: int, position: Position) -> Block:
    parts = {"attn": _attention(card, layer, position), "mlp": _mlp(card.d_model, card.mlp)}
    order = ("in", "res", "out")
    norms = tuple((place, _norm(card)) for place in order if place in card.norm.at)
    sublayers = tuple(Sublayer(name, part, norms) for name, part in parts.items())
    return Block(card.d_model, sublayers, card.dropout.residual)


def _attention(card: Card, layer: int, position: Position) -> Part:
    spec = card.attention
    assert spec.n_kv_heads is not None
    assert spec.d_head is not None
    scale = spec.d_head**-0.5 if spec.scale is None else spec.scale
    return Attention(
        d_model=card.d_model,
        n_heads=spec.n_heads,
        n_kv_heads=spec.n_kv_heads,
        d_head=spec.d_head,
        scale=scale / (layer + 1) if spec.scale_by_layer else scale,
        visibility=Visibility(causal=True, window=spec.window),
        position=position if isinstance(position, RoPE) else NoPosition(),
        biases=frozenset(spec.bias),
        dropout=card.dropout.attention,
    )


def _position(card: Card) -> Position:
    spec = card.position
    match spec:
        case schema.Learned():
            return Learned(card.context, card.d_model)
        case schema.Sinusoidal():
            return Sinusoidal(card.d_model, spec.theta)
        case schema.RoPE():
            assert spec.d_rotary is not None
            return RoPE(spec.d_rotary, spec.theta, spec.interleaved)
        case schema.NoPosition():
            return NoPosition()


def _norm(card: Card) -> Norm:
    spec = card.norm
    if isinstance(spec, schema.RMSNorm):
        return RMSNorm(card.d_model, spec.eps)
    return LayerNorm(card.d_model, spec.eps, spec.bias)


def _mlp(d_model: int, spec: schema.Plain | schema.Gated | schema.MoE, n_experts: int | None = None) -> Part:
    if isinstance(spec, schema.MoE):
        experts = _mlp(d_model, spec.expert, spec.n_experts)
        assert isinstance(experts, MLP | GatedMLP)
        return MoE(Router(d_model, spec.n_experts, spec.top_k, spec.normalize), experts)
    assert spec.d_ff is not None
    kind = GatedMLP if isinstance(spec, schema.Gated) else MLP
    return kind(d_model, spec.d_ff, spec.act, spec.bias, n_experts)
