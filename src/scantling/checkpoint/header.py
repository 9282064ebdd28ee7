"""Headers of safetensors checkpoints: names, dtypes, shapes and byte ranges, checked; no tensor data is read.

The format is the one of the safetensors README: 8 bytes of little-endian header length, a JSON header, then the
buffer, which the tensors' ranges cover from end to end. Nothing is allocated from a declared size before that size is
checked against the file.
"""

from __future__ import annotations

import json
import os
import re
import reprlib
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import BinaryIO, NoReturn

from scantling.errors import ScantlingInputError, nearest
from scantling.units import DTYPE_BYTES

FORMAT_LIMIT = 100_000_000
"""Bytes of the longest header that the safetensors library accepts."""
HEADER_LIMIT = 16 * 2**20
"""Bytes of the longest header read unless the caller asks for more."""
INDEX_LIMIT = 16 * 2**20
"""Bytes of the longest ``model.safetensors.index.json``."""
MAX_SHARDS = 4096
_MAX_RANK = 64
_MAX_METADATA = 65_536
_ENTRY_CHARS = 4096
_INDEX_EXTRA_CHARS = 65_536

_DTYPES = {
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
_PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"}
_CONVERT = "weights must be safetensors or GGUF: convert it where it is trusted, with safetensors.torch.save_file"
_FOREIGN = (
    (b"version https://git-lfs", "a git-lfs pointer, not the file it points to; fetch that with: git lfs pull"),
    (b"GGUF", "a GGUF file, not safetensors; name it .gguf and read it as one"),
    (b"PK\x03\x04", f"a zip archive, as torch.save writes; {_CONVERT}"),
    (b"\x80", f"a Python pickle; {_CONVERT}"),
    (b"\x1f\x8b", "a gzip archive; unpack it first"),
    (b"\x89HDF", "an HDF5 file; weights are read from safetensors or GGUF only"),
    (b"\x93NUMPY", "a NumPy file; weights are read from safetensors or GGUF only"),
    (b"{", "JSON text, not tensors; a folder of shards is read by the folder's name"),
)

_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN_STRING = re.compile(r'"([^"\\\x00-\x1f]*)"')

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 120
_repr.maxlong = 40


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a safetensors file: `start` and `nbytes` are bytes, `start` counted from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    nbytes: int

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """The header of one file: tensors by name in header order, and ``__metadata__``."""

    path: Path
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]


@dataclass(frozen=True, slots=True)
class CheckpointHeader:
    """All files of a checkpoint as one; `notes` are sentences about what was found and passed over."""

    files: tuple[Path, ...]
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    notes: tuple[str, ...] = ()


def foreign_kind(head: bytes) -> str | None:
    """What a file is that begins with `head` and is not what its name says, with the way out; None if unknown."""
    # A header length below 4 GiB has four zero bytes here, and must not be taken for another format's magic.
    if not any(head[4:8]) and head[:3] not in (b"\x80\x04\x95", b"\x80\x05\x95"):
        return None
    if head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"<":
        return "an HTML or XML page, not weights: the download failed or asks for a login; download it again"
    return next((kind for magic, kind in _FOREIGN if head.startswith(magic)), None)


def open_regular(path: Path) -> tuple[BinaryIO, int]:
    """Open a regular file for reading; returns it and its size in bytes.

    Raises:
        ScantlingInputError: it is missing, unreadable, empty, a directory, a pipe or a device.
    """
    try:
        # Asked before opening: opening a pipe would wait for its writer.
        file = path.open("rb") if stat.S_ISREG(path.stat().st_mode) else None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ScantlingInputError(f"{path}: cannot be read: {reason}") from None
    if file is None:
        refuse(path, "is not a regular file; give the path of one file")
    size = os.fstat(file.fileno()).st_size
    if size == 0:
        file.close()
        refuse(path, "is empty (0 bytes); download or save it again")
    return file, size


def shown(value: object) -> str:
    """``repr``, cut short: values from files go into messages through this."""
    return repr(value) if type(value) is str and len(value) <= 100 else _repr.repr(value)


def refuse(path: Path, problem: str) -> NoReturn:
    """Raise the `ScantlingInputError` that says `problem` of the file at `path`."""
    raise ScantlingInputError(f"{path}: {problem}")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"duplicate key {shown(key)}")
        found[key] = value
    return found


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)


class _Json:
    """A pull parser over one JSON text: it builds one small value at a time, so memory stays near the text's size."""

    def __init__(self, path: Path, raw: bytes, base: int) -> None:
        self.path, self.base, self.pos = path, base, 0
        try:
            self.text = raw.decode()
        except UnicodeDecodeError as error:
            refuse(path, f"at byte {base + error.start}, the JSON text is not UTF-8 ({error.reason})")

    def fail(self, problem: str, at: int | None = None) -> NoReturn:
        at = self.pos if at is None else at
        refuse(self.path, f"at byte {self.base + len(self.text[:at].encode())}, {problem}")

    def peek(self) -> str:
        """The next character that is not white space, or the empty string at the end."""
        char = self.text[self.pos : self.pos + 1]
        if char.isspace():
            space = _SPACE.match(self.text, self.pos)
            assert space is not None
            self.pos = space.end()
            char = self.text[self.pos : self.pos + 1]
        return char

    def members(self, where: str, noun: str) -> Iterator[str]:
        """The keys of an object; the caller consumes each value before it asks for the next key."""
        if self.peek() != "{":
            self.fail(f"{where} must be a JSON object")
        self.pos += 1
        seen: set[str] = set()
        char = self.peek()
        while char != "}":
            at = self.pos
            key = self.string(f"a {noun} in {where}")
            if key in seen:
                self.fail(f"duplicate {noun} {shown(key)} in {where}; each may appear once", at)
            seen.add(key)
            if self.peek() != ":":
                self.fail(f"{noun} {shown(key)} in {where} needs a ':' after it")
            self.pos += 1
            yield key
            char = self.peek()
            if char == ",":
                self.pos += 1
                self.peek()
            elif char != "}":
                self.fail(f"{where} needs ',' or '}}' after {shown(key)}")
        self.pos += 1

    def string(self, where: str) -> str:
        self.peek()
        if plain := _PLAIN_STRING.match(self.text, self.pos):
            self.pos = plain.end()
            return plain[1]
        if self.peek() != '"':
            self.fail(f"{where} must be a string in double quotes")
        try:
            value, end = _DECODER.raw_decode(self.text, self.pos)
            value.encode()
        except json.JSONDecodeError as error:
            self.fail(f"{where} is not a JSON string ({error.msg})", error.pos)
        except UnicodeEncodeError:
            self.fail(f"{where} holds half of a surrogate pair, which is no character")
        assert isinstance(value, str)
        self.pos = end
        return value

    def small(self, where: str, limit: int) -> object:
        """Any value of at most `limit` characters."""
        self.peek()
        piece = self.text[self.pos : self.pos + limit]
        try:
            value, used = _DECODER.raw_decode(piece)
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            longer = f", or is longer than {limit} characters" if self.pos + limit < len(self.text) else ""
            self.fail(f"{where} is not valid JSON ({reason}){longer}")
        self.pos += used
        return value

    def finish(self) -> None:
        if self.peek():
            self.fail(f"there is {shown(self.text[self.pos : self.pos + 20])} after the end of the JSON object")


def _header_bytes(path: Path, file: BinaryIO, size: int, limit: int) -> bytes:
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
    if problem is None:
        return raw
    head = prefix + (raw[:248] or file.read(248))
    kind = foreign_kind(head)
    refuse(path, f"is {kind}" if kind else problem)


def _natural(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _entry(text: _Json, name: str, data_start: int) -> TensorInfo:
    where = f"tensor {shown(name)}"
    text.peek()
    at = text.pos
    entry = text.small(f"the entry of {where}", _ENTRY_CHARS)
    if not isinstance(entry, dict) or entry.keys() != set(_FIELDS):
        _fail_fields(text, where, entry, at)
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in _DTYPES:
        hint = nearest(code, _DTYPES) if isinstance(code, str) else ""
        text.fail(f"{where} has dtype {shown(code)}, which is none of {', '.join(_DTYPES)}{hint}", at)
    if not isinstance(shape, list) or len(shape) > _MAX_RANK or not all(map(_natural, shape)):
        text.fail(f"{where} has shape {shown(shape)}; it must list at most {_MAX_RANK} integers from 0 to 2^63-1", at)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_natural, offsets)):
        text.fail(f"{where} has data_offsets {shown(offsets)}; they must be two integers from 0 to 2^63-1", at)
    begin, end = offsets
    itemsize = DTYPE_BYTES[_DTYPES[code]]
    right = prod(shape) * itemsize
    if end - begin != right:
        text.fail(
            f"{where} has data_offsets {offsets}, {end - begin} bytes, but shape {shown(shape)} of {code} "
            f"({itemsize} bytes each) needs {shown(right)}",
            at,
        )
    return TensorInfo(name, _DTYPES[code], tuple(shape), text.path, data_start + begin, right)


def _fail_fields(text: _Json, where: str, entry: object, at: int) -> NoReturn:
    if not isinstance(entry, dict):
        text.fail(f"{where} has {shown(entry)} where an object with {', '.join(_FIELDS)} belongs", at)
    if missing := [field for field in _FIELDS if field not in entry]:
        text.fail(f"{where} lacks the field {missing[0]!r}", at)
    field = next(field for field in entry if field not in _FIELDS)
    text.fail(f"{where} has an unknown field {shown(field)}{nearest(field, _FIELDS)}", at)


def _check_coverage(path: Path, tensors: Iterable[TensorInfo], data_start: int, size: int) -> None:
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
    expected, before = data_start, "the header"
    for info in ordered:
        if info.start != expected:
            fault = "overlaps" if info.start < expected else "leaves a gap after"
            refuse(
                path,
                f"tensor {shown(info.name)} starts at byte {info.start} and {fault} {before}, which ends at byte "
                f"{expected}; tensors must follow each other without gap or overlap",
            )
        expected, before = info.start + info.nbytes, f"tensor {shown(info.name)}"
    if expected != size:
        refuse(path, f"{size - expected} bytes follow byte {expected}, where {before} ends and the file should end")


def _refuse_pickle(path: Path) -> None:
    if path.suffix.lower() in _PICKLE_SUFFIXES:
        refuse(path, f"is named {path.suffix}, the name of Python pickles; {_CONVERT}")


def read_safetensors(path: str | os.PathLike[str], *, limit: int = HEADER_LIMIT) -> SafetensorsHeader:
    """Read and check the header of one safetensors file.

    `limit` is the longest header accepted, in bytes; the format's own 100,000,000 bounds it.

    Raises:
        ScantlingInputError: the file is not safetensors, is cut short, or its header is not true of its bytes.
    """
    path = Path(path)
    _refuse_pickle(path)
    file, size = open_regular(path)
    with file:
        raw = _header_bytes(path, file, size, min(limit, FORMAT_LIMIT))
    text = _Json(path, raw, 8)
    data_start = 8 + len(raw)
    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, str] = {}
    for name in text.members("the header", "tensor name"):
        if name == "__metadata__":
            for key in text.members("__metadata__", "key"):
                if len(metadata) == _MAX_METADATA:
                    text.fail(f"__metadata__ has more than {_MAX_METADATA} keys")
                metadata[key] = text.string(f"the value of {shown(key)} in __metadata__")
        else:
            tensors[name] = _entry(text, name, data_start)
    text.finish()
    _check_coverage(path, tensors.values(), data_start, size)
    return SafetensorsHeader(path, tensors, metadata)


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(map(shown, names[:8])) + more


def _read_index(path: Path) -> tuple[dict[str, str], int | None]:
    """The weight map of an index file, and its ``total_size`` in bytes if it gives one."""
    file, size = open_regular(path)
    with file:
        if size > INDEX_LIMIT:
            refuse(path, f"has {size} bytes, over the limit of {INDEX_LIMIT} for an index")
        raw = file.read(INDEX_LIMIT)
    kind = foreign_kind(raw[:256])
    if kind and not raw.startswith(b"{"):
        refuse(path, f"is {kind}")
    text = _Json(path, raw, 0)
    weight_map: dict[str, str] | None = None
    total: object = None
    for key in text.members("the index", "key"):
        if key == "weight_map":
            weight_map = {}
            for name in text.members("weight_map", "tensor name"):
                at = text.pos
                weight_map[name] = _plain_name(text, text.string(f"the shard of tensor {shown(name)}"), name, at)
        else:
            value = text.small(f"the value of {shown(key)}", _INDEX_EXTRA_CHARS)
            if key == "metadata" and isinstance(value, dict):
                total = value.get("total_size")
    text.finish()
    if not weight_map:
        refuse(path, "has no weight_map, or an empty one; it must name the shard of every tensor")
    if (count := len(set(weight_map.values()))) > MAX_SHARDS:
        refuse(path, f"names {count} shards, over the limit of {MAX_SHARDS}")
    return weight_map, total if isinstance(total, int) and _natural(total) else None


def _plain_name(text: _Json, shard: str, tensor: str, at: int) -> str:
    plain = PurePosixPath(shard).name == shard == PureWindowsPath(shard).name and shard.isprintable()
    if not plain or not shard.endswith(".safetensors"):
        text.fail(
            f"tensor {shown(tensor)} is in {shown(shard)}; a shard must be a plain file name in the same folder "
            "that ends in .safetensors",
            at,
        )
    return shard


def _fail_missing(
    index: Path, weight_map: dict[str, str], headers: dict[str, SafetensorsHeader], total: int | None
) -> NoReturn:
    missing = sorted(set(weight_map.values()) - headers.keys())
    tensors = sum(shard not in headers for shard in weight_map.values())
    present = [info for header in headers.values() for info in header.tensors.values()]
    size = ""
    if total is not None and (nbytes := total - sum(info.nbytes for info in present)) > 0:
        size = f", {nbytes} bytes by the index's total_size"
        if len(dtypes := {info.dtype for info in present}) == 1:
            (dtype,) = dtypes
            size += f", {nbytes // DTYPE_BYTES[dtype]} parameters if they are {dtype} like the rest"
    refuse(
        index,
        f"names shards missing from the folder ({len(missing)}: {_listed(missing)}), with {tensors} of the "
        f"{len(weight_map)} tensors{size}; download them",
    )


def _read_sharded(index: Path, limit: int) -> CheckpointHeader:
    weight_map, total = _read_index(index)
    shards = sorted(set(weight_map.values()))
    paths = {shard: index.with_name(shard) for shard in shards}
    headers = {shard: read_safetensors(path, limit=limit) for shard, path in paths.items() if os.path.lexists(path)}
    if len(headers) < len(shards):
        _fail_missing(index, weight_map, headers, total)
    absent = [f"{name} ({shard})" for name, shard in weight_map.items() if name not in headers[shard].tensors]
    if absent:
        refuse(index, f"names tensors that are not in the shard it gives ({len(absent)}: {_listed(absent)})")
    metadata: dict[str, str] = {}
    extra: list[str] = []
    notes: list[str] = []
    for shard, header in headers.items():
        metadata = header.metadata | metadata
        for name in header.tensors:
            if name not in weight_map:
                extra.append(f"{name} ({shard})")
            elif weight_map[name] != shard:
                notes.append(
                    f"{header.path}: a second copy of tensor {shown(name)} is passed over; "
                    f"the index names the one in {weight_map[name]}"
                )
    if extra:
        refuse(index, f"leaves out tensors that its shards hold ({len(extra)}: {_listed(extra)}); add or drop them")
    tensors = {name: headers[shard].tensors[name] for name, shard in weight_map.items()}
    return CheckpointHeader(tuple(paths.values()), tensors, metadata, tuple(notes))


def _fail_no_weights(folder: Path) -> NoReturn:
    try:
        names = sorted(entry.name for entry in os.scandir(folder))
    except OSError as error:
        refuse(folder, f"cannot be read: {error.strerror}")
    wanted = "model.safetensors, or model.safetensors.index.json and its shards"
    advice = {
        ".safetensors": f"holds {{}} but not {wanted}; give the path of one file, or fetch the index",
        ".gguf": "holds {}; give the path of the GGUF file itself",
        ".bin": f"holds only {{}}, which must be converted to safetensors; {_CONVERT}",
    }
    advice[".pt"] = advice[".pth"] = advice[".bin"]
    for suffix, sentence in advice.items():
        if found := [name for name in names if name.lower().endswith(suffix)]:
            refuse(folder, sentence.format(_listed(found)))
    refuse(folder, f"holds no weights; it needs {wanted}")


def read_checkpoint(folder_or_file: str | os.PathLike[str], *, limit: int = HEADER_LIMIT) -> CheckpointHeader:
    """Read the headers of a checkpoint: a .safetensors file, or a folder with one, or with shards and their index.

    Of a tensor in two shards the copy that the index names counts, and a note records the other. `limit` is the longest
    header accepted in one file, in bytes.

    Raises:
        ScantlingInputError: as `read_safetensors`; or shards are missing, the index and the shards disagree, the index
            leaves the folder, or the folder holds no safetensors.
    """
    path = Path(folder_or_file)
    if not os.path.isdir(path):
        header = read_safetensors(path, limit=limit)
        return CheckpointHeader((path,), header.tensors, header.metadata)
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if os.path.lexists(single):
        header = read_safetensors(single, limit=limit)
        beside = os.path.lexists(index)
        notes = (f"{index}: the index is passed over; {single.name} beside it holds the weights",) if beside else ()
        return CheckpointHeader((single,), header.tensors, header.metadata, notes)
    if os.path.lexists(index):
        return _read_sharded(index, limit)
    _fail_no_weights(path)
