"""The training state beside a checkpoint: safetensors and JSON, no pickle."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from scantling.checkpoint.safetensors_write import flush
from scantling.errors import ScantlingInputError

FOLDER = "training"
TENSORS = "optimizer.safetensors"
STATE = "state.json"
FORMAT = 1


@dataclass
class Progress:
    """Where a run stands; plain JSON.

    Attributes:
        step: updates made or skipped.
        tokens: real tokens that went through the net.
        seconds: spent in updates.
        cursor: where the data goes on; None at the beginning.
        best: the lowest held-out loss, and `best_step` where it was.
        waited: evaluations since then.
        skipped: updates that were refused, in a row and in all.
        norms: the last norms of the gradient, which spikes are compared with.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    cursor: Mapping[str, Any] | None = None
    best: float | None = None
    best_step: int | None = None
    waited: int = 0
    skipped: int = 0
    skipped_in_all: int = 0
    norms: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Stored:
    """What was read.

    Attributes:
        about: of the run: `card` (a hash), `corpus` (its key), `training` (the section), `torch` (its
            version), `base` (a hash of what adapters are for).
        tensors: by `optimizer/...`, `ema/...`, `lora/...` and `router/...`.
    """

    progress: Progress
    about: dict[str, Any]
    tensors: dict[str, Tensor]

    def under(self, kind: str) -> dict[str, Tensor]:
        """The tensors of one kind, by the rest of their names."""
        return {n.removeprefix(f"{kind}/"): value for n, value in self.tensors.items() if n.startswith(f"{kind}/")}


def write(folder: Path, progress: Progress, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write the state into `folder`/training and wait until it is on the disk.

    Raises:
        OSError: it cannot be written.
    """
    inner = folder / FOLDER
    inner.mkdir()
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file({**held, **_random_tensors()}, inner / TENSORS)
    except SafetensorError as error:
        raise OSError(None, str(error)) from None
    with (inner / TENSORS).open("rb") as file:
        os.fsync(file.fileno())
    plain = {"format": FORMAT, "progress": asdict(progress), "about": dict(about), "random": _random_plain()}
    with (inner / STATE).open("w", encoding="utf-8") as file:
        file.write(json.dumps(plain, indent=1) + "\n")
        flush(file)


def read(folder: Path, piece: Callable[[str, Tensor], Tensor] | None = None) -> Stored:
    """Read the state of a checkpoint and put the generators of random numbers back.

    Args:
        piece: what of each tensor to keep; None is all.

    Raises:
        ScantlingInputError: there is none, or it is of another version.
    """
    inner = folder / FOLDER
    try:
        plain = json.loads((inner / STATE).read_text(encoding="utf-8"))
        if plain["format"] != FORMAT:
            raise ScantlingInputError(f"{inner / STATE}: format {plain['format']}; this version reads {FORMAT}")
        progress = Progress(**plain["progress"])
        with safe_open(inner / TENSORS, framework="pt") as file:
            read_ = ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
            tensors = {name: tensor if piece is None else piece(name, tensor) for name, tensor in read_}
        _put_random(plain["random"], tensors)
        return Stored(progress, plain["about"], tensors)
    except FileNotFoundError as error:
        raise ScantlingInputError(f"{error.filename}: is missing, so training cannot go on from {folder}") from None
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        if isinstance(error, ScantlingInputError):
            raise
        raise ScantlingInputError(f"{inner}: is no training state that can be read ({error})") from None


def _random_tensors() -> dict[str, Tensor]:
    held = {"random/torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        held |= {f"random/cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return held


def _random_plain() -> dict[str, Any]:
    kind, keys, place, has, cached = np.random.get_state(legacy=True)
    version, inner, gauss = random.getstate()
    return {
        "python": [version, list(inner), gauss],
        "numpy": [kind, [int(key) for key in keys], int(place), int(has), float(cached)],
    }


def _put_random(plain: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    version, inner, gauss = plain["python"]
    random.setstate((version, tuple(inner), gauss))
    kind, keys, place, has, cached = plain["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), place, has, cached))
    torch.set_rng_state(tensors.pop("random/torch"))
    devices = [tensors.pop(name) for name in sorted(tensors) if name.startswith("random/cuda.")]
    if devices and torch.cuda.device_count() == len(devices):
        torch.cuda.set_rng_state_all(devices)
