"""Headers of GGUF files: metadata, tensor names, kinds, shapes and byte ranges, checked; and tensors as float32.

Source of every format fact: the GGUF specification (ggml, docs/gguf.md, "File Structure"), versions 2 and 3, little
endian. No size that the file declares is used before it is checked against the bytes that are left.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, overload

from scantling.checkpoint.header import foreign_kind, open_regular, refuse, shown
from scantling.errors import need

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

MAX_KEYS = 65_536
MAX_TENSORS = 65_536
MAX_KEY_BYTES = 65_535
MAX_NAME_BYTES = 64
MAX_STRING_BYTES = 16 * 2**20
MAX_ELEMENTS = 4 * 2**20
"""Elements of one metadata array, and strings in all of them together: a vocabulary of 4 Mi fits."""
MAX_LAYERS = 1024

GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
    42: ("Q2_0", 64, 18),
}
"""Tensor type id: name, elements per block, bytes per block (ggml.h `ggml_type`, block structs of ggml-common.h)."""
_REMOVED_TYPES = {4, 5, 31, 32, 33, 36, 37, 38}

_SCALARS = {
    0: ("uint8", struct.Struct("<B")),
    1: ("int8", struct.Struct("<b")),
    2: ("uint16", struct.Struct("<H")),
    3: ("int16", struct.Struct("<h")),
    4: ("uint32", struct.Struct("<I")),
    5: ("int32", struct.Struct("<i")),
    6: ("float32", struct.Struct("<f")),
    7: ("bool", struct.Struct("<?")),
    10: ("uint64", struct.Struct("<Q")),
    11: ("int64", struct.Struct("<q")),
    12: ("float64", struct.Struct("<d")),
}
_STRING, _ARRAY, _UINT32 = 8, 9, 4
_BYTE_TOKEN = 6
_U32, _U64 = _SCALARS[4][1], _SCALARS[10][1]

Scalar = str | int | float | bool


class GGUFArray(Sequence[Scalar]):
    """A metadata array, read-only, kept as its bytes: a list of the same strings would take seven times the memory.

    It compares equal to any sequence of the same elements; `kind` is ``string`` or the name of the number type.
    """

    __slots__ = ("_ends", "_item", "_raw", "kind")

    def __init__(self, kind: str, raw: bytes, item: struct.Struct | None, ends: array[int] | None = None) -> None:
        self.kind, self._raw, self._item, self._ends = kind, raw, item, ends

    def __len__(self) -> int:
        return len(self._raw) // self._item.size if self._item else len(self._ends or ())

    @overload
    def __getitem__(self, index: int) -> Scalar: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Scalar]: ...
    def __getitem__(self, index: int | slice) -> Scalar | Sequence[Scalar]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        if self._item:
            value: Scalar = self._item.unpack_from(self._raw, index * self._item.size)[0]
            return value
        assert self._ends is not None
        start = self._ends[index - 1] if index else 0
        return self._raw[start + 8 : self._ends[index]].decode()

    def __iter__(self) -> Iterator[Scalar]:
        if self._item:
            return (value for (value,) in self._item.iter_unpack(self._raw))
        return self._texts()

    def _texts(self) -> Iterator[str]:
        begin = 8
        for end in self._ends or ():
            yield self._raw[begin:end].decode()
            begin = end + 8

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(mine == its for mine, its in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<GGUFArray of {len(self)} {self.kind}>"


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor: `shape` is row-major (the file lists dimensions fastest first); `start` and `nbytes` are bytes."""

    name: str
    kind: str
    shape: tuple[int, ...]
    file: Path
    start: int
    nbytes: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """A GGUF header; arrays in `metadata` are `GGUFArray`, `data_start` is a byte offset in the file."""

    path: Path
    version: int
    metadata: dict[str, object]
    tensors: dict[str, GGUFTensor]
    alignment: int
    data_start: int


class _Cursor:
    """A position in the mapped file, and reads that fail with a sentence instead of going past the end."""

    __slots__ = ("data", "end", "path", "pos", "strings")

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.pos, self.end, self.strings = path, data, 0, len(data), 0

    def fail(self, at: int, problem: str) -> NoReturn:
        refuse(self.path, f"at byte {at}, {problem}")

    def room(self, nbytes: int, what: str) -> int:
        """Step over `nbytes`; returns where they begin."""
        at = self.pos
        if nbytes > self.end - at:
            self.fail(at, f"{what} needs {nbytes} bytes and {self.end - at} are left; the file is cut short or damaged")
        self.pos = at + nbytes
        return at

    def number(self, form: struct.Struct, what: str) -> int:
        value: int = form.unpack_from(self.data, self.room(form.size, what))[0]
        return value

    def text(self, what: str, limit: int) -> str:
        length = self.number(_U64, f"the length of {what}")
        if length > limit:
            self.fail(self.pos - 8, f"{what} declares {length} bytes, over the limit of {limit}")
        at = self.room(length, what)
        try:
            return self.data[at : self.pos].decode()
        except UnicodeDecodeError as error:
            self.fail(at + error.start, f"{what} is not UTF-8 ({error.reason})")

    def count(self, what: str, limit: int, least: int) -> int:
        """A 64-bit count of things that take at least `least` bytes each."""
        count = self.number(_U64, what)
        if count > limit:
            self.fail(self.pos - 8, f"{what} is {count}, over the limit of {limit}")
        if count * least > self.end - self.pos:
            self.fail(
                self.pos - 8,
                f"{what} is {count}, which takes at least {count * least} bytes, and {self.end - self.pos} are left",
            )
        return count


def _strings(cursor: _Cursor, what: str, count: int) -> GGUFArray:
    cursor.strings += count
    if cursor.strings > MAX_ELEMENTS:
        cursor.fail(cursor.pos, f"{what} brings the strings in arrays to {cursor.strings}, over {MAX_ELEMENTS}")
    data, unpack, end = cursor.data, _U64.unpack_from, cursor.end
    start = pos = cursor.pos
    ends: array[int] = array("Q")
    short = True
    for index in range(count):
        if end - pos < 8:
            cursor.fail(pos, f"element {index} of {what} has no length: {end - pos} bytes are left, not 8")
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
    raw = data[start:pos]
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


def _check_utf8(cursor: _Cursor, raw: bytes, start: int, ends: array[int], what: str) -> None:
    begin = 8
    for index, end in enumerate(ends):
        try:
            raw[begin:end].decode()
        except UnicodeDecodeError as error:
            cursor.fail(start + begin + error.start, f"element {index} of {what} is not UTF-8 ({error.reason})")
        begin = end + 8


def _array(cursor: _Cursor, what: str) -> GGUFArray:
    kind = cursor.number(_U32, f"the element type of {what}")
    if kind == _ARRAY:
        cursor.fail(cursor.pos - 4, f"{what} is an array of arrays; only one level is read")
    if kind != _STRING and kind not in _SCALARS:
        cursor.fail(cursor.pos - 4, f"{what} has element type {kind}; the types are 0 to 12")
    name, form = _SCALARS.get(kind, ("string", _U64))
    count = cursor.count(f"the length of {what}", MAX_ELEMENTS, form.size)
    if kind == _STRING:
        return _strings(cursor, what, count)
    at = cursor.room(count * form.size, what)
    raw = cursor.data[at : cursor.pos]
    if name == "bool" and (bad := raw.translate(None, b"\0\1")):
        cursor.fail(at + raw.index(bad[0]), f"{what} holds the byte {bad[0]} as a bool; only 0 and 1 are")
    return GGUFArray(name, raw, form)


def _value(cursor: _Cursor, kind: int, what: str) -> Scalar | GGUFArray:
    if kind == _STRING:
        return cursor.text(what, MAX_STRING_BYTES)
    if kind == _ARRAY:
        return _array(cursor, what)
    if kind not in _SCALARS:
        cursor.fail(cursor.pos - 4, f"{what} has value type {kind}; the types are 0 to 12")
    name, form = _SCALARS[kind]
    at = cursor.room(form.size, what)
    if name == "bool" and cursor.data[at] > 1:
        cursor.fail(at, f"{what} holds the byte {cursor.data[at]} as a bool; only 0 and 1 are")
    value: Scalar = form.unpack_from(cursor.data, at)[0]
    return value


def _metadata(cursor: _Cursor, count: int) -> tuple[dict[str, object], int]:
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
        kind = cursor.number(_U32, f"the type of {what}")
        at = cursor.pos
        value = metadata[key] = _value(cursor, kind, what)
        if key == "general.alignment":
            if kind != _UINT32 or not isinstance(value, int):
                cursor.fail(at - 4, f"{what} has value type {kind}; it must be a uint32 (type {_UINT32})")
            if not 8 <= value <= 65_536 or value.bit_count() != 1:
                cursor.fail(at, f"{what} is {value}; the alignment is a power of two from 8 to 65536")
            alignment = value
        _check_known(cursor, key, value, at)
    _check_vocabulary(cursor.path, metadata)
    return metadata, alignment


def _check_known(cursor: _Cursor, key: str, value: object, at: int) -> None:
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


def _check_vocabulary(path: Path, metadata: dict[str, object]) -> None:
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


def _tensor(cursor: _Cursor, index: int) -> tuple[GGUFTensor, int]:
    """One tensor info, `start` still relative to the data; and the byte where its offset stands."""
    at = cursor.pos
    name = cursor.text(f"the name of tensor {index}", MAX_NAME_BYTES)
    if not name:
        cursor.fail(at, f"tensor {index} has an empty name")
    what = f"tensor {shown(name)}"
    n_dims = cursor.number(_U32, f"the number of dimensions of {what}")
    if not 1 <= n_dims <= 4:
        cursor.fail(cursor.pos - 4, f"{what} has {n_dims} dimensions; 1 to 4 are allowed")
    at = cursor.pos
    dims = tuple(cursor.number(_U64, f"dimension {i} of {what}") for i in range(n_dims))
    if not all(0 < dim < 2**63 for dim in dims):
        cursor.fail(at, f"{what} has dimensions {dims}; each must be from 1 to 2^63-1")
    type_id = cursor.number(_U32, f"the type of {what}")
    if type_id not in GGML_TYPES:
        fault = "was removed from the format" if type_id in _REMOVED_TYPES else "is unknown"
        cursor.fail(cursor.pos - 4, f"{what} has type {type_id}, which {fault}")
    kind, block, block_bytes = GGML_TYPES[type_id]
    if dims[0] % block:
        cursor.fail(at, f"{what} has rows of {dims[0]} elements; {kind} needs a multiple of {block}")
    nbytes = prod(dims) // block * block_bytes
    if nbytes > cursor.end:
        cursor.fail(at, f"{what} of dimensions {dims} takes {nbytes} bytes of {kind}; the file has {cursor.end}")
    offset = cursor.number(_U64, f"the offset of {what}")
    return GGUFTensor(name, kind, dims[::-1], cursor.path, offset, nbytes), cursor.pos - 8


def _tensors(cursor: _Cursor, count: int, alignment: int) -> tuple[dict[str, GGUFTensor], int]:
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


def _version(cursor: _Cursor) -> int:
    head = cursor.data[:256]
    if head[:4] != b"GGUF":
        kind = foreign_kind(head)
        begins = f"begins with {shown(head[:4])}; a GGUF file begins with b'GGUF'"
        refuse(cursor.path, f"is {kind}" if kind else begins)
    cursor.pos = 4
    version = cursor.number(_U32, "the version")
    swapped = int.from_bytes(head[4:8], "big")
    if swapped in (2, 3):
        cursor.fail(4, f"the file is big-endian GGUF (version {swapped}); convert it to little-endian")
    if version not in (2, 3):
        cursor.fail(4, f"the GGUF version is {version}; versions 2 and 3 are read, so convert the model again")
    return version


def read_gguf(path: str | os.PathLike[str]) -> GGUFHeader:
    """Read and check the header of a GGUF file; no tensor data is read.

    Raises:
        ScantlingInputError: the file is not GGUF version 2 or 3, is cut short, exceeds a limit of this module, or its
            header is not true of its bytes.
    """
    path = Path(path)
    file, _ = open_regular(path)
    with file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(path, data)
        version = _version(cursor)
        # The least bytes: a name length, dimensions, type and offset; a key of one character, a type and a bool.
        n_tensors = cursor.count("the number of tensors", MAX_TENSORS, 8 + 1 + 4 + 8 + 4 + 8)
        n_keys = cursor.count("the number of key-value pairs", MAX_KEYS, 8 + 1 + 4 + 1)
        metadata, alignment = _metadata(cursor, n_keys)
        tensors, data_start = _tensors(cursor, n_tensors, alignment)
    return GGUFHeader(path, version, metadata, tensors, alignment, data_start)


def dequantise(tensor: GGUFTensor) -> NDArray[numpy.float32]:
    """The values of one tensor as float32, in `tensor.shape`.

    F32 is a copy-on-write map of the file and costs no memory until it is written to; F16, BF16 and F64 are converted;
    blocks go through ``gguf.quants``, whose bits are the result.

    Raises:
        ScantlingInputError: the kind holds integers or has no float32 form in ``gguf``, or the file has shrunk.
        MissingExtra: numpy or gguf is not installed.
    """
    np = need("numpy", "read GGUF tensors")
    plain = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "F64": "<f8"}.get(tensor.kind)
    block, block_bytes = next(sizes for name, *sizes in GGML_TYPES.values() if name == tensor.kind)
    shape = tensor.shape if plain else (*tensor.shape[:-1], tensor.shape[-1] // block * block_bytes)
    try:
        raw = np.memmap(tensor.file, plain or "u1", mode="c", offset=tensor.start, shape=shape).view(np.ndarray)
    except (OSError, ValueError) as error:
        refuse(tensor.file, f"tensor {shown(tensor.name)} at byte {tensor.start} cannot be mapped: {error}")
    with np.errstate(all="ignore"):
        if plain is None:
            values = _dequantise_blocks(tensor, raw)
        elif tensor.kind == "BF16":
            bits = raw.astype(np.uint32)
            bits <<= 16
            values = bits.view(np.float32)
        else:
            values = raw.astype(np.float32, copy=False)
    result: NDArray[numpy.float32] = values
    return result


def _dequantise_blocks(tensor: GGUFTensor, raw: NDArray[numpy.uint8]) -> NDArray[numpy.float32]:
    quants = need("gguf.quants", "dequantise GGUF blocks")
    try:
        values: NDArray[numpy.float32] = quants.dequantize(raw, quants.GGMLQuantizationType[tensor.kind])
    except (KeyError, NotImplementedError):
        refuse(
            tensor.file,
            f"tensor {shown(tensor.name)} at byte {tensor.start} is {tensor.kind}, which has no float32 form here; "
            "convert the model again with weights of another kind",
        )
    return values
