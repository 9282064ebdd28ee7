"""Card to parts: the only room that knows both."""

from __future__ import annotations

from dataclasses import replace

from msgspec.structs import replace as replace_card

from scantling.assembly.attention import attention, cross_attention
from scantling.assembly.mlp import mlp
from scantling.assembly.norm import norm_of
from scantling.assembly.position import stream_position
from scantling.cards import schema
from scantling.cards.rules import MAX_PARAMS, SIDES, complete, table_rows
from scantling.cards.schema import Card, Layer
from scantling.errors import ScantlingInputError
from scantling.parts.block import Block, ParallelBlock, Sublayer
from scantling.parts.cross import CrossAttention
from scantling.parts.heads import AnyHead, Head, Labels, NoHead, TextVector, Transform
from scantling.parts.leaf import Embedding, Linear
from scantling.parts.part import Part
from scantling.parts.stack import Stack, TokenTypes
from scantling.parts.transformer import Transformer

__all__ = ["assemble"]


def assemble(card: Card) -> Transformer:
    """The part tree of a card.

    Raises:
        ScantlingInputError: the card contradicts itself, or the model would have more than 10^15 parameters.
    """
    card = complete(card)
    rows, d_model, embedding = table_rows(card), card.d_model, card.embedding
    width = embedding.width or d_model
    widen = None if width == d_model else Linear(width, d_model, embedding.widen_bias)
    after = embedding.widen == "after"
    names = SIDES if card.family == "encoder-decoder" else (card.family,)
    stacks = {name: _stack(card, name, width if after else d_model, widen if after else None) for name in names}
    model = Transformer(
        embed=Embedding(rows, width),
        target_embed=None if embedding.shared else Embedding(rows, width),
        widen=None if after else widen,
        head=_head(card, width),
        scale=embedding.scale,
        scale_rounded=embedding.scale_rounded,
        **stacks,
    )
    if model.params > MAX_PARAMS:
        raise ScantlingInputError(
            f"card {card.name[:60]!r}: {model.params:.3g} parameters; the limit is {MAX_PARAMS:.0e}"
        )
    return model


def _stack(card: Card, name: str, width: int, widen: Linear | None) -> Stack:
    """The stack `name`; its tables are `width` wide."""
    side = getattr(card, name) or schema.Side()
    own = replace_card(card, **{key: getattr(side, key) or getattr(card, key) for key in ("attention", "mlp")})
    layers = _layers(card, card.n_layers if side.n_layers is None else side.n_layers)
    norm, types = card.embedding.norm, card.embedding.types
    cross = cross_attention(own, side.cross) if card.family == "encoder-decoder" and name == "decoder" else None
    return Stack(
        position=stream_position(own, name, width),
        blocks=tuple(_block(own, name, i, layer, cross) for i, layer in enumerate(layers)),
        final_norm=norm_of(card.norm, card.d_model) if _ends_in_norm(card) else None,
        width=width,
        embed_norm=None if norm is None else norm_of(norm, width),
        dropout=card.dropout.embedding,
        types=None if types is None else TokenTypes(types, width),
        widen=widen,
    )


def _head(card: Card, width: int) -> AnyHead:
    spec, d_model = card.head, card.d_model
    reads = width if card.tied else d_model
    transform = None
    if spec.transform is not None:
        out = reads if spec.kind == "lm" else d_model
        norm = norm_of(card.norm, out) if spec.transform.norm else None
        transform = Transform(d_model, out, spec.transform.act, spec.transform.bias, norm)
    match spec.kind:
        case "none":
            return NoHead(d_model)
        case "embedding":
            return TextVector(d_model, str(spec.pool), transform, spec.spare, spec.normalize)
        case "lm":
            return Head(
                d_model,
                reads,
                table_rows(card),
                card.vocab_size,
                card.tied,
                spec.bias,
                spec.bias_fixed,
                spec.scale,
                spec.softcap,
                transform,
                next_token=card.family != "encoder",
            )
    flat = spec.kind == "replaced"
    return Labels(
        d_model,
        spec.n_labels or 1,
        transform,
        spec.pool,
        spec.bias,
        "sigmoid" if flat else spec.scores,
        flat,
    )


def _layers(card: Card, n_layers: int) -> list[Layer]:
    """One entry per layer: the pattern, repeated and cut to `n_layers`."""
    if not card.pattern:
        return [Layer()] * n_layers
    unit = [layer for layer in card.pattern for _ in range(layer.times)]
    return [unit[i % len(unit)] for i in range(n_layers)]


def _ends_in_norm(card: Card) -> bool:
    return "out" not in card.norm.at if card.norm.final is None else card.norm.final


def _block(card: Card, stack: str, index: int, layer: Layer, cross: CrossAttention | None) -> Part:
    position = card.position if layer.position is None else layer.position
    parts: dict[str, Part] = {"attn": attention(card, stack, index, layer.attention or card.attention, position)}
    if cross is not None:
        parts["cross"] = cross
    parts["mlp"] = mlp(card.d_model, layer.mlp or card.mlp)
    norms = tuple((place, norm_of(card.norm, card.d_model)) for place in ("in", "res", "out") if place in card.norm.at)
    sublayers = [Sublayer(name, part, norms) for name, part in parts.items()]
    if index == 0 and card.norm.skip_first:
        sublayers[0] = replace(sublayers[0], norms=tuple(norm for norm in norms if norm[0] != "in"))
    if not card.residual.parallel:
        return Block(card.d_model, tuple(sublayers), card.dropout.residual, card.residual.from_norm)
    if card.residual.shared_norm:
        sublayers[1:] = [replace(sub, norms=()) for sub in sublayers[1:]]
    return ParallelBlock(card.d_model, tuple(sublayers), card.dropout.residual)
