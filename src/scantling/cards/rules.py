"""What must hold between the keys of a card, and the defaults that follow from other keys."""

from __future__ import annotations

import reprlib

from msgspec.structs import replace

from scantling.cards.schema import Card, Gated, Learned, MoE, MultiHead, Plain, RoPE
from scantling.errors import ScantlingInputError

MAX_PARAMS = 10**15


def complete(card: Card) -> Card:
    """The card with every default that depends on other keys filled in.

    Raises:
        ScantlingInputError: a default cannot be derived, or two keys contradict each other.
    """
    attention = _attention(card, card.attention)
    position = card.position
    if isinstance(position, RoPE):
        position = _rope(card, position, attention)
    if not card.norm.at or len(set(card.norm.at)) != len(card.norm.at):
        _refuse(card, "norm.at", card.norm.at, "name one or more of in, res, out, each once")
    return replace(card, attention=attention, position=position, mlp=_mlp(card, card.mlp))


def _attention(card: Card, attention: MultiHead) -> MultiHead:
    heads = attention.n_heads
    kv_heads = heads if attention.n_kv_heads is None else attention.n_kv_heads
    if heads % kv_heads:
        _refuse(card, "attention.n_kv_heads", kv_heads, f"it must divide n_heads {heads}")
    d_head = attention.d_head
    if d_head is None:
        if card.d_model % heads:
            better = f"n_heads must divide d_model {card.d_model}, or d_head must be given"
            _refuse(card, "attention.n_heads", heads, better)
        d_head = card.d_model // heads
    if len(set(attention.bias)) != len(attention.bias):
        _refuse(card, "attention.bias", attention.bias, "name each projection once")
    return replace(attention, n_kv_heads=kv_heads, d_head=d_head)


def _rope(card: Card, position: RoPE, attention: MultiHead) -> RoPE:
    assert attention.d_head is not None
    width = attention.d_head if position.d_rotary is None else position.d_rotary
    if width % 2:
        key = "attention.d_head" if position.d_rotary is None else "position.d_rotary"
        _refuse(card, key, width, "RoPE turns pairs of channels, so it must be even")
    if width > attention.d_head:
        _refuse(card, "position.d_rotary", width, f"it cannot exceed d_head {attention.d_head}")
    return replace(position, d_rotary=width)


def _mlp(card: Card, mlp: Plain | Gated | MoE) -> Plain | Gated | MoE:
    if isinstance(mlp, MoE):
        if mlp.top_k > mlp.n_experts:
            _refuse(card, "mlp.top_k", mlp.top_k, f"it cannot exceed n_experts {mlp.n_experts}")
        return replace(mlp, expert=_with_width(card, mlp.expert))
    return _with_width(card, mlp)


def _with_width(card: Card, mlp: Plain | Gated) -> Plain | Gated:
    if mlp.d_ff is not None:
        return mlp
    gated = 256 * -(-8 * card.d_model // (3 * 256))
    return replace(mlp, d_ff=gated if isinstance(mlp, Gated) else 4 * card.d_model)


def table_rows(card: Card) -> int:
    """Rows of the embedding table: the vocabulary with its padding."""
    multiple = card.embedding.vocab_multiple
    return multiple * -(-card.vocab_size // multiple)


def position_limit(card: Card) -> int | None:
    """Positions that exist at all: the rows of a learned table; None where any position can be computed."""
    return card.context if isinstance(card.position, Learned) else None


def _refuse(card: Card, key: str, value: object, right: str) -> None:
    raise ScantlingInputError(f"card {shown(card.name)}: {key} is {shown(value)}: {right}")


_repr = reprlib.Repr()
_repr.maxstring = _repr.maxlong = _repr.maxother = 60


def shown(value: object) -> str:
    """``repr``, cut short: values from cards go into messages through this."""
    text = _repr.repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
