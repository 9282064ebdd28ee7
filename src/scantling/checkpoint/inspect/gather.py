"""The files of a checkpoint and the headers in them, put together without refusing what does not fit."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scantling.checkpoint.files import CONVERT, Elsewhere, Place, listed, open_regular, refuse, shown
from scantling.checkpoint.gguf import GGUFHeader, GGUFTensor, read_gguf
from scantling.checkpoint.header import HEADER_LIMIT, SafetensorsHeader, TensorInfo, read_safetensors
from scantling.checkpoint.inspect.codes import Finding
from scantling.checkpoint.sharded import Shards, read_checkpoint, read_shards

Stored = TensorInfo | GGUFTensor
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_SMALL_SHARD = 0.5
"""A shard below this share of the largest is worth a word."""
_PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64", "I8": "int8", "I16": "int16"}
_PLAIN |= {"I32": "int32", "I64": "int64"}


def dtype_of(tensor: Stored) -> str:
    """``float32`` and the like; of GGUF's blocks their own name."""
    return tensor.dtype if isinstance(tensor, TensorInfo) else _PLAIN.get(tensor.kind, tensor.kind)


@dataclass(frozen=True)
class Weights:
    """One file of weights; `nbytes` is the size of the whole file."""

    path: Place
    nbytes: int
    tensors: int


@dataclass
class Gathered:
    """What lies in a checkpoint.

    Attributes:
        where: what was given.
        form: safetensors, gguf, or none where there is only a config.
        tensors: by their names, those of missing shards left out.
        config: a config.json; None where there is none, and for GGUF.
        header: of a GGUF file.
        complete: no file is missing.
    """

    where: Place
    form: str
    files: tuple[Weights, ...] = ()
    tensors: Mapping[str, Stored] = field(default_factory=dict)
    config: Path | None = None
    header: GGUFHeader | None = None
    complete: bool = True
    findings: list[Finding] = field(default_factory=list)

    @property
    def folder(self) -> Path | None:
        """Where the files beside the weights lie; None for another machine's."""
        if isinstance(self.where, Elsewhere):
            return None
        return self.where if self.where.is_dir() else self.where.parent

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def gather(path: Path, *, limit: int = HEADER_LIMIT) -> Gathered:
    """Find and read every header of a folder, a file of weights, an index or a config.

    Args:
        limit: bytes of the longest header accepted in one file.

    Raises:
        ScantlingInputError: there is no such path, it is no checkpoint, or a file is malformed.
    """
    if os.path.isdir(path):
        return _folder(path, limit)
    if path.name == INDEX:
        return _with_config(_sharded(path, limit), path.parent)
    if path.suffix == ".json":
        beside = path.name == "config.json" and _weights_in(path.parent)
        return _folder(path.parent, limit) if beside else _config_alone(path)
    if path.suffix == ".gguf" or _begins(path, b"GGUF"):
        return _gguf(path)
    found = _single(path, limit)
    return _with_config(found, path.parent)


def _begins(path: Path, magic: bytes) -> bool:
    if path.suffix == ".safetensors":
        return False
    file, _ = open_regular(path)
    with file:
        return file.read(len(magic)) == magic


def _weights_in(folder: Path) -> list[Path]:
    """Files of weights that can be read, by name."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        refuse(folder, f"cannot be read: {error.strerror}")
    return [folder / name for name in names if name.lower().endswith((".safetensors", ".gguf"))]


def _folder(folder: Path, limit: int) -> Gathered:
    found = _weights_in(folder)
    files = [path for path in found if path.suffix == ".safetensors"]
    index = folder / INDEX
    if os.path.lexists(folder / SINGLE):
        gathered = _single(folder / SINGLE, limit)
        if os.path.lexists(index):
            gathered.findings.append(Finding("index_unused", f"{INDEX} is passed over; {SINGLE} holds the weights"))
    elif os.path.lexists(index):
        gathered = _sharded(index, limit)
    elif files:
        gathered = _loose(folder, files, limit)
    elif len(found) == 1:
        return _gguf(found[0])
    elif found:
        refuse(folder, f"holds several GGUF files ({listed(path.name for path in found)}); give the path of one")
    elif os.path.lexists(folder / "config.json"):
        return _config_alone(folder / "config.json")
    else:
        read_checkpoint(folder)
        raise AssertionError("a folder without weights was read")
    return _with_config(gathered, folder)


def _config_alone(path: Path) -> Gathered:
    found = Gathered(path, "none", config=path)
    pickles = [name for name in os.listdir(path.parent) if name.lower().endswith((".bin", ".pt", ".pth"))]
    beside = f"; {listed(sorted(pickles))} cannot be read: {CONVERT}" if pickles else ""
    found.findings.append(Finding("no_weights", f"{path.name} stands alone, without tensors{beside}"))
    return found


def _with_config(found: Gathered, folder: Path) -> Gathered:
    config = folder / "config.json"
    if os.path.lexists(config):
        found.config = config
    else:
        found.findings.append(Finding("no_config", f"{folder} has no config.json"))
    return found


def _gguf(path: Path) -> Gathered:
    header = read_gguf(path)
    file = Weights(path, path.stat().st_size, len(header.tensors))
    return Gathered(path, "gguf", (file,), header.tensors, header=header)


def _single(path: Path, limit: int) -> Gathered:
    return of_headers(path, [read_safetensors(path, limit=limit)])


def of_headers(where: Place, headers: Sequence[SafetensorsHeader]) -> Gathered:
    """Files of tensors that belong together."""
    tensors: dict[str, Stored] = {}
    for header in headers:
        tensors |= header.tensors
    return Gathered(where, "safetensors", tuple(map(_weights, headers)), tensors)


def _weights(header: SafetensorsHeader) -> Weights:
    return Weights(header.path, header.nbytes, len(header.tensors))


def _loose(folder: Path, paths: list[Path], limit: int) -> Gathered:
    """Files that no index holds together."""
    found = of_headers(folder, [read_safetensors(path, limit=limit) for path in paths])
    if len(paths) > 1:
        names = listed(path.name for path in paths)
        found.findings.append(Finding("index_missing", f"{len(paths)} files and no {INDEX}: {names}"))
    elif paths[0].name != SINGLE:
        text = f"the only file is {shown(paths[0].name)}, which loaders do not look for; {SINGLE} is the usual name"
        found.findings.append(Finding("index_missing", text, "the file was renamed, or is a part of something else"))
    return found


def _sharded(index: Path, limit: int) -> Gathered:
    return of_shards(index.parent, read_shards(index, limit))


def of_shards(where: Place, shards: Shards) -> Gathered:
    """Shards and their index, whether they agree or not.

    Raises:
        ScantlingInputError: none of the shards is there.
    """
    if not shards.headers:
        refuse(where, f"the {len(shards.missing)} shards of its index are all missing: {listed(shards.missing)}")
    tensors: dict[str, Stored] = {}
    if shards.agrees:
        for header in shards.headers.values():
            tensors |= header.tensors
        tensors = {name: tensors[name] for name in shards.weight_map}
    else:
        placed = ((name, shards.headers.get(shard)) for name, shard in shards.weight_map.items())
        tensors = {name: header.tensors[name] for name, header in placed if header and name in header.tensors}
        for header in shards.headers.values():
            for name, info in header.tensors.items():
                tensors.setdefault(name, info)
    files = tuple(_weights(header) for header in shards.headers.values())
    found = Gathered(where, "safetensors", files, tensors, complete=not shards.missing)
    found.findings += _index_findings(shards)
    return found


def _index_findings(shards: Shards) -> Iterable[Finding]:
    if missing := shards.missing:
        yield Finding(
            "shard_missing", f"{len(missing)} of the shards: {listed(missing)}, with {shards.said_of_missing()}"
        )
    for code, pairs, words in (
        ("index_absent", shards.absent, "are not in the shard that the index gives"),
        ("index_extra", shards.extra, "are in a shard and not in the index"),
        ("index_copy", shards.copies, "stand in a second shard, whose copies are passed over"),
    ):
        if pairs:
            names = listed(f"{name} ({shard})" for name, shard in pairs)
            yield Finding(code, f"{len(pairs)} tensors {words}: {names}")
    if missing:
        return
    copied = sum(shards.headers[shard].tensors[name].nbytes for name, shard in shards.copies)
    nbytes = sum(header.tensor_nbytes for header in shards.headers.values()) - copied
    if shards.total is not None and shards.total != nbytes:
        yield Finding("index_size", f"total_size is {shards.total:,} and the tensors have {nbytes:,} bytes")
    yield from _small_shards(shards)


def _small_shards(shards: Shards) -> Iterable[Finding]:
    """Shards that are much smaller than the largest although nothing is missing, and why."""
    headers = list(shards.headers.values())
    sizes = [header.tensor_nbytes for header in headers]
    largest = max(sizes)
    for i, (header, size) in enumerate(zip(headers, sizes, strict=True)):
        if size >= _SMALL_SHARD * largest or not header.tensors:
            continue
        what = f"{len(header.tensors)} tensors" if len(header.tensors) > 1 else "one tensor"
        text = (
            f"{header.path.name} has {size:,} bytes, {size / largest:.1%} of the largest; it is complete, with {what}"
        )
        yield Finding("shard_sizes", text, _why_small(headers, i, size, largest))


def _why_small(headers: list[SafetensorsHeader], i: int, size: int, largest: int) -> str:
    if i == len(headers) - 1:
        return f"it is the last and holds what did not fit into {headers[i - 1].path.name} any more" if i else ""
    after = max(headers[i + 1].tensors.values(), key=lambda info: info.nbytes)
    if size + after.nbytes > largest:
        return f"the next tensor did not fit: {shown(after.name)} has {after.nbytes:,} bytes"
    return ""
