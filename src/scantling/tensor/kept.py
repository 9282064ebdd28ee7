"""What autograd really keeps for a backward, counted by torch's own hooks."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class _Packed:
    """Stands in the graph for one saved tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Kept:
    """Counts the storages that autograd keeps of what runs inside: each once, and parameters not at all.

    ``with Kept(net.parameters()) as kept: ...`` and then `kept.nbytes`.
    """

    def __init__(self, left_out: Iterable[Tensor] = ()) -> None:
        self._left_out = {tensor.untyped_storage().data_ptr() for tensor in left_out}
        # Storages stay referenced, so that no address is used twice.
        self._seen: dict[int, torch.UntypedStorage] = {}
        self._packed: weakref.WeakSet[_Packed] = weakref.WeakSet()
        self._hooks: Any = saved_tensors_hooks(self._pack, lambda packed: packed.tensor)

    def __enter__(self) -> Kept:
        self._hooks.__enter__()
        return self

    def __exit__(self, *reason: object) -> None:
        self._hooks.__exit__(*reason)

    def _pack(self, tensor: Tensor) -> _Packed:
        # An output that referred to its own graph would never be freed.
        storage, packed = tensor.untyped_storage(), _Packed(tensor.detach())
        if storage.data_ptr() not in self._left_out:
            self._seen[storage.data_ptr()] = storage
            self._packed.add(packed)
        return packed

    @property
    def nbytes(self) -> int:
        """Bytes of all storages that were kept at some time."""
        return sum(storage.nbytes() for storage in self._seen.values())

    @property
    def nbytes_now(self) -> int:
        """Bytes of the storages that the graph still keeps."""
        storages = {p.tensor.untyped_storage().data_ptr(): p.tensor.untyped_storage() for p in list(self._packed)}
        return sum(storage.nbytes() for storage in storages.values())
