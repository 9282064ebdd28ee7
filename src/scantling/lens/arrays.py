"""Arrays to and from safetensors files: what was captured, directions, maps of a tuned lens."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from scantling.checkpoint.header import read_safetensors
from scantling.errors import ScantlingInputError


def read_arrays(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Every tensor of a safetensors file by its name.

    Raises:
        ScantlingInputError: no such file, a pickle, a damaged one, or one with numbers that are not finite.
    """
    read_safetensors(path)
    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ScantlingInputError(f"{path}: cannot be read: {error}") from None
    for name, value in found.items():
        if not value.is_floating_point() or not bool(value.isfinite().all()):
            raise ScantlingInputError(f"{path}: {name!r} holds numbers that are not finite, or no real numbers")
    return found


def write_arrays(path: Path, arrays: Mapping[str, Tensor], notes: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        own = {name: value.detach().cpu().contiguous().clone() for name, value in arrays.items()}
        save_file(own, partial, metadata=dict(notes or {}))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
