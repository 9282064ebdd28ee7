"""The key-value cache: preallocated from what the parts declare, filled from the left.

What `append` returns are always the last keys up to the newest one, all of them or as many as the layer can still
read; so whoever attends knows from their number at which position each of them stands, and masks by that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from scantling.errors import ScantlingInputError
from scantling.tensor.store import Store, store


class KeyCache(Protocol):
    """What a pass needs of a cache, however it keeps its positions."""

    @property
    def length(self) -> int:
        """Positions filled before this pass, in the longest row."""

    @property
    def pasts(self) -> Tensor | None:
        """(B,) positions filled in each row; None where all rows have `length`."""

    @property
    def source_padding(self) -> Tensor | None:
        """(B, S) bool, True at real positions of the sources; None where all are, or where the pass is told."""

    def append(self, path: str, new: Tensor) -> Tensor:
        """Keep new (B, H, T, D) and return the last keys up to it: (B, H, S', D), S' <= length + T."""

    def read(self, path: str) -> Tensor:
        """A slot that does not grow, (B, H, S, D)."""

    def write(self, path: str, whole: Tensor) -> None:
        """Fill a slot that does not grow."""


class Cache:
    """Every position of every layer: slots by path, each (B, H_kv, capacity, D).

    Attributes:
        length: positions filled; the first `length` of each slot hold keys or values.
    """

    pasts: None = None
    source_padding: None = None

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device | str,
        numbers: str = "plain",
    ) -> None:
        """shapes: `Part.named_state` of the model at the full length; numbers: a kind of `tensor.store`."""
        self._stores: dict[str, Store] = {path: store(numbers, shape, dtype, device) for path, shape in shapes.items()}
        self.length = 0

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(kept.nbytes for kept in self._stores.values())

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the slots, by path."""
        return {path: tuple(kept.shape) for path, kept in self._stores.items()}

    def append(self, path: str, new: Tensor) -> Tensor:
        """Write new (B, H, T, D) behind what is there and return everything so far: (B, H, length + T, D)."""
        end, kept = self.length + new.shape[2], self._stores[path]
        if end > kept.shape[2]:
            raise ScantlingInputError(
                f"the cache holds {kept.shape[2]} positions and {end} are needed: allocate it larger"
            )
        every = slice(None)
        kept.put((every, every, slice(self.length, end)), new)
        return kept.get((every, every, slice(0, end)))

    def read(self, path: str) -> Tensor:
        """A slot that does not grow, (B, H, S, D)."""
        return self._stores[path].get(())

    def write(self, path: str, whole: Tensor) -> None:
        """Fill a slot that does not grow: what an encoder-decoder keeps of its source."""
        kept = self._stores[path]
        if kept.shape != whole.shape:
            raise ScantlingInputError(
                f"the cache holds a source of {kept.shape[2]} positions and this one has {whole.shape[2]}"
            )
        kept.put((), whole)

    def advance(self, tokens: int) -> None:
        """Close a pass: `tokens` more positions are filled in every slot."""
        self.length += tokens

    def rewind(self, length: int) -> None:
        """Forget the positions from `length` on."""
        self.length = min(self.length, length)

    def clear(self) -> None:
        """Forget every position; what was allocated stays."""
        self.length = 0

    def select(self, rows: Tensor) -> None:
        """Make row i what row `rows[i]` was, in every slot; the number of rows may change."""
        for kept in self._stores.values():
            kept.select(rows)


class RingCache(Cache):
    """The same, but a layer that reads only so many positions back keeps only those, each at its position modulo them.

    A pass of several tokens still reads what its first token can see: the ring is read before it is overwritten.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        reaches: Mapping[str, int | None],
        dtype: torch.dtype,
        device: torch.device | str,
        numbers: str = "plain",
    ) -> None:
        """reaches: by the path of each slot how many positions a query reads, its own included; None for all."""
        self._rings = {path: min(reach, shapes[path][2]) for path, reach in reaches.items() if reach is not None}
        sizes = {path: (*s[:2], self._rings.get(path, s[2]), *s[3:]) for path, s in shapes.items()}
        super().__init__(sizes, dtype, device, numbers)
        self._whole = {path: shape[2] for path, shape in shapes.items()}

    def append(self, path: str, new: Tensor) -> Tensor:
        """Write new (B, H, T, D) and return the positions that its first token can still read, and the new ones."""
        if path not in self._rings:
            return super().append(path, new)
        end, ring, kept = self.length + new.shape[2], self._rings[path], self._stores[path]
        if end > self._whole[path]:
            raise ScantlingInputError(
                f"the cache is made for {self._whole[path]} positions and {end} are needed: allocate it larger"
            )
        every = slice(None)
        old = torch.arange(max(0, self.length - ring + 1), self.length, device=new.device) % ring
        out = torch.cat((kept.get((every, every, old)), kept.kept(new)), 2)
        last = torch.arange(max(self.length, end - ring), end, device=new.device)
        kept.put((every, every, last % ring), new[:, :, -len(last) :])
        return out

    def rewind(self, length: int) -> None:
        """Forget the positions from `length` on.

        Raises:
            ScantlingInputError: a ring went round, so what stood there before is gone.
        """
        if length < self.length and any(self.length > ring for ring in self._rings.values()):
            raise ScantlingInputError("a ring cache cannot go back: what its last positions replaced is gone")
        super().rewind(length)
