"""The page of `scantling lens --html`: one file, nothing fetched, readable without its script."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from scantling.cli import show

if TYPE_CHECKING:
    from scantling.lens.reading import Prompt
    from scantling.lens.sections import Bars, Heat, Section

_TEMPLATE = Path(__file__).with_name("lens_page.html")
LARGEST = 4_000_000
"""Weights that a page holds, a byte each; of more, the charts alone."""


def page(prompt: Prompt | None, model: str, about: str, sections: Sequence[Section]) -> str:
    """The whole HTML document."""
    maps = {f"maps-{i}": found for i, section in enumerate(sections) if (found := _maps(section)) is not None}
    words = "" if prompt is None else "".join(_word(prompt, i) for i in range(len(prompt.read)))
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(f"{model}: a look inside"),
        name=escape(model),
        about=escape(about),
        words=words,
        sections="\n".join(_section(section, f"maps-{i}", maps) for i, section in enumerate(sections)),
        maps=json.dumps(maps).replace("</", "<\\/"),
    )


def _word(prompt: Prompt, i: int) -> str:
    here = ' class="here"' if i == prompt.position else ""
    return f"<li{here}><small>{i}</small>{escape(_visible(prompt.words[i]))}</li>"


def _visible(text: str) -> str:
    """A token with its blanks and line ends to be seen."""
    return text.replace(" ", "\u00b7").replace("\n", "\u21b5") or "\u2205"


def _section(section: Section, key: str, maps: dict[str, Any]) -> str:
    charts = "".join(_chart(title, chart, key if key in maps else "") for title, chart in section.charts)
    notes = "".join(f"<p>{escape(note)}</p>" for note in section.notes)
    table = f'<div class="frame" tabindex="0">{_table(section)}</div>'
    return f'<section id="{escape(section.name)}"><h2>{escape(section.title)}</h2>{table}{notes}{charts}</section>'


def _table(section: Section) -> str:
    numeric = [any(isinstance(row[i], int | float) for row in section.rows) for i in range(len(section.columns))]
    head = "".join(
        f'<th scope="col"{_kind(n)}>{escape(name)}</th>' for name, n in zip(section.columns, numeric, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(f"<td{_kind(n)}>{escape(show.cell(x))}</td>" for x, n in zip(row, numeric, strict=True))
        + "</tr>"
        for row in section.rows
    )
    return f'<table class="plain"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _kind(number: bool) -> str:
    return ' class="number"' if number else ""


def _chart(title: str, chart: Heat | Bars, key: str) -> str:
    from scantling.lens.sections import Heat

    drawn = _heat(chart) if isinstance(chart, Heat) else _bars(chart)
    chooser = _chooser(key) if key and isinstance(chart, Heat) else ""
    return f"<h3>{escape(title)}</h3>{chooser}{drawn}"


def _chooser(key: str) -> str:
    return (
        f'<form id="{key}" hidden><label>layer <select aria-label="Layer"><option value="">as above</option></select>'
        '</label><label>head <select aria-label="Head"></select></label></form>'
    )


def _heat(chart: Heat) -> str:
    values = chart.values.float()
    most = float(values.abs().max()) or 1.0
    most = most / 0.7 if chart.texts else most
    of_rows, of_columns = (_visible if what in ("query", "key", "token") else str for what in chart.what)
    head = "".join(f'<th scope="col">{escape(of_columns(label))}</th>' for label in chart.columns)
    body = []
    for i, (label, row) in enumerate(zip(chart.rows, values.tolist(), strict=True)):
        texts = chart.texts[i] if chart.texts else [""] * len(row)
        cells = "".join(
            f'<td title="{x:.3g}" style="background: {_shade(x, most)}">{escape(_visible(text) if text else "")}</td>'
            for x, text in zip(row, texts, strict=True)
        )
        body.append(f'<tr><th scope="row">{escape(of_rows(label))}</th>{cells}</tr>')
    corner = escape(" \\ ".join(chart.what))
    return (
        f'<div class="frame" tabindex="0"><table class="heat"><thead><tr><td>{corner}</td>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _shade(value: float, most: float) -> str:
    colour = "var(--minus)" if value < 0 else "var(--plus)"
    return f"color-mix(in srgb, {colour} {round(100 * abs(value) / most)}%, transparent)"


def _bars(chart: Bars) -> str:
    low, high = min(0.0, *chart.values, 0.0), max(0.0, *chart.values, 0.0)
    span = (high - low) or 1.0
    rows = []
    for label, value in zip(chart.labels, chart.values, strict=True):
        left, wide = 100 * (min(0.0, value) - low) / span, 100 * abs(value) / span
        kind = "bar minus" if value < 0 else "bar"
        rows.append(
            f'<span class="label">{escape(label)}</span><span class="track">'
            f'<span class="{kind}" style="left: {left:.2f}%; width: {wide:.2f}%"></span></span>'
            f'<span class="value">{value:.4g}</span>'
        )
    return f'<div class="frame" tabindex="0"><div class="bars">{"".join(rows)}</div></div>'


def _maps(section: Section) -> dict[str, Any] | None:
    """Every attention map of a section, a byte per weight, for the page's choice of layer and head."""
    found = {name: value for name, value in section.arrays.items() if name.endswith(":weights")}
    if not found or sum(value.numel() for value in found.values()) > LARGEST:
        return None
    coded = {
        name: base64.b64encode((255 * value.float()).round().byte().contiguous().cpu().numpy().tobytes()).decode()
        for name, value in found.items()
    }
    shapes = [value.shape for value in found.values()]
    return {"maps": coded, "heads": [shape[0] for shape in shapes], "keys": shapes[0][-1]}
