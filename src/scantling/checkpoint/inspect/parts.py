"""The part of the model that a weight belongs to, by its name alone; the headings are those of `count`."""

from __future__ import annotations

_INSIDE = (
    (".mlp.experts.", "experts"),
    (".mlp.router.", "router"),
    (".mlp.", "mlp"),
    (".cross.", "cross_attention"),
    (".attn.", "attention"),
    (".position.", "position"),
    (".types.", "types"),
)
_OUTSIDE = {"embed": "embedding", "target_embed": "embedding", "widen": "embedding", "head": "head"}


def part_of(ours: str) -> str:
    """Embedding, attention, mlp and so on, of a weight by our name.

    >>> part_of("decoder.blocks.{i}.attn.q_norm.weight")
    'norm'
    """
    pieces = ours.split(".")
    if any(piece == "norm" or piece.endswith("_norm") for piece in pieces):
        return "norm"
    inside = next((part for key, part in _INSIDE if key in ours), None)
    if inside is not None:
        return inside
    return next((_OUTSIDE[piece] for piece in pieces if piece in _OUTSIDE), "other")
