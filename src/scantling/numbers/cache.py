"""Bytes of a key-value cache by how it is kept: whole, as rings, in blocks; as it is, or in 8 bits."""

from __future__ import annotations

import math
from collections.abc import Sequence

from scantling.errors import ScantlingInputError
from scantling.parts.part import Part, Shape, Workload
from scantling.parts.transformer import Transformer
from scantling.units import DTYPE_BYTES

SCALE_BYTES = DTYPE_BYTES["float32"]
"""Of each vector that is kept in 8 bits."""


def cache_bytes(model: Transformer, w: Workload, dtype: str, kind: str = "full", numbers: str = "plain") -> int:
    """Bytes of keys and values of `w.batch` rows of `w.keys` positions.

    Args:
        dtype: of the values, where they are kept as they are.
        kind: ``full``; or ``ring``: of a layer only as many positions as a query of it can read back.
        numbers: ``plain``; or ``int8``: a byte per value and a float32 scale per vector.

    Raises:
        ScantlingInputError: no such kind.
    """
    if kind not in ("full", "ring"):
        raise ScantlingInputError(f"unknown kind of cache {kind!r}: use full or ring")
    every = (shape for part in _parts(model) for shape in _shapes(part, w, kind == "ring"))
    return sum(_bytes(shape, dtype, numbers) for shape in every)


def paged_bytes(model: Transformer, blocks: int, size: int, dtype: str, numbers: str = "plain") -> int:
    """Bytes of so many blocks of `size` positions, all layers."""
    return blocks * cache_bytes(model, Workload(tokens=size), dtype, "full", numbers)


def blocks_needed(lengths: Sequence[int], size: int) -> int:
    """Blocks of `size` positions that hold rows of these lengths, none shared."""
    return sum(-(-length // size) for length in lengths)


def _parts(model: Transformer) -> list[Part]:
    return [part for _, part, _ in model.walk()]


def _shapes(part: Part, w: Workload, ring: bool) -> list[Shape]:
    reach = getattr(getattr(part, "visibility", None), "reach", None) if ring else None
    shapes = part.state(w).values()
    return [s if reach is None else (*s[:2], min(reach, s[2]), *s[3:]) for s in shapes]


def _bytes(shape: Shape, dtype: str, numbers: str) -> int:
    if numbers == "int8":
        return math.prod(shape) + math.prod(shape[:-1]) * SCALE_BYTES
    if numbers != "plain":
        raise ScantlingInputError(f"unknown kind of numbers in a cache {numbers!r}: use plain or int8")
    return math.prod(shape) * DTYPE_BYTES[dtype]
