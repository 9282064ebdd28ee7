"""Headers of whole checkpoints: one safetensors file, or the shards that an index names, checked against each other."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import NoReturn

from scantling.checkpoint.files import CONVERT, foreign_kind, open_regular, refuse, shown
from scantling.checkpoint.header import HEADER_LIMIT, SafetensorsHeader, TensorInfo, read_safetensors
from scantling.checkpoint.strict_json import JsonReader, natural
from scantling.units import DTYPE_BYTES

INDEX_LIMIT = 16 * 2**20
"""Bytes of the longest ``model.safetensors.index.json``."""
MAX_SHARDS = 4096
_INDEX_EXTRA_CHARS = 65_536


@dataclass(frozen=True, slots=True)
class CheckpointHeader:
    """All files of a checkpoint as one; `notes` are sentences about what was found and passed over."""

    files: tuple[Path, ...]
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    notes: tuple[str, ...] = ()


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
    text = JsonReader(path, raw, 0)
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
    return weight_map, total if isinstance(total, int) and natural(total) else None


def _plain_name(text: JsonReader, shard: str, tensor: str, at: int) -> str:
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
        ".bin": f"holds only {{}}, which must be converted to safetensors; {CONVERT}",
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
