"""Headers of whole checkpoints: one safetensors file, or the shards that an index names, checked against each other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import NoReturn

from scantling.checkpoint.files import CONVERT, Place, exists, foreign_kind, listed, open_regular, refuse, shown
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

    files: tuple[Place, ...]
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    notes: tuple[str, ...] = ()


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
            at = text.pos
            weight_map = text.strings("weight_map", "tensor name", "the shard of a tensor")
            for shard in dict.fromkeys(weight_map.values()):
                _check_name(text, shard, weight_map, at)
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


def _check_name(text: JsonReader, shard: str, weight_map: Mapping[str, str], at: int) -> None:
    plain = PurePosixPath(shard).name == shard == PureWindowsPath(shard).name and shard.isprintable()
    if not plain or not shard.endswith(".safetensors"):
        tensor = next(name for name, its in weight_map.items() if its == shard)
        text.fail(
            f"tensor {shown(tensor)} is in {shown(shard)}; a shard must be a plain file name in the same folder "
            "that ends in .safetensors",
            at,
        )


@dataclass(frozen=True)
class Shards:
    """What an index says and what its shards hold, whether they agree or not.

    Attributes:
        weight_map: the shard that each tensor is said to be in.
        total: bytes of all tensors by the index; None where it does not say.
        headers: of the shards that are there.
    """

    index: Path
    weight_map: dict[str, str]
    total: int | None
    headers: dict[str, SafetensorsHeader]

    @cached_property
    def agrees(self) -> bool:
        """Whether every tensor lies in the shard that the index names, and there is no other."""
        stored: dict[str, str] = {}
        for shard, header in self.headers.items():
            stored.update(dict.fromkeys(header.tensors, shard))
        return stored == self.weight_map and len(stored) == sum(len(h.tensors) for h in self.headers.values())

    @cached_property
    def missing(self) -> list[str]:
        """Shards that the index names and that are not there."""
        return sorted(set(self.weight_map.values()) - self.headers.keys())

    @cached_property
    def lost(self) -> list[str]:
        """Tensors that the index puts into a shard that is not there."""
        return [name for name, shard in self.weight_map.items() if shard not in self.headers] if self.missing else []

    @cached_property
    def absent(self) -> list[tuple[str, str]]:
        """Tensors and the shard that the index gives them and that lacks them."""
        if self.agrees:
            return []
        found = ((name, shard, self.headers.get(shard)) for name, shard in self.weight_map.items())
        return [(name, shard) for name, shard, header in found if header and name not in header.tensors]

    @cached_property
    def extra(self) -> list[tuple[str, str]]:
        """Tensors, and their shard, that the index leaves out."""
        return [] if self.agrees else [(name, shard) for name, shard in self._stored() if name not in self.weight_map]

    @cached_property
    def copies(self) -> list[tuple[str, str]]:
        """Tensors and shards that hold them although the one that the index names holds them too."""
        if self.agrees:
            return []
        elsewhere = ((name, shard, self.weight_map.get(name, shard)) for name, shard in self._stored())
        return [(name, shard) for name, shard, said in elsewhere if said != shard and self._holds(said, name)]

    def _holds(self, shard: str, name: str) -> bool:
        header = self.headers.get(shard)
        return header is not None and name in header.tensors

    def _stored(self) -> Iterator[tuple[str, str]]:
        return ((name, shard) for shard, header in self.headers.items() for name in header.tensors)

    def said_of_missing(self) -> str:
        """How many tensors, bytes and parameters the missing shards hold, as far as that can be told."""
        size = ""
        present = [info for header in self.headers.values() for info in header.tensors.values()]
        if self.total is not None and (nbytes := self.total - sum(info.nbytes for info in present)) > 0:
            size = f", {nbytes} bytes by the index's total_size"
            if len(dtypes := {info.dtype for info in present}) == 1:
                (dtype,) = dtypes
                size += f", {nbytes // DTYPE_BYTES[dtype]} parameters if they are {dtype} like the rest"
        return f"{len(self.lost)} of the {len(self.weight_map)} tensors{size}"


Reader = Callable[[Callable[[Place], SafetensorsHeader | None], list[Place]], Iterable[SafetensorsHeader | None]]
"""As `map`: applied to every shard, one after the other or side by side."""


def read_shards(index: Path, limit: int = HEADER_LIMIT, beside: Place | None = None, each: Reader = map) -> Shards:
    """Read an index and the headers of its shards, as far as they are there.

    Args:
        limit: bytes of the longest header of a shard.
        beside: a file beside the shards, where the index lies elsewhere.
        each: how the shards are gone through.

    Raises:
        ScantlingInputError: the index or a shard is malformed, or the index leaves the folder.
    """
    weight_map, total = _read_index(index)
    shards = sorted(set(weight_map.values()))
    near: Place = index if beside is None else beside

    def read(path: Place) -> SafetensorsHeader | None:
        return read_safetensors(path, limit=limit) if exists(path) else None

    headers = zip(shards, each(read, [near.with_name(shard) for shard in shards]), strict=True)
    return Shards(index, weight_map, total, {shard: header for shard, header in headers if header is not None})


def _read_sharded(index: Path, limit: int) -> CheckpointHeader:
    shards = read_shards(index, limit)
    if missing := shards.missing:
        names = f"names shards missing from the folder ({len(missing)}: {listed(missing)})"
        refuse(index, f"{names}, with {shards.said_of_missing()}; download them")
    if absent := [f"{name} ({shard})" for name, shard in shards.absent]:
        refuse(index, f"names tensors that are not in the shard it gives ({len(absent)}: {listed(absent)})")
    if extra := [f"{name} ({shard})" for name, shard in shards.extra]:
        refuse(index, f"leaves out tensors that its shards hold ({len(extra)}: {listed(extra)}); add or drop them")
    notes = tuple(
        f"{shards.headers[shard].path}: a second copy of tensor {shown(name)} is passed over; "
        f"the index names the one in {shards.weight_map[name]}"
        for name, shard in shards.copies
    )
    return CheckpointHeader(
        tuple(header.path for header in shards.headers.values()),
        {name: shards.headers[shard].tensors[name] for name, shard in shards.weight_map.items()},
        merged_metadata(shards.headers.values()),
        notes,
    )


def merged_metadata(headers: Iterable[SafetensorsHeader]) -> dict[str, str]:
    """``__metadata__`` of all shards; of a key that several have, the first one's value."""
    metadata: dict[str, str] = {}
    for header in headers:
        metadata = header.metadata | metadata
    return metadata


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
            refuse(folder, sentence.format(listed(found)))
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
