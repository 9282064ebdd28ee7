"""The key-value cache: preallocated from what the parts declare, filled from the left."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from scantling.errors import ScantlingInputError


class Cache:
    """Slots by path, each (B, H_kv, capacity, D); the first `length` positions hold keys or values.

    Attributes:
        length: positions filled.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device | str) -> None:
        """shapes: `Part.named_state` of the model at the full length."""
        self.slots = {path: torch.zeros(shape, dtype=dtype, device=device) for path, shape in shapes.items()}
        self.length = 0

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(slot.numel() * slot.element_size() for slot in self.slots.values())

    def append(self, path: str, new: Tensor) -> Tensor:
        """Write new (B, H, T, D) behind what is there and return everything so far: a view (B, H, length + T, D)."""
        end = self.length + new.shape[2]
        slot = self.slots[path]
        if end > slot.shape[2]:
            raise ScantlingInputError(
                f"the cache holds {slot.shape[2]} positions and {end} are needed: allocate it larger"
            )
        slot[:, :, self.length : end] = new
        return slot[:, :, :end]

    def write(self, path: str, whole: Tensor) -> None:
        """Fill a slot that does not grow: what an encoder-decoder keeps of its source."""
        slot = self.slots[path]
        if slot.shape != whole.shape:
            raise ScantlingInputError(
                f"the cache holds a source of {slot.shape[2]} positions and this one has {whole.shape[2]}"
            )
        slot.copy_(whole)

    def advance(self, tokens: int) -> None:
        """Close a pass: `tokens` more positions are filled in every slot."""
        self.length += tokens

    def clear(self) -> None:
        """Forget every position; what was allocated stays."""
        self.length = 0
