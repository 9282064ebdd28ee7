"""Matrices in tiles of 16 rows, as the compiled pass reads them.

A tile holds its 16 rows in groups of 32 columns. Within a group, four neighbouring columns of a row stand together and
the 16 rows side by side, so that one 512-bit register holds the same columns of 16 rows:

    f32   (32, 16) floats                    bf16  (16 pairs of columns, 16 rows, 2)
    q8    (8, 16, 4) bytes of value + 128, then 16 half-precision scales d:          d (byte - 128)
    q4    (4, 16, 4) bytes, columns 8j + c low and 8j + 4 + c high, then d and m:    d nibble + m
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from scantling.errors import ScantlingInputError, need

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROWS, GROUP = 16, 32
KINDS = {"f32": 0, "bf16": 1, "q4": 2, "q8": 3}
TILE_BYTES = {"f32": 2048, "bf16": 1024, "q4": 320, "q8": 544}
"""Bytes of 16 rows and 32 columns."""
_BLOCKS = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}


@dataclass(frozen=True)
class Stored:
    """A matrix as it was stored.

    Attributes:
        kind: ``F32``, ``BF16`` (bits in uint16), or the GGUF block format ``Q4_0``, ``Q4_1`` or ``Q8_0``.
        data: (rows, columns) of F32 and BF16, (rows, bytes) of block formats.
        columns: d_in.
    """

    kind: str
    data: NDArray[Any]
    columns: int

    def rows(self, order: NDArray[np.int64]) -> Stored:
        """The same with its rows in another order, which no block spans; -1 is a row of zeros."""
        return Stored(self.kind, _taken(self.data, order, 0), self.columns)

    def columns_in(self, order: NDArray[np.int64]) -> Stored:
        """The same with its columns in another order; -1 is a column of zeros.

        Raises:
            ScantlingInputError: they stand together in blocks.
        """
        if self.kind in _BLOCKS:
            raise ScantlingInputError(f"heads of such a width need weights of 16 or 32 bits, and these are {self.kind}")
        return Stored(self.kind, _taken(self.data, order, 1), len(order))

    def held_as(self, kind: str) -> Stored:
        """The same numbers in a kind that `joint` names."""
        if kind == self.kind:
            return self
        if (self.kind, kind) == ("Q4_0", "Q8_0"):
            return Stored(kind, _q4_as_q8(self.data), self.columns)
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


def _taken(data: NDArray[Any], order: NDArray[np.int64], axis: int) -> NDArray[Any]:
    if order.min() < 0:
        shape = [1 if i == axis else n for i, n in enumerate(data.shape)]
        data = np.concatenate([data, np.zeros(shape, data.dtype)], axis)
    found: NDArray[Any] = data.take(order, axis)
    return found


def in_heads(heads: int, width: int, stored: int, order: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """Places of the channels of heads that are filled up from `width` to `stored`: -1 is a channel of zeros.

    Args:
        order: of the channels of each head.
    """
    one = np.full(stored, -1)
    one[:width] = np.arange(width) if order is None else order
    places = np.where(one < 0, -1, np.arange(heads)[:, None] * width + one)
    return places.reshape(-1)


def joint(pieces: list[Stored]) -> str:
    """The kind that holds the numbers of all these matrices as they are, so that they can share a product."""
    kinds = {piece.kind for piece in pieces}
    if len(kinds) == 1:
        return pieces[0].kind
    # d (nibble - 8) is d times a small whole number; a Q4_1 has a second number per block that Q8_0 has no place for.
    return "Q8_0" if kinds == {"Q4_0", "Q8_0"} else "F32"


def tile_kind(kind: str) -> str:
    """The kind of tile that says all of a stored kind."""
    return {"F32": "f32", "BF16": "bf16", "Q8_0": "q8"}.get(kind, "q4")


def join(pieces: list[Stored]) -> Stored:
    """Matrices of one kind under one another."""
    return Stored(pieces[0].kind, np.concatenate([piece.data for piece in pieces]), pieces[0].columns)


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


def pack(stored: Stored) -> NDArray[np.uint8]:
    """The matrix in tiles; missing rows and columns are 0."""
    if tile_kind(stored.kind) in ("f32", "bf16"):
        return _plain(stored.data)
    blocks = stored.data.reshape(stored.data.shape[0], -1, _BLOCKS[stored.kind])
    blocks = _whole_tiles(blocks)
    return _q8(blocks) if stored.kind == "Q8_0" else _q4(blocks, stored.kind)


def _whole_tiles(data: NDArray[Any]) -> NDArray[Any]:
    """(rows, ...) -> (tiles, 16, ...), filled up with zeros."""
    more = padded(len(data), ROWS) - len(data)
    data = np.concatenate([data, np.zeros((more, *data.shape[1:]), data.dtype)]) if more else data
    return data.reshape(-1, ROWS, *data.shape[1:])


def _plain(data: NDArray[Any]) -> NDArray[np.uint8]:
    if more := padded(data.shape[1], GROUP) - data.shape[1]:
        data = np.concatenate([data, np.zeros((len(data), more), data.dtype)], 1)
    tiles = _whole_tiles(data)
    together = 4 // data.itemsize
    tiles = tiles.reshape(len(tiles), ROWS, -1, together).swapaxes(1, 2)
    return _bytes(tiles)


def _q8(blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
    tiles, _, groups, _ = blocks.shape
    out = np.empty((tiles, groups, TILE_BYTES["q8"]), np.uint8)
    values = (blocks[..., 2:] ^ 0x80).reshape(tiles, ROWS, groups, 8, 4)
    out[..., :512] = values.transpose(0, 2, 3, 1, 4).reshape(tiles, groups, 512)
    out[..., 512:] = _scales(blocks[..., :2])
    return out.reshape(-1)


def _q4(blocks: NDArray[np.uint8], kind: str) -> NDArray[np.uint8]:
    tiles, _, groups, _ = blocks.shape
    d = np.ascontiguousarray(blocks[..., :2])
    if kind == "Q4_1":
        m, packed = blocks[..., 2:4], blocks[..., 4:]
    else:
        # d (nibble - 8): eight times a half-precision number is one.
        m, packed = (d.view("<f2") * np.float16(-8)).view(np.uint8), blocks[..., 2:]
    nibbles = np.concatenate([packed & 15, packed >> 4], -1).reshape(tiles, ROWS, groups, 4, 2, 4)
    joined = nibbles[..., 0, :] | nibbles[..., 1, :] << 4
    out = np.empty((tiles, groups, TILE_BYTES["q4"]), np.uint8)
    out[..., :256] = joined.transpose(0, 2, 3, 1, 4).reshape(tiles, groups, 256)
    out[..., 256:288], out[..., 288:] = _scales(d), _scales(m)
    return out.reshape(-1)


def _scales(halves: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(tiles, 16, groups, 2) -> (tiles, groups, 32)."""
    tiles, _, groups, _ = halves.shape
    return halves.swapaxes(1, 2).reshape(tiles, groups, 32)


def _bytes(values: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(values).view(np.uint8).reshape(-1)
