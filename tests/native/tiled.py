"""How tiles look, said with numpy: what the library's own laying out is held against."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from scantling.native.tiles import GROUP, ROWS, TILE_BYTES, Stored, padded

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCKS = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}


def tiled(stored: Stored) -> NDArray[np.uint8]:
    """The matrix in tiles, by numpy; missing rows and columns are 0."""
    if stored.kind in ("F32", "BF16", "F16"):
        return _plain(stored.data, 2 if stored.kind == "BF16" else 1)
    blocks = stored.data.reshape(stored.data.shape[0], -1, BLOCKS[stored.kind])
    blocks = _whole_tiles(blocks)
    return _q8(blocks) if stored.kind == "Q8_0" else _q4(blocks, stored.kind)


def _whole_tiles(data: NDArray[Any]) -> NDArray[Any]:
    """(rows, ...) -> (tiles, 16, ...), filled up with zeros."""
    more = padded(len(data), ROWS) - len(data)
    data = np.concatenate([data, np.zeros((more, *data.shape[1:]), data.dtype)]) if more else data
    return data.reshape(-1, ROWS, *data.shape[1:])


def _plain(data: NDArray[Any], together: int) -> NDArray[np.uint8]:
    if more := padded(data.shape[1], GROUP) - data.shape[1]:
        data = np.concatenate([data, np.zeros((len(data), more), data.dtype)], 1)
    tiles = _whole_tiles(data)
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
        with np.errstate(over="ignore"):
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
