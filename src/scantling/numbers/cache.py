"""Bytes of a key-value cache by how it is kept: whole, as rings, in blocks; as it is, or in 8 bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from scantling.errors import ScantlingInputError
from scantling.parts.part import Part, Shape, Workload
from scantling.parts.transformer import Transformer
from scantling.units import DTYPE_BYTES, stored_bytes

KINDS = ("full", "ring")
"""All positions of every layer; or of a layer only as many positions as a query of it can read back."""
NUMBERS = ("plain", "int8")
"""Values as they are; or a byte per value and a float32 scale per vector."""
SCALE_BYTES = DTYPE_BYTES["float32"]
"""Of each vector that is kept in 8 bits."""


def cache_bytes(model: Transformer, w: Workload, dtype: str, kind: str = "full", numbers: str = "plain") -> int:
    """Bytes of all that is kept between decode steps of `w.batch` rows of `w.keys` positions.

    Args:
        dtype: of the values, where they are kept as they are: a dtype or a format of blocks.
        kind: one of `KINDS`.
        numbers: one of `NUMBERS`.

    Raises:
        ScantlingInputError: no such kind, or a vector is no whole number of blocks.
    """
    if kind not in KINDS:
        raise ScantlingInputError(f"unknown kind of cache {kind!r}: use {' or '.join(KINDS)}")
    return _sum(model, w, dtype, numbers, _ring if kind == "ring" else _whole)


def cache_read(model: Transformer, w: Workload, dtype: str, numbers: str = "plain") -> int:
    """Bytes of them that the last token of every row must read: of a layer the positions that this token sees."""
    return _sum(model, w, dtype, numbers, _seen)


def paged_bytes(
    model: Transformer, blocks: int, size: int, dtype: str, numbers: str = "plain", source_blocks: int = 0
) -> int:
    """Bytes of so many blocks of `size` positions, all layers.

    Args:
        source_blocks: as large, of an encoder-decoder's sources, which have blocks of their own.
    """
    w = Workload(tokens=size, source=size)
    return sum(
        (source_blocks if part.of_source else blocks) * _bytes(shape, dtype, numbers)
        for _, part, _ in model.walk()
        for shape in part.state(w).values()
    )


def blocks_needed(lengths: Sequence[int], size: int) -> int:
    """Blocks of `size` positions that hold rows of these lengths, none shared."""
    return sum(-(-length // size) for length in lengths)


def _sum(model: Transformer, w: Workload, dtype: str, numbers: str, positions: Callable[[Part, int], int]) -> int:
    shapes = (
        (*shape[:2], positions(part, shape[2]), *shape[3:])
        for _, part, _ in model.walk()
        for shape in part.state(w).values()
    )
    return sum(_bytes(shape, dtype, numbers) for shape in shapes)


def _whole(part: Part, positions: int) -> int:
    return positions


def _ring(part: Part, positions: int) -> int:
    visibility = getattr(part, "visibility", None)
    return positions if visibility is None or visibility.reach is None else min(visibility.reach, positions)


def _seen(part: Part, positions: int) -> int:
    visibility = getattr(part, "visibility", None)
    return positions if visibility is None else int(visibility.pairs(1, positions - 1))


def _bytes(shape: Shape, dtype: str, numbers: str) -> int:
    if numbers == "int8":
        return math.prod(shape) + math.prod(shape[:-1]) * SCALE_BYTES
    if numbers != "plain":
        raise ScantlingInputError(f"unknown kind of numbers in a cache {numbers!r}: use {' or '.join(NUMBERS)}")
    return stored_bytes(math.prod(shape[:-1]), shape[-1], dtype)
