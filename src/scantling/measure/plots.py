"""Figures as PNG files, and as one HTML page."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scantling.errors import need
from scantling.measure.figure import Cell, Figure, Plot

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse}td,th{padding:.2rem .8rem;border-bottom:1px solid #ddd;text-align:left}"
    "td.number{text-align:right;font-variant-numeric:tabular-nums}img{max-width:100%}"
)


def drawn(plot: Plot, title: str, kind: str = "png") -> bytes:
    """A plot as PNG or SVG; the same bytes for the same numbers.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    need("matplotlib", "draw plots")
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    with matplotlib.rc_context({"svg.hashsalt": "scantling", "svg.fonttype": "path"}):
        figure = Canvas(figsize=(8, 4.5), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        for line in plot.lines:
            axes.plot(line.x, line.y, label=line.label, linestyle="--" if line.predicted else "-", marker=".")
        scales = {f"{axis}scale": "log" for axis in plot.log if _positive(plot, axis)}
        axes.set(xlabel=plot.x, ylabel=plot.y, title=title, **scales)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
        made = io.BytesIO()
        figure.savefig(made, format=kind, dpi=120, metadata={"Date": None} if kind == "svg" else {"Software": None})
    return made.getvalue()


def write_png(figures: Sequence[Figure], folder: Path) -> list[Path]:
    """FOLDER/NAME.png of every figure that has a plot.

    Raises:
        MissingExtra: matplotlib is not installed.
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for figure in figures:
        for i, plot in enumerate(figure.plots):
            path = folder / f"{figure.name}{f'-{i + 1}' if i else ''}.png"
            path.write_bytes(drawn(plot, figure.title))
            written.append(path)
    return written


def page(name: str, figures: Sequence[Figure]) -> str:
    """One HTML document that fetches nothing: tables, sentences, plots."""
    body = "".join(_section(figure) for figure in figures)
    title = html.escape(f"{name}: measured beside predicted")
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    return f"{head}<body><h1>{title}</h1>{body}</body></html>\n"


def _section(figure: Figure) -> str:
    top = "".join(f"<th>{html.escape(column)}</th>" for column in figure.columns)
    lines = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in figure.rows)
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in figure.notes)
    images = "".join(_image(plot, figure.title) for plot in figure.plots)
    return f"<h2>{html.escape(figure.title)}</h2>{notes}{images}<table><tr>{top}</tr>{lines}</table>"


def _image(plot: Plot, title: str) -> str:
    data = base64.b64encode(drawn(plot, title)).decode()
    return f'<img alt="{html.escape(title)}" src="data:image/png;base64,{data}">'


def _cell(value: Cell) -> str:
    if isinstance(value, str) or value is None:
        return f"<td>{html.escape(value or '')}</td>"
    return f'<td class="number">{f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"}</td>'


def _positive(plot: Plot, axis: str) -> bool:
    values: list[Any] = [v for line in plot.lines for v in (line.x if axis == "x" else line.y)]
    return bool(values) and min(values) > 0
