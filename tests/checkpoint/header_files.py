"""Checkpoints of any size that are headers alone: the data behind them is a hole in the file."""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import scantling as sc
from scantling.checkpoint.families import FAMILIES
from scantling.checkpoint.hf_config import read_config
from scantling.checkpoint.names import foreign_shapes, links

Shape = tuple[int, ...]
SIZES = {"BF16": 2, "F32": 4, "F16": 2, "I64": 8, "U8": 1}


def header_file(path: Path, shapes: Mapping[str, Shape], dtype: str = "BF16") -> int:
    """Write a safetensors file whose tensors are never written; returns the bytes of its data."""
    entries, at = {}, 0
    for name, shape in shapes.items():
        end = at + math.prod(shape) * SIZES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    raw = json.dumps(entries, separators=(",", ":")).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + at)
    return at


def header_folder(
    folder: Path, shapes: Mapping[str, Shape], config: Path | dict[str, Any] | None, shard: int = 5 * 10**9
) -> Path:
    """Write shards of at most `shard` bytes of bfloat16, their index, and the config."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Shape]] = [{}]
    size = 0
    for name, shape in shapes.items():
        nbytes = 2 * math.prod(shape)
        if shards[-1] and size + nbytes > shard:
            shards.append({})
            size = 0
        shards[-1][name] = shape
        size += nbytes
    if len(shards) == 1:
        header_file(folder / "model.safetensors", shards[0])
    else:
        names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
        total = sum(header_file(folder / name, piece) for name, piece in zip(names, shards, strict=True))
        placed = {tensor: name for name, piece in zip(names, shards, strict=True) for tensor in piece}
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if isinstance(config, dict):
        (folder / "config.json").write_text(json.dumps(config))
    elif config is not None:
        shutil.copyfile(config, folder / "config.json")
    return folder


def shapes_of_config(config: Path) -> dict[str, Shape]:
    """Names and shapes of the checkpoint that a config describes."""
    card, model_type = read_config(config)
    weights = sc.assemble(card).named_stored
    return foreign_shapes(links(FAMILIES[model_type].rows(card), weights), weights)
