"""Matrices in tiles of 16 rows, as the compiled pass reads them.

A tile holds its 16 rows in groups of 32 columns. Within a group, four neighbouring columns of a row stand together and
the 16 rows side by side, so that one 512-bit register holds the same columns of 16 rows:

    f32   (32, 16) floats      f16  (32, 16) of half precision      bf16  (16 pairs of columns, 16 rows, 2)
    q8    (8, 16, 4) bytes of value + 128, then 16 half-precision scales d:          d (byte - 128)
    q4    (4, 16, 4) bytes, columns 8j + c low and 8j + 4 + c high, then d and m:    d nibble + m
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from scantling.errors import ScantlingInputError, need

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROWS, GROUP = 16, 32
KINDS = {"f32": 0, "bf16": 1, "q4": 2, "q8": 3, "f16": 4}
FORMATS = {"F32": 0, "BF16": 1, "F16": 2, "Q8_0": 3, "Q4_0": 4, "Q4_1": 5}
"""As the library numbers them: kinds of tiles, and what is stored in them."""
TILE_BYTES = {"f32": 2048, "bf16": 1024, "f16": 1024, "q4": 320, "q8": 544}
"""Bytes of 16 rows and 32 columns."""
_BLOCKS = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}


@dataclass(frozen=True)
class Stored:
    """A matrix as it was stored.

    Attributes:
        kind: ``F32``, ``F16``, ``BF16`` (bits in uint16), or the GGUF block format ``Q4_0``, ``Q4_1`` or ``Q8_0``.
        data: (rows, columns) of F32, F16 and BF16, (rows, bytes) of block formats.
        columns: d_in.
    """

    kind: str
    data: NDArray[Any]
    columns: int

    def columns_in(self, order: NDArray[np.int64]) -> Stored:
        """The same with its columns in another order; -1 is a column of zeros.

        Raises:
            ScantlingInputError: they stand together in blocks.
        """
        if self.kind in _BLOCKS:
            raise ScantlingInputError(f"heads of such a width need weights of 16 or 32 bits, and these are {self.kind}")
        data = np.concatenate([self.data, np.zeros((len(self.data), 1), self.data.dtype)], 1)
        return Stored(self.kind, data.take(order, 1), len(order))

    def held_as(self, kind: str) -> Stored:
        """The same numbers in a kind that `joint` names."""
        if kind == self.kind:
            return self
        if (self.kind, kind) == ("Q4_0", "Q8_0"):
            return Stored(kind, _q4_as_q8(self.data), self.columns)
        if self.kind == "F16":
            return Stored("F32", self.data.astype(np.float32), self.columns)
        if self.kind == "BF16":
            return Stored("F32", (self.data.astype(np.uint32) << np.uint32(16)).view(np.float32), self.columns)
        quants = need("gguf.quants", "dequantise weights")
        return Stored("F32", quants.dequantize(self.data, quants.GGMLQuantizationType[self.kind]), self.columns)


def block_bytes(kind: str) -> int | None:
    """Bytes of 32 elements in a block format that tiles can hold; None for other formats."""
    return _BLOCKS.get(kind)


def quantise(values: NDArray[np.float32], kind: str) -> Stored:
    """Float32 values (rows, columns) in a GGUF block format; a matrix whose columns do not divide stays as it is.

    Raises:
        MissingExtra: gguf is not installed.
    """
    if values.shape[1] % GROUP:
        return Stored("F32", values, values.shape[1])
    quants = need("gguf.quants", "quantise weights")
    data = quants.quantize(values, quants.GGMLQuantizationType[kind])
    return Stored(kind, data, values.shape[1])


def in_heads(heads: int, width: int, stored: int, order: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """Places of the channels of heads that are filled up from `width` to `stored`: -1 is a channel of zeros.

    Args:
        order: of the channels of each head.
    """
    one = np.full(stored, -1)
    one[:width] = np.arange(width) if order is None else order
    places = np.where(one < 0, -1, np.arange(heads)[:, None] * width + one)
    return places.reshape(-1)


def joint(kinds: Sequence[str]) -> str:
    """The kind that holds the numbers of matrices of all these kinds as they are, so that they can share a product."""
    if len(set(kinds)) == 1:
        return kinds[0]
    # d (nibble - 8) is d times a small whole number; a Q4_1 has a second number per block that Q8_0 has no place for.
    return "Q8_0" if set(kinds) == {"Q4_0", "Q8_0"} else "F32"


def tile_kind(kind: str) -> str:
    """The kind of tile that says all of a stored kind."""
    return {"F32": "f32", "BF16": "bf16", "F16": "f16", "Q8_0": "q8"}.get(kind, "q4")


def _q4_as_q8(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Blocks of Q4_0 (rows, bytes) as blocks of Q8_0: the same scale, and nibble - 8 in a byte."""
    blocks = data.reshape(-1, _BLOCKS["Q4_0"])
    nibbles = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], 1)
    values = (nibbles.view(np.int8) - np.int8(8)).view(np.uint8)
    return np.concatenate([blocks[:, :2], values], 1).reshape(len(data), -1)


def padded(n: int, multiple: int) -> int:
    """n rounded up."""
    return -(-n // multiple) * multiple


def nbytes(kind: str, rows: int, columns: int) -> int:
    """Bytes of a tiled matrix."""
    return padded(rows, ROWS) // ROWS * (padded(columns, GROUP) // GROUP) * TILE_BYTES[kind]


def lay(
    library: Any,
    pieces: Sequence[Stored],
    orders: Sequence[NDArray[np.int64]],
    turns: NDArray[np.int64],
    to: NDArray[np.uint8],
) -> None:
    """Matrices of one kind, under one another, in tiles; nothing is copied but from where they lie to there.

    Args:
        library: the compiled pass.
        orders: which rows of each piece in which order; -1 is a row of zeros.
        turns: the order of all these rows.
        to: of `nbytes`.
    """
    data = [p.data if p.data.strides[1] == p.data.itemsize else np.ascontiguousarray(p.data) for p in pieces]
    # What is out of range would be read all the same.
    assert {p.columns for p in pieces} == {pieces[0].columns}
    assert all(order.max() < len(one) for one, order in zip(data, orders, strict=True))
    found = [
        np.where(order < 0, 0, one.ctypes.data + order * one.strides[0])
        for one, order in zip(data, orders, strict=True)
    ]
    rows = np.zeros(padded(len(turns), ROWS), np.uintp)
    rows[: len(turns)] = np.concatenate(found)[turns]
    tiles = len(rows) // ROWS
    library.sc_lay(FORMATS[pieces[0].kind], rows.ctypes.data, tiles, pieces[0].columns, to.ctypes.data)
