"""Safetensors files of a saved folder: read, changed, written again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

INDEX = "model.safetensors.index.json"


def tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the folder's safetensors files."""
    from safetensors.torch import load_file

    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def write(folder: Path, state: Mapping[str, Tensor]) -> None:
    """Put these tensors in place of what was there, in one file."""
    from safetensors.torch import save_file

    clear(folder)
    save_file(dict(state), folder / "model.safetensors", metadata={"format": "pt"})


def write_sharded(folder: Path, shards: list[Mapping[str, Tensor]], places: Mapping[str, int]) -> None:
    """Put these files in place of what was there, and an index that sends each name to one of them."""
    from safetensors.torch import save_file

    clear(folder)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        save_file(dict(shard), folder / name, metadata={"format": "pt"})
    size = sum(t.numel() * t.element_size() for shard in shards for t in shard.values())
    index = {"metadata": {"total_size": size}, "weight_map": {name: names[at] for name, at in places.items()}}
    (folder / INDEX).write_text(json.dumps(index))


def clear(folder: Path) -> None:
    """Remove the files of weights and their index."""
    for path in [*folder.glob("*.safetensors"), folder / INDEX]:
        path.unlink(missing_ok=True)
