"""Writing one safetensors file, tensor by tensor, so that no more than one of them is held twice.

The bytes are those that the safetensors library writes: wide dtypes first, then by name, the header padded to 8 bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scantling.checkpoint.header import DTYPES
from scantling.units import DTYPE_BYTES

if TYPE_CHECKING:
    from torch import Tensor

_CODES = {name: code for code, name in DTYPES.items()}


def write_safetensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str, read: Callable[[str], Tensor]
) -> None:
    """Write tensors of one dtype, and wait until they are on the disk.

    Args:
        shapes: of every tensor, by its name.
        read: gives a tensor of that dtype and of its shape.

    Raises:
        OSError: the file cannot be written.
    """
    import torch

    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(shapes):
        start, end = end, end + prod(shapes[name]) * DTYPE_BYTES[dtype]
        header[name] = {"dtype": _CODES[dtype], "shape": list(shapes[name]), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in sorted(shapes):
            tensor = read(name).detach()
            assert tuple(tensor.shape) == tuple(shapes[name]), f"{name}: {tuple(tensor.shape)} is no {shapes[name]}"
            file.write(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        flush(file)


def flush(file: Any) -> None:
    """Wait until what was written to the file is on the disk."""
    file.flush()
    os.fsync(file.fileno())
