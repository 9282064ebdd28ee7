"""Numbers at rest in a cache: as they are, or as 8-bit integers with a scale per vector."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from scantling.errors import ScantlingInputError

Index = tuple[Any, ...]


class Store(Protocol):
    """A block of vectors (..., D) of which the leading dimensions are indexed."""

    @property
    def shape(self) -> torch.Size:
        """Of the values, (..., D)."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""

    def put(self, index: Index, new: Tensor) -> None:
        """Keep `new` at an index of the leading dimensions."""

    def get(self, index: Index) -> Tensor:
        """What is kept there, in the dtype of the computation."""

    def kept(self, new: Tensor) -> Tensor:
        """What `get` would give of `new`."""

    def select(self, rows: Tensor) -> None:
        """Make row i what row `rows[i]` of the first dimension was; their number may change."""


class Plain:
    """Values in the dtype of the computation."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> None:
        self._data = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def values(self) -> Tensor:
        """All of them, (..., D)."""
        return self._data

    @property
    def shape(self) -> torch.Size:
        return self._data.shape

    @property
    def nbytes(self) -> int:
        return self._data.numel() * self._data.element_size()

    def put(self, index: Index, new: Tensor) -> None:
        self._data[index] = new.to(self._data.dtype)

    def get(self, index: Index) -> Tensor:
        return self._data[index]

    def kept(self, new: Tensor) -> Tensor:
        return new

    def select(self, rows: Tensor) -> None:
        self._data = self._data.index_select(0, rows)


class Int8:
    """Each vector of D values as integers from -127 to 127 times one float32 scale, its largest value / 127.

    A value moves by at most half a step, max |x| / 254 of its vector, and what the dtype of the computation rounds.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> None:
        self._codes = torch.zeros(shape, dtype=torch.int8, device=device)
        self._scales = torch.zeros((*shape[:-1], 1), dtype=torch.float32, device=device)
        self._dtype = dtype

    @property
    def shape(self) -> torch.Size:
        return self._codes.shape

    @property
    def nbytes(self) -> int:
        return self._codes.numel() + self._scales.numel() * self._scales.element_size()

    def put(self, index: Index, new: Tensor) -> None:
        self._codes[index], self._scales[index] = _coded(new)

    def get(self, index: Index) -> Tensor:
        return (self._codes[index] * self._scales[index]).to(self._dtype)

    def kept(self, new: Tensor) -> Tensor:
        codes, scales = _coded(new)
        return (codes * scales).to(self._dtype)

    def select(self, rows: Tensor) -> None:
        self._codes, self._scales = self._codes.index_select(0, rows), self._scales.index_select(0, rows)


def _coded(new: Tensor) -> tuple[Tensor, Tensor]:
    wide = new.float()
    scales = wide.abs().amax(-1, keepdim=True) / 127
    codes = (wide / scales.clamp(min=torch.finfo(torch.float32).tiny)).round().clamp(-127, 127)
    return codes.to(torch.int8), scales


KINDS: dict[str, type[Plain] | type[Int8]] = {"plain": Plain, "int8": Int8}


def store(kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Store:
    """An empty store of that kind.

    Raises:
        ScantlingInputError: no such kind.
    """
    if kind not in KINDS:
        raise ScantlingInputError(f"unknown kind of numbers in a cache {kind!r}: use one of {', '.join(KINDS)}")
    return KINDS[kind](shape, dtype, device)
