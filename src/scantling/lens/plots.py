"""Charts as PNG or SVG, by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scantling.errors import ScantlingInputError, need
from scantling.lens.sections import Bars, Heat, Section

MOST = 40
"""Labels of an axis; of more every so many are written."""


def draw(sections: Sequence[Section], path: Path) -> None:
    """Write every chart of the sections below each other, as the file's ending says: .png or .svg.

    Raises:
        MissingExtra: matplotlib is not installed.
        ScantlingInputError: there is nothing to draw.
        OSError: the file cannot be written.
    """
    need("matplotlib", "draw charts")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    charts = [chart for section in sections for chart in section.charts]
    if not charts:
        raise ScantlingInputError("these views have no charts")
    heights = [_height(chart) for _, chart in charts]
    figure = Figure(figsize=(9, sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(charts), squeeze=False, height_ratios=heights)
    for axes, (title, chart) in zip(grid[:, 0], charts, strict=True):
        axes.set_title(_plain(title), fontsize="medium")
        if isinstance(chart, Heat):
            _heat(figure, axes, chart)
        else:
            _bars(axes, chart)
    figure.savefig(path, dpi=120, format=path.suffix[1:].lower())


def _height(chart: Heat | Bars) -> float:
    count = len(chart.rows) if isinstance(chart, Heat) else len(chart.labels)
    return max(2.5, min(12.0, 1.4 + 0.22 * count))


def _heat(figure: Any, axes: Any, chart: Heat) -> None:
    values = chart.values.float().cpu()
    most = float(values.abs().max()) or 1.0
    span = {"cmap": "RdBu_r", "vmin": -most, "vmax": most} if chart.signed else {"cmap": "viridis", "vmin": 0.0}
    image = axes.imshow(values.numpy(), aspect="auto", **span)
    for axis, labels in ((axes.yaxis, chart.rows), (axes.xaxis, chart.columns)):
        every = -(-len(labels) // MOST)
        axis.set_ticks(range(0, len(labels), every), [_plain(label) for label in labels[::every]], fontsize="x-small")
    axes.tick_params(axis="x", rotation=60)
    axes.set_ylabel(chart.what[0])
    axes.set_xlabel(chart.what[1])
    figure.colorbar(image, ax=axes)


def _bars(axes: Any, chart: Bars) -> None:
    places = range(len(chart.labels))
    axes.barh(places, chart.values, color=["#b45309" if value < 0 else "#2563a8" for value in chart.values])
    every = -(-len(chart.labels) // (2 * MOST))
    axes.set_yticks(places[::every], [_plain(label) for label in chart.labels[::every]], fontsize="x-small")
    axes.invert_yaxis()
    axes.set_xlabel(chart.unit)
    axes.grid(axis="x", alpha=0.3)


def _plain(text: str) -> str:
    """A text without what matplotlib reads as a formula."""
    return text.replace("$", r"\$")
