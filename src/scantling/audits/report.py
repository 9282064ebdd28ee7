"""The report of an audit as one page that needs nothing else."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from scantling.audits.examine import Report
from scantling.audits.finding import Finding, Verdict
from scantling.audits.probes import PROBES

COLOURS = {
    Verdict.CLEAN: "#1a7f37",
    Verdict.ROUNDING: "#5a7d1a",
    Verdict.BY_DESIGN: "#0b5cad",
    Verdict.DEFECT: "#b3261e",
    Verdict.NOT_APPLICABLE: "#6b6b6b",
    Verdict.COULD_NOT_RUN: "#8a5a00",
}
STYLE = """
body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:64rem;padding:0 1rem;color:#1c1c1c}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin:1.6rem 0 .3rem}p{margin:.2rem 0}
table{border-collapse:collapse;width:100%}td,th{text-align:left;vertical-align:top;padding:.3rem .6rem .3rem 0;
border-bottom:1px solid #ddd}.v{font-weight:600;white-space:nowrap}
.n{font-variant-numeric:tabular-nums;white-space:nowrap}
pre{font:13px/1.35 ui-monospace,monospace;background:#f5f5f5;padding:.5rem;overflow-x:auto;white-space:pre-wrap}
svg{max-width:100%;height:auto}
"""


def write_html(report: Report, path: Path) -> None:
    """Write the page; it appears whole or not at all.

    Raises:
        OSError: the folder does not exist, or cannot be written.
    """
    waiting = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        waiting.write_text(html(report), encoding="utf-8")
        waiting.replace(path)
    finally:
        waiting.unlink(missing_ok=True)


def html(report: Report) -> str:
    """The page: counts, a section per probe, each finding with its size, place, meaning, figures and smallest input."""
    counts = {v: sum(f.verdict is v for f in report.findings) for v in Verdict}
    said = ", ".join(f"{n} {_verdict(v)}" for v, n in counts.items() if n)
    sections = "".join(_section(report, name) for name in report.asked)
    title = escape(f"Audit of {report.name}")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>'
        f"<body><h1>{title}</h1><p>{said}</p>{sections}</body></html>\n"
    )


def _section(report: Report, name: str) -> str:
    asks = escape(PROBES[name].asks) if name in PROBES else ""
    rows = "".join(_row(f) for f in report.of(name))
    return (
        f"<h2>{escape(name)}</h2><p>{asks}</p><table><tr><th>verdict</th><th>size</th><th>where</th>"
        f"<th>what it means</th></tr>{rows}</table>"
    )


def _row(finding: Finding) -> str:
    size = "" if finding.size is None else f"{finding.size:.3g} {finding.unit}"
    cells = f'<td class="v">{_verdict(finding.verdict)}</td><td class="n">{escape(size)}</td>'
    meaning = f"{escape(finding.message)}{_figures(finding)}{_smallest(finding)}"
    return f"<tr>{cells}<td>{escape(finding.where)}</td><td>{meaning}</td></tr>"


def _verdict(verdict: Verdict) -> str:
    return f'<span style="color:{COLOURS[verdict]}">{escape(str(verdict))}</span>'


def _smallest(finding: Finding) -> str:
    if not finding.smallest:
        return ""
    lines = "\n".join(f"{key}: {value}" for key, value in finding.smallest.items())
    return f"<p>Smallest input:</p><pre>{escape(lines)}</pre>"


def _figures(finding: Finding) -> str:
    parts = []
    for key, value in finding.data.items():
        if isinstance(value, list) and value and isinstance(value[0], str):
            parts.append(f"<p>{escape(key)}</p>{_grid(value)}")
        elif isinstance(value, list) and value and isinstance(value[0], list | tuple):
            parts.append(f"<p>{escape(key)}</p>{_curve(value)}")
        elif isinstance(value, dict):
            inner = "; ".join(f"{k}: {_plain(v)}" for k, v in value.items())
            parts.append(f"<p>{escape(key)}: {escape(inner)}</p>")
        elif value is not None and not isinstance(value, bool):
            parts.append(f"<p>{escape(key)}: {escape(_plain(value))}</p>")
    return "".join(parts)


def _plain(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _grid(rows: Sequence[str], side: int = 9) -> str:
    """Queries downwards, keys to the right; filled where the key is reached."""
    cells = "".join(
        f'<rect x="{x * side}" y="{y * side}" width="{side - 1}" height="{side - 1}" '
        f'fill="{"#0b5cad" if cell == "x" else "#e6e6e6"}"/>'
        for y, row in enumerate(rows)
        for x, cell in enumerate(row)
    )
    width, height = side * max(map(len, rows)), side * len(rows)
    return f'<svg width="{width}" height="{height}" role="img" aria-label="which key each query reaches">{cells}</svg>'


def _curve(points: Sequence[Sequence[float]], width: int = 360, height: int = 90) -> str:
    """A line through (x, y) points, with the ends of both axes written out."""
    xs, ys = [float(p[0]) for p in points], [float(p[1]) for p in points]
    low, high, first, last = min(ys), max(ys), min(xs), max(xs)
    place = " ".join(
        f"{10 + (x - first) / ((last - first) or 1) * (width - 20):.1f},"
        f"{height - 10 - (y - low) / ((high - low) or 1) * (height - 20):.1f}"
        for x, y in zip(xs, ys, strict=True)
    )
    label = f"from {first:g} to {last:g}: between {low:.3g} and {high:.3g}"
    line = f'<polyline points="{place}" fill="none" stroke="#0b5cad" stroke-width="2"/>'
    return f'<svg width="{width}" height="{height}" role="img" aria-label="{label}">{line}</svg><p>{label}</p>'
