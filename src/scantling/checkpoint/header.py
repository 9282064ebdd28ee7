"""Headers of safetensors checkpoints: names, dtypes, shapes and byte ranges, checked; no tensor data is read.

The format is the one of the safetensors README: 8 bytes of little-endian header length, a JSON header, then the
buffer, which the tensors' ranges cover from end to end. Nothing is allocated from a declared size before that size is
checked against the file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO, NoReturn

import msgspec

from scantling.checkpoint.files import CONVERT, Elsewhere, Place, foreign_kind, open_regular, refuse
from scantling.checkpoint.files import shown as shown
from scantling.checkpoint.strict_json import JsonReader, natural
from scantling.errors import nearest
from scantling.units import DTYPE_BYTES

FORMAT_LIMIT = 100_000_000
"""Bytes of the longest header that the safetensors library accepts."""
HEADER_LIMIT = 16 * 2**20
"""Bytes of the longest header read unless the caller asks for more."""
_MAX_RANK = 64
_MAX_METADATA = 65_536
_ENTRY_CHARS = 4096

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
_FIELDS = ("dtype", "shape", "data_offsets")
_NUMBER = r"(?:0|[1-9][0-9]{0,18})"
_PLAIN_ENTRY = re.compile(
    r'"([^"\\\x00-\x1f]*)":\{"dtype":"'
    rf'([A-Z0-9_]+","shape":\[(?:{_NUMBER}(?:,{_NUMBER}){{0,63}})?)\],"data_offsets":\[({_NUMBER}),({_NUMBER})\]\}}'
    r"(?:,|(\}[ \t\n\r]*\Z))|[\s\S]"
)
"""A tensor as the library writes it, and what follows; one character of anything else, without a group."""
_METADATA = '{"__metadata__":'
_PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"}


class TensorInfo(msgspec.Struct, frozen=True, gc=False):
    """One tensor of a safetensors file: `start` and `nbytes` are bytes, `start` counted from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Place
    start: int
    nbytes: int

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """The header of one file.

    Attributes:
        tensors: by name in header order; their bytes cover the file from `data_start` to its end.
        metadata: ``__metadata__``.
        nbytes: of the whole file.
    """

    path: Place
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    data_start: int
    nbytes: int

    @property
    def tensor_nbytes(self) -> int:
        """Bytes of all tensors together."""
        return self.nbytes - self.data_start


def _header_bytes(path: Place, file: BinaryIO, size: int, limit: int) -> bytes:
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    problem = None
    if size < 8:
        problem = f"has {size} bytes, fewer than the 8 of a header length; it was cut short: download it again"
    elif length > limit:
        problem = (
            f"declares a header of {length} bytes in its first 8 bytes, over the limit of {limit} "
            f"(the format allows {FORMAT_LIMIT}), in a file of {size} bytes"
        )
    elif length > size - 8:
        problem = (
            f"declares a header of {length} bytes but only {size - 8} follow in a file of {size} bytes: "
            f"{length - size + 8} bytes are missing, so download it again"
        )
    raw = b"" if problem else file.read(length)
    if not problem and not raw.startswith(b"{"):
        problem = f"has {shown(raw[:1])} at byte 8 where a safetensors header begins with '{{'"
    if problem:
        kind = foreign_kind(prefix + (raw[:248] or file.read(248)))
        refuse(path, f"is {kind}" if kind else problem)
    return raw


def _usual(text: JsonReader, data_start: int, size: int) -> tuple[dict[str, TensorInfo] | None, dict[str, str]]:
    """A header as the library writes it, in one pass: a checkpoint may have tens of thousands of tensors."""
    metadata: dict[str, str] = {}
    text.pos = 1
    if text.text.startswith(_METADATA):
        text.pos = len(_METADATA)
        metadata = _metadata(text)
        text.pos += text.peek() == ","
    return _plain_tensors(text, data_start, size), metadata


def _plain_tensors(text: JsonReader, data_start: int, size: int) -> dict[str, TensorInfo] | None:
    """All tensors from the reader's place on, if every one is spelled as the library does and starts where the one
    before ends; None where one is not, or is not true, or has the name of another.
    """
    tensors: dict[str, TensorInfo] = {}
    kinds: dict[str, tuple[str, tuple[int, ...], int]] = {}
    at, count, closed, path = 0, 0, None, text.path
    for found in _PLAIN_ENTRY.finditer(text.text, text.pos):
        name, stored, begin, end, closed = found.groups()
        kind = None if name is None else kinds.get(stored) or _kind(stored)
        if kind is None or int(begin) != at or int(end) != at + kind[2]:
            return None
        kinds[stored] = kind
        tensors[name] = TensorInfo(name, kind[0], kind[1], path, data_start + at, kind[2])
        at, count = at + kind[2], count + 1
    whole = closed is not None and data_start + at == size and len(tensors) == count
    return tensors if whole and "__metadata__" not in tensors else None


def _kind(stored: str) -> tuple[str, tuple[int, ...], int] | None:
    """The dtype, shape and bytes of what a plain entry says up to the end of its shape."""
    code, _, sides = stored.partition('","shape":[')
    shape = tuple(map(int, sides.split(","))) if sides else ()
    if code not in DTYPES or not all(map(natural, shape)):
        return None
    return DTYPES[code], shape, prod(shape) * DTYPE_BYTES[DTYPES[code]]


def _fields(text: JsonReader, where: str) -> tuple[object, object, object]:
    """dtype, shape and data_offsets as they stand."""
    at = text.pos
    entry = text.small(f"the entry of {where}", _ENTRY_CHARS)
    if not isinstance(entry, dict) or entry.keys() != set(_FIELDS):
        _fail_fields(text, where, entry, at)
    return entry["dtype"], entry["shape"], entry["data_offsets"]


def _entry(text: JsonReader, name: str, data_start: int) -> TensorInfo:
    where, at = f"tensor {shown(name)}", text.pos
    code, shape, offsets = _fields(text, where)
    if not isinstance(code, str) or code not in DTYPES:
        hint = nearest(code, DTYPES) if isinstance(code, str) else ""
        text.fail(f"{where} has dtype {shown(code)}, which is none of {', '.join(DTYPES)}{hint}", at)
    if not isinstance(shape, list) or len(shape) > _MAX_RANK or not all(map(natural, shape)):
        text.fail(f"{where} has shape {shown(shape)}; it must list at most {_MAX_RANK} integers from 0 to 2^63-1", at)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(natural, offsets)):
        text.fail(f"{where} has data_offsets {shown(offsets)}; they must be two integers from 0 to 2^63-1", at)
    begin, end = offsets
    itemsize = DTYPE_BYTES[DTYPES[code]]
    right = prod(shape) * itemsize
    if end - begin != right:
        text.fail(
            f"{where} has data_offsets {offsets}, {end - begin} bytes, but shape {shown(shape)} of {code} "
            f"({itemsize} bytes each) needs {shown(right)}",
            at,
        )
    return TensorInfo(name, DTYPES[code], tuple(shape), text.path, data_start + begin, right)


def _fail_fields(text: JsonReader, where: str, entry: object, at: int) -> NoReturn:
    if not isinstance(entry, dict):
        text.fail(f"{where} has {shown(entry)} where an object with {', '.join(_FIELDS)} belongs", at)
    if missing := [field for field in _FIELDS if field not in entry]:
        text.fail(f"{where} lacks the field {missing[0]!r}", at)
    field = next(field for field in entry if field not in _FIELDS)
    text.fail(f"{where} has an unknown field {shown(field)}{nearest(field, _FIELDS)}", at)


def _check_coverage(path: Place, tensors: Iterable[TensorInfo], data_start: int, size: int) -> None:
    """The ranges must tile the buffer, as the format asks ("no holes")."""
    ordered = sorted(tensors, key=lambda info: (info.start, info.nbytes))
    if ordered:
        last = max(ordered, key=lambda info: info.start + info.nbytes)
        if (missing := last.start + last.nbytes - size) > 0:
            refuse(
                path,
                f"tensor {shown(last.name)} ends at byte {last.start + last.nbytes} but the file has {size} bytes: "
                f"{missing} bytes are missing, so download it again",
            )
    expected, before = data_start, None
    for info in ordered:
        if info.start != expected:
            fault = "overlaps" if info.start < expected else "leaves a gap after"
            refuse(
                path,
                f"tensor {shown(info.name)} starts at byte {info.start} and {fault} {_named(before)}, which ends at "
                f"byte {expected}; tensors must follow each other without gap or overlap",
            )
        expected, before = info.start + info.nbytes, info
    if expected != size:
        said = f"{size - expected} bytes follow byte {expected}, where {_named(before)} ends"
        refuse(path, f"{said} and the file should end")


def _named(info: TensorInfo | None) -> str:
    return "the header" if info is None else f"tensor {shown(info.name)}"


def _refuse_pickle(path: Place) -> None:
    if path.suffix.lower() in _PICKLE_SUFFIXES:
        refuse(path, f"is named {path.suffix}, the name of Python pickles; {CONVERT}")


def read_safetensors(path: str | os.PathLike[str] | Elsewhere, *, limit: int = HEADER_LIMIT) -> SafetensorsHeader:
    """Read and check the header of one safetensors file.

    `limit` is the longest header accepted, in bytes; the format's own 100,000,000 bounds it.

    Raises:
        ScantlingInputError: the file is not safetensors, is cut short, or its header is not true of its bytes.
    """
    path = path if isinstance(path, Elsewhere) else Path(path)
    _refuse_pickle(path)
    file, size = open_regular(path)
    with file:
        raw = _header_bytes(path, file, size, min(limit, FORMAT_LIMIT))
    text = JsonReader(path, raw, 8)
    data_start = 8 + len(raw)
    plain, metadata = _usual(text, data_start, size)
    if plain is not None:
        return SafetensorsHeader(path, plain, metadata, data_start, size)
    text.pos = 0
    tensors: dict[str, TensorInfo] = {}
    for name in text.members("the header", "tensor name"):
        if name == "__metadata__":
            metadata = _metadata(text)
        else:
            tensors[name] = _entry(text, name, data_start)
    text.finish()
    _check_coverage(path, tensors.values(), data_start, size)
    return SafetensorsHeader(path, tensors, metadata, data_start, size)


def _metadata(text: JsonReader) -> dict[str, str]:
    metadata: dict[str, str] = {}
    for key in text.members("__metadata__", "key"):
        if len(metadata) == _MAX_METADATA:
            text.fail(f"__metadata__ has more than {_MAX_METADATA} keys")
        metadata[key] = text.string(f"the value of {shown(key)} in __metadata__")
    return metadata
