"""Norms by the card."""

from __future__ import annotations

from scantling.cards import schema
from scantling.parts.leaf import LayerNorm, Norm, RMSNorm


def norm_of(spec: schema.RMSNorm | schema.LayerNorm, d: int) -> Norm:
    """A norm of the blocks over d channels."""
    if isinstance(spec, schema.RMSNorm):
        return rms_norm(d, spec)
    return LayerNorm(d, spec.eps, spec.bias)


def rms_norm(d: int, spec: schema.RMSNorm | schema.QKNorm) -> RMSNorm:
    """A root-mean-square norm over d channels, of the blocks or of queries and keys."""
    rounded = not spec.plus_one if spec.rounded is None else spec.rounded
    return RMSNorm(d, spec.eps, spec.plus_one, rounded)
