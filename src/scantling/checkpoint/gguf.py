"""Headers of GGUF files: metadata, tensor names, kinds, shapes and byte ranges, checked; no tensor data is read.

Source of every format fact: the GGUF specification (ggml, docs/gguf.md, "File Structure"), versions 2 and 3, little
endian. No size that the file declares is used before it is checked against the bytes that are left.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from scantling.checkpoint.files import Elsewhere, Place, foreign_kind, open_regular, refuse, shown
from scantling.checkpoint.gguf_cursor import Cursor
from scantling.checkpoint.gguf_metadata import metadata_of
from scantling.checkpoint.gguf_types import GGML_TYPES, REMOVED_TYPES, U32, U64

MAX_KEYS = 65_536
MAX_TENSORS = 65_536
MAX_NAME_BYTES = 64


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor: `shape` is row-major (the file lists dimensions fastest first); `start` and `nbytes` are bytes."""

    name: str
    kind: str
    shape: tuple[int, ...]
    file: Place
    start: int
    nbytes: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """A GGUF header; arrays in `metadata` are `GGUFArray`, `data_start` is a byte offset in the file."""

    path: Place
    version: int
    metadata: dict[str, object]
    tensors: dict[str, GGUFTensor]
    alignment: int
    data_start: int


def read_gguf(path: str | os.PathLike[str] | Elsewhere) -> GGUFHeader:
    """Read and check the header of a GGUF file; no tensor data is read.

    Raises:
        ScantlingInputError: the file is not GGUF version 2 or 3, is cut short, exceeds a limit of this module or
            of `gguf_metadata`, or its header is not true of its bytes.
    """
    if isinstance(path, Elsewhere):
        source, size = path.opened()
        with source:
            return _header(Cursor(path, bytearray(), size, source))
    path = Path(path)
    file, _ = open_regular(path)
    with file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _header(Cursor(path, data, len(data)))


def _header(cursor: Cursor) -> GGUFHeader:
    version = _version(cursor)
    # The least bytes: a name length, dimensions, type and offset; a key of one character, a type and a bool.
    n_tensors = cursor.count("the number of tensors", MAX_TENSORS, 8 + 1 + 4 + 8 + 4 + 8)
    n_keys = cursor.count("the number of key-value pairs", MAX_KEYS, 8 + 1 + 4 + 1)
    metadata, alignment = metadata_of(cursor, n_keys)
    tensors, data_start = _tensors(cursor, n_tensors, alignment)
    return GGUFHeader(cursor.path, version, metadata, tensors, alignment, data_start)


def _version(cursor: Cursor) -> int:
    cursor.fetch(min(256, cursor.end))
    head = bytes(cursor.data[:256])
    if head[:4] != b"GGUF":
        kind = foreign_kind(head)
        begins = f"begins with {shown(head[:4])}; a GGUF file begins with b'GGUF'"
        refuse(cursor.path, f"is {kind}" if kind else begins)
    cursor.pos = 4
    version = cursor.number(U32, "the version")
    swapped = int.from_bytes(head[4:8], "big")
    if swapped in (2, 3):
        cursor.fail(4, f"the file is big-endian GGUF (version {swapped}); convert it to little-endian")
    if version not in (2, 3):
        cursor.fail(4, f"the GGUF version is {version}; versions 2 and 3 are read, so convert the model again")
    return version


def _tensors(cursor: Cursor, count: int, alignment: int) -> tuple[dict[str, GGUFTensor], int]:
    """All tensors by name, and where the data starts."""
    infos: dict[str, tuple[GGUFTensor, int]] = {}
    for index in range(count):
        at = cursor.pos
        tensor, place = _tensor(cursor, index)
        if tensor.name in infos:
            cursor.fail(at, f"duplicate tensor name {shown(tensor.name)}; each may appear once")
        infos[tensor.name] = tensor, place
    data_start = -(-cursor.pos // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    expected, before = 0, "the data section"
    for name, (tensor, at) in infos.items():
        what, offset = f"tensor {shown(name)}", tensor.start
        if offset % alignment:
            cursor.fail(at, f"{what} has offset {offset}, which is not a multiple of the alignment {alignment}")
        if offset < expected:
            cursor.fail(at, f"{what} has offset {offset} and overlaps {before}, which ends at offset {expected}")
        if (missing := data_start + offset + tensor.nbytes - cursor.end) > 0:
            cursor.fail(
                at,
                f"{what} of {tensor.nbytes} bytes at offset {offset} ends {missing} bytes after the end of the file, "
                f"which has {cursor.end}; download it again",
            )
        tensors[name] = replace(tensor, start=data_start + offset)
        expected, before = offset + tensor.nbytes, what
    return tensors, data_start


def _tensor(cursor: Cursor, index: int) -> tuple[GGUFTensor, int]:
    """One tensor info, `start` still relative to the data; and the byte where its offset stands."""
    at = cursor.pos
    name = cursor.text(f"the name of tensor {index}", MAX_NAME_BYTES)
    if not name:
        cursor.fail(at, f"tensor {index} has an empty name")
    what = f"tensor {shown(name)}"
    n_dims = cursor.number(U32, f"the number of dimensions of {what}")
    if not 1 <= n_dims <= 4:
        cursor.fail(cursor.pos - 4, f"{what} has {n_dims} dimensions; 1 to 4 are allowed")
    at = cursor.pos
    dims = tuple(cursor.number(U64, f"dimension {i} of {what}") for i in range(n_dims))
    if not all(0 < dim < 2**63 for dim in dims):
        cursor.fail(at, f"{what} has dimensions {dims}; each must be from 1 to 2^63-1")
    type_id = cursor.number(U32, f"the type of {what}")
    if type_id not in GGML_TYPES:
        fault = "was removed from the format" if type_id in REMOVED_TYPES else "is unknown"
        cursor.fail(cursor.pos - 4, f"{what} has type {type_id}, which {fault}")
    kind, block, block_bytes = GGML_TYPES[type_id]
    if dims[0] % block:
        cursor.fail(at, f"{what} has rows of {dims[0]} elements; {kind} needs a multiple of {block}")
    nbytes = prod(dims) // block * block_bytes
    if nbytes > cursor.end:
        cursor.fail(at, f"{what} of dimensions {dims} takes {nbytes} bytes of {kind}; the file has {cursor.end}")
    offset = cursor.number(U64, f"the offset of {what}")
    return GGUFTensor(name, kind, dims[::-1], cursor.path, offset, nbytes), cursor.pos - 8
