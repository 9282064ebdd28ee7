"""Headers of GGUF files: metadata, tensor names, kinds, shapes and byte ranges, checked; no tensor data is read.

Source of every format fact: the GGUF specification (ggml, docs/gguf.md, "File Structure"), versions 2 and 3, little
endian. No size that the file declares is used before it is checked against the bytes that are left.
"""

from __future__ import annotations

import mmap
import os
import re
from array import array
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from scantling.checkpoint.files import Elsewhere, Place, foreign_kind, open_regular, refuse, shown
from scantling.checkpoint.gguf_cursor import Cursor
from scantling.checkpoint.gguf_types import (
    ARRAY,
    GGML_TYPES,
    REMOVED_TYPES,
    SCALARS,
    STRING,
    U32,
    U64,
    UINT32,
    GGUFArray,
    Scalar,
)

MAX_KEYS = 65_536
MAX_TENSORS = 65_536
MAX_KEY_BYTES = 65_535
MAX_NAME_BYTES = 64
MAX_STRING_BYTES = 16 * 2**20
MAX_ELEMENTS = 4 * 2**20
"""Elements of one metadata array, and strings in all of them together: a vocabulary of 4 Mi fits."""
MAX_LAYERS = 1024
_BYTE_TOKEN = 6


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


def _strings(cursor: Cursor, what: str, count: int) -> GGUFArray:
    cursor.strings += count
    if cursor.strings > MAX_ELEMENTS:
        cursor.fail(cursor.pos, f"{what} brings the strings in arrays to {cursor.strings}, over {MAX_ELEMENTS}")
    data, unpack, end, have = cursor.data, U64.unpack_from, cursor.end, cursor.have
    start = pos = cursor.pos
    ends: array[int] = array("Q")
    short = True
    for index in range(count):
        if end - pos < 8:
            cursor.fail(pos, f"element {index} of {what} has no length: {end - pos} bytes are left, not 8")
        if pos + 8 > have:
            have = cursor.fetch(pos + 8)
        (length,) = unpack(data, pos)
        if length > 127:
            short = False
            if length > MAX_STRING_BYTES:
                cursor.fail(pos, f"element {index} of {what} declares {length} bytes, over {MAX_STRING_BYTES}")
        pos += 8 + length
        if pos > end:
            cursor.fail(pos - length, f"element {index} of {what} needs {length} bytes, {pos - end} more than are left")
        ends.append(pos - start)
    cursor.pos = pos
    cursor.fetch(pos)
    raw = bytes(data[start:pos])
    if not (short and len(raw) <= MAX_STRING_BYTES and _is_utf8(raw)):
        _check_utf8(cursor, raw, start, ends, what)
    return GGUFArray("string", raw, None, ends)


def _is_utf8(raw: bytes) -> bool:
    """Whether strings with their lengths are all UTF-8, if each is shorter than 128: then each length is ASCII."""
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _check_utf8(cursor: Cursor, raw: bytes, start: int, ends: array[int], what: str) -> None:
    begin = 8
    for index, end in enumerate(ends):
        try:
            raw[begin:end].decode()
        except UnicodeDecodeError as error:
            cursor.fail(start + begin + error.start, f"element {index} of {what} is not UTF-8 ({error.reason})")
        begin = end + 8


def _array(cursor: Cursor, what: str) -> GGUFArray:
    kind = cursor.number(U32, f"the element type of {what}")
    if kind == ARRAY:
        cursor.fail(cursor.pos - 4, f"{what} is an array of arrays; only one level is read")
    if kind != STRING and kind not in SCALARS:
        cursor.fail(cursor.pos - 4, f"{what} has element type {kind}; the types are 0 to 12")
    name, form = SCALARS.get(kind, ("string", U64))
    count = cursor.count(f"the length of {what}", MAX_ELEMENTS, form.size)
    if kind == STRING:
        return _strings(cursor, what, count)
    at = cursor.room(count * form.size, what)
    raw = bytes(cursor.data[at : cursor.pos])
    if name == "bool" and (bad := raw.translate(None, b"\0\1")):
        cursor.fail(at + raw.index(bad[0]), f"{what} holds the byte {bad[0]} as a bool; only 0 and 1 are")
    return GGUFArray(name, raw, form)


def _value(cursor: Cursor, kind: int, what: str) -> Scalar | GGUFArray:
    if kind == STRING:
        return cursor.text(what, MAX_STRING_BYTES)
    if kind == ARRAY:
        return _array(cursor, what)
    if kind not in SCALARS:
        cursor.fail(cursor.pos - 4, f"{what} has value type {kind}; the types are 0 to 12")
    name, form = SCALARS[kind]
    at = cursor.room(form.size, what)
    if name == "bool" and cursor.data[at] > 1:
        cursor.fail(at, f"{what} holds the byte {cursor.data[at]} as a bool; only 0 and 1 are")
    value: Scalar = form.unpack_from(cursor.data, at)[0]
    return value


def _metadata(cursor: Cursor, count: int) -> tuple[dict[str, object], int]:
    """All key-value pairs, and the alignment in bytes."""
    metadata: dict[str, object] = {}
    alignment = 32
    for index in range(count):
        at = cursor.pos
        key = cursor.text(f"key {index}", MAX_KEY_BYTES)
        if not key or not key.isascii():
            cursor.fail(at, f"key {index} is {shown(key)}; a key is 1 to {MAX_KEY_BYTES} ASCII characters")
        if key in metadata:
            cursor.fail(at, f"duplicate key {shown(key)}; each may appear once")
        what = f"the value of {shown(key)}"
        kind = cursor.number(U32, f"the type of {what}")
        at = cursor.pos
        value = metadata[key] = _value(cursor, kind, what)
        if key == "general.alignment":
            if kind != UINT32 or not isinstance(value, int):
                cursor.fail(at - 4, f"{what} has value type {kind}; it must be a uint32 (type {UINT32})")
            if not 8 <= value <= 65_536 or value.bit_count() != 1:
                cursor.fail(at, f"{what} is {value}; the alignment is a power of two from 8 to 65536")
            alignment = value
        _check_known(cursor, key, value, at)
    _check_vocabulary(cursor.path, metadata)
    return metadata, alignment


def _check_known(cursor: Cursor, key: str, value: object, at: int) -> None:
    """Integers that size or index things elsewhere; other keys are for whoever reads them."""
    if key.startswith("tokenizer.ggml.") and key.endswith("_token_id"):
        limit = 2**32 - 1
    elif key.endswith(".block_count"):
        limit = MAX_LAYERS
    elif key.endswith(".vocab_size"):
        limit = MAX_ELEMENTS
    else:
        return
    if type(value) is not int or not 0 <= value <= limit:
        cursor.fail(at, f"the value of {shown(key)} is {shown(value)}; it must be an integer from 0 to {limit}")


def _check_vocabulary(path: Place, metadata: dict[str, object]) -> None:
    """The tokenizer's arrays agree (specification, "Tokenizer"): one score and one type per token, bytes as <0xNN>."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if tokens is None:
        return
    if not isinstance(tokens, GGUFArray) or tokens.kind != "string":
        refuse(path, f"tokenizer.ggml.tokens is {shown(tokens)}; it must be an array of strings")
    for key in ("tokenizer.ggml.scores", "tokenizer.ggml.token_type"):
        beside = metadata.get(key, tokens)
        if not isinstance(beside, GGUFArray) or len(beside) != len(tokens):
            refuse(
                path, f"{key} is {shown(beside)}; it must be an array with a number for each of {len(tokens)} tokens"
            )
        for index, kind in enumerate(beside if key.endswith("_type") else ()):
            if kind == _BYTE_TOKEN and not re.fullmatch("<0x[0-9A-Fa-f]{2}>", str(tokens[index])):
                refuse(
                    path,
                    f"token {index} of tokenizer.ggml.tokens is {shown(tokens[index])}; as its type in {key} is "
                    f"{_BYTE_TOKEN}, a byte, it must read <0x00> to <0xFF>",
                )


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


def read_gguf(path: str | os.PathLike[str] | Elsewhere) -> GGUFHeader:
    """Read and check the header of a GGUF file; no tensor data is read.

    Raises:
        ScantlingInputError: the file is not GGUF version 2 or 3, is cut short, exceeds a limit of this module, or its
            header is not true of its bytes.
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
    metadata, alignment = _metadata(cursor, n_keys)
    tensors, data_start = _tensors(cursor, n_tensors, alignment)
    return GGUFHeader(cursor.path, version, metadata, tensors, alignment, data_start)
