"""Sizes that know how they are written: a shape is made of them, so its symbols and its numbers cannot part company."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Dim:
    """A size and its symbol: ``Dim("H", 4) * Dim("d_head", 6)`` is ``H*d_head``, 24.

    Attributes:
        symbol: a name, or what the names were put together to.
        size: the number.
        atoms: the names in the symbol with their sizes; () where the symbol is one name, or a number.
        loose: the symbol is a sum and takes brackets in a product.
    """

    symbol: str
    size: int
    atoms: tuple[tuple[str, int], ...] = ()
    loose: bool = False

    @property
    def names(self) -> tuple[tuple[str, int], ...]:
        """Every name in the symbol with its size."""
        return self.atoms or (() if self.symbol.isdigit() else ((self.symbol, self.size),))

    def __mul__(self, other: Dim) -> Dim:
        return Dim(f"{self._factor}*{other._factor}", self.size * other.size, self.names + other.names)

    def __add__(self, other: Dim) -> Dim:
        return Dim(f"{self.symbol}+{other.symbol}", self.size + other.size, self.names + other.names, loose=True)

    def __sub__(self, other: Dim) -> Dim:
        taken = f"({other.symbol})" if other.loose else other.symbol
        return Dim(f"{self.symbol}-{taken}", self.size - other.size, self.names + other.names, loose=True)

    @property
    def _factor(self) -> str:
        return f"({self.symbol})" if self.loose else self.symbol


Dims: TypeAlias = tuple[Dim, ...]
ONE = Dim("1", 1)
"""An axis that is there for its place only."""


def shape_of(dims: Dims) -> Shape:
    """The numbers."""
    return tuple(dim.size for dim in dims)


def elements(dims: Iterable[Dim]) -> int:
    """How many numbers a tensor of these axes has."""
    return math.prod(dim.size for dim in dims)
