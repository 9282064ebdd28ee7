"""Positions by the card: what is added to the stream, and what acts on queries, keys and scores."""

from __future__ import annotations

import math

from scantling.cards import schema
from scantling.cards.schema import Card
from scantling.parts import rope
from scantling.parts.position import ALiBi, Learned, NoPosition, Position, Sinusoidal
from scantling.parts.relative import RelativeBias
from scantling.parts.rope import RoPE


def stream_position(card: Card, stack: str, width: int) -> Position:
    """What the stack has at its bottom: vectors to add to the residual stream, or the table of the scores' shifts."""
    spec = card.position
    if isinstance(spec, schema.Learned):
        return Learned(card.context, width, spec.offset, spec.from_mask, spec.pad_id)
    if isinstance(spec, schema.Sinusoidal):
        return Sinusoidal(width, spec.theta, spec.halves, card.context if spec.table else None)
    if isinstance(spec, schema.Relative):
        return _relative(spec, card.attention.n_heads, stack == "encoder")
    return NoPosition()


def score_position(card: Card, spec: schema.Section, n_heads: int, scale: float, both_ways: bool = False) -> Position:
    """What acts on queries, keys, or scores."""
    if isinstance(spec, schema.Relative):
        return _relative(spec, n_heads, both_ways)
    if isinstance(spec, schema.RoPE):
        assert spec.d_rotary is not None
        return RoPE(spec.d_rotary, spec.theta, spec.interleaved, _scaling(card, spec.scaling))
    if isinstance(spec, schema.ALiBi):
        return ALiBi(n_heads, spec.max_bias, scale if spec.scaled else 1.0, spec.rounded)
    return NoPosition()


def _relative(spec: schema.Relative, n_heads: int, both_ways: bool) -> RelativeBias:
    return RelativeBias(n_heads, spec.buckets, spec.max_distance, both_ways)


def _scaling(card: Card, spec: schema.Scaling | None) -> rope.Scaling | None:
    match spec:
        case None:
            return None
        case schema.LinearScaling():
            return rope.Linear(spec.factor)
        case schema.DynamicScaling():
            return rope.Dynamic(spec.factor, spec.trained_length)
        case schema.Llama3Scaling():
            return rope.Llama3(spec.factor, spec.trained_length, spec.low_freq_factor, spec.high_freq_factor)
        case schema.YarnScaling():
            return rope.Yarn(
                spec.factor,
                spec.trained_length,
                spec.beta_fast,
                spec.beta_slow,
                spec.attention_factor,
                spec.mscale,
                spec.mscale_all_dim,
                spec.truncate,
            )
        case schema.LongRopeScaling():
            stretch = card.context / spec.trained_length
            usual = math.sqrt(1 + math.log(stretch) / math.log(spec.trained_length)) if stretch > 1 else 1.0
            factor = usual if spec.attention_factor is None else spec.attention_factor
            return rope.LongRope(spec.trained_length, tuple(spec.short_factor), tuple(spec.long_factor), factor)
