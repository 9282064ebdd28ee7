"""A few rows of tensors, read by their offset, where headers cannot tell."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from scantling.checkpoint.files import Elsewhere, open_regular
from scantling.checkpoint.gguf import GGUFTensor
from scantling.checkpoint.gguf_types import GGML_TYPES
from scantling.checkpoint.gguf_values import dequantise
from scantling.checkpoint.inspect.gather import Stored, dtype_of
from scantling.errors import ScantlingInputError, need

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

WHOLE = 32 * 2**20
"""Bytes up to which two tensors are compared whole."""
ROWS = 64
"""Rows that are compared of larger ones, from the first to the last."""
FAR_ROWS = 8
"""The same of tensors on another machine, each row a request."""
_PLAIN = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "float64": "<f8"}


def row_bytes(tensor: Stored) -> int:
    """Bytes of one row, the last axis of the tensor."""
    rows = tensor.numel // tensor.shape[-1] if tensor.numel else 1
    return tensor.nbytes // rows


def read_rows(tensor: Stored, rows: Iterable[int], nbytes: int | None = None) -> Iterator[bytes]:
    """The bytes of some rows, or the first `nbytes` of each."""
    width = row_bytes(tensor)
    take = width if nbytes is None else min(width, nbytes)
    file, _ = open_regular(tensor.file)
    with file:
        for row in rows:
            file.seek(tensor.start + row * width)
            yield file.read(take)


def sampled(count: int, most: int = ROWS) -> list[int]:
    """At most `most` numbers from 0 to count - 1, the ends among them."""
    if count <= most:
        return list(range(count))
    return [i * (count - 1) // (most - 1) for i in range(most)]


def equal(one: Stored, other: Stored) -> tuple[bool, str] | None:
    """Whether two tensors of one shape hold the same numbers, and what was compared; None where it cannot be told.

    Rows of zeros alone tell nothing: nobody wrote them.

    Raises:
        ScantlingInputError: a file cannot be read any more.
    """
    if one.shape != other.shape or dtype_of(one) != dtype_of(other) or not one.numel:
        return None
    far = isinstance(one.file, Elsewhere)
    try:
        return _compared(one, other, far)
    except ScantlingInputError:
        if far:
            # A server may give whole files only.
            return None
        raise


def _compared(one: Stored, other: Stored, far: bool) -> tuple[bool, str] | None:
    rows = one.numel // one.shape[-1]
    chosen = range(rows) if one.nbytes <= WHOLE and not far else sampled(rows, FAR_ROWS if far else ROWS)
    differing, written = 0, False
    for a, b in zip(read_rows(one, chosen), read_rows(other, chosen), strict=True):
        differing += a != b
        written = written or a.count(0) < len(a) or b.count(0) < len(b)
    if not written:
        return None
    of = f"{rows:,} rows" if len(chosen) == rows else f"{len(chosen):,} sampled rows of {rows:,}"
    if differing:
        return False, f"{differing:,} of {of} differ"
    return True, f"all {of} are equal" if len(chosen) == rows else f"{of} are equal"


def values(tensor: Stored, first: int, count: int, columns: int) -> NDArray[numpy.float32] | None:
    """The first `columns` numbers, or whole blocks that hold them, of `count` rows as float32; None for integers.

    Raises:
        MissingExtra: numpy, or for GGUF's blocks gguf, is not installed.
    """
    np = need("numpy", "look at the values of tensors")
    if isinstance(tensor, GGUFTensor):
        return _blocks(tensor, first, count, columns)
    plain = _PLAIN.get(tensor.dtype)
    if plain is None:
        return None
    size = int(plain[-1])
    raw = b"".join(read_rows(tensor, range(first, first + count), columns * size))
    found = np.frombuffer(raw, plain).reshape(count, -1)
    if tensor.dtype == "bfloat16":
        found = (found.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(all="ignore"):
        result: NDArray[numpy.float32] = found.astype(np.float32)
    return result


def _blocks(tensor: GGUFTensor, first: int, count: int, columns: int) -> NDArray[numpy.float32] | None:
    block = next(size for name, size, _ in GGML_TYPES.values() if name == tensor.kind)
    if tensor.kind.startswith("I") and tensor.kind[1:].isdecimal():
        return None
    width = row_bytes(tensor)
    piece = replace(tensor, shape=(count, tensor.shape[-1]), start=tensor.start + first * width, nbytes=count * width)
    return dequantise(piece)[:, : max(columns, block)]
