"""What a view shows: a table, its numbers, arrays and a chart, whatever it is written to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

WIDE = 14
"""Columns of a map that are printed as a square; of a wider one the strongest places are."""


@dataclass(frozen=True)
class Heat:
    """Numbers by row and column.

    Attributes:
        values: (R, C).
        rows, columns: their labels.
        what: the rows and the columns are.
        signed: numbers below 0 mean something, and 0 is the middle of the scale.
        texts: what stands in the cells of a page, by row and column; () for nothing.
    """

    values: Tensor
    rows: Sequence[str]
    columns: Sequence[str]
    what: tuple[str, str]
    signed: bool = False
    texts: Sequence[Sequence[str]] = ()


@dataclass(frozen=True)
class Bars:
    """A number per label."""

    labels: Sequence[str]
    values: Sequence[float]
    unit: str


@dataclass(frozen=True)
class Section:
    """One view of a text.

    Attributes:
        name: of the view.
        title: one line.
        columns, rows: of its table.
        data: the same for JSON, whole; tensors stand for lists.
        arrays: by name, for a safetensors file.
        charts: what is drawn.
        notes: sentences below the table.
    """

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    data: Any
    arrays: Mapping[str, Tensor] = field(default_factory=dict)
    charts: Sequence[tuple[str, Heat | Bars]] = ()
    notes: Sequence[str] = ()
