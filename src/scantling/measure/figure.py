"""What a measurement answers: rows of measured beside predicted, with sentences and lines to draw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from scantling.train.watch import plain_json

Cell = str | int | float | None


@dataclass(frozen=True)
class Line:
    """One line of a plot; a predicted one is drawn dashed."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    predicted: bool = False


@dataclass(frozen=True)
class Plot:
    """Lines over one axis.

    Attributes:
        log: of which axes the scale is logarithmic: none, ``y`` or ``xy``.
    """

    x: str
    y: str
    lines: tuple[Line, ...]
    log: str = ""


@dataclass(frozen=True)
class Figure:
    """One answer of `scantling measure`.

    Attributes:
        name: what `--only` calls it.
        title: in words.
        columns: of the rows, with their units.
        notes: sentences: verdicts, and what was predicted how.
        data: further numbers for JSON.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    plots: tuple[Plot, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain values; numbers that JSON does not have become strings."""
        rows = [{name: plain_json(cell) for name, cell in zip(self.columns, row, strict=True)} for row in self.rows]
        found: dict[str, Any] = {"name": self.name, "title": self.title, "rows": rows, "notes": list(self.notes)}
        return found | dict(plain_json(self.data))
