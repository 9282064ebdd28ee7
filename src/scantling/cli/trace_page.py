"""The page of `scantling trace --html`: one file, nothing fetched, readable without its script."""

from __future__ import annotations

from html import escape
from pathlib import Path
from string import Template

from scantling.cli.traced import Traced, largest, legend, symbols, totals
from scantling.numbers.trace import Row

_TEMPLATE = Path(__file__).with_name("trace_page.html")
_COLUMNS = (
    ("stage", "text"),
    ("path", "text"),
    ("op, formula", "text"),
    ("shape", "text"),
    ("parameters", "number"),
    ("FLOPs", "number"),
    ("bytes", "number"),
    ("kept", "number"),
    ("x", "number"),
    ("what", "text"),
)


def page(traced: Traced) -> str:
    """The whole HTML document."""
    rows, top = traced.found.rows, traced.found.largest
    most = {"flops": max(r.cost.full for r in rows), "bytes": max(r.bytes for r in rows)}
    most["kept"] = max(r.saved_bytes for r in rows)
    stages = list(dict.fromkeys(row.stage for row in rows))
    name, _, about = traced.title.partition(", ")
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(f"{name}: a trace"),
        name=escape(name),
        about=escape(about),
        legend="".join(f"<li><b>{escape(symbol)}</b> {escape(size)}</li>" for symbol, size in legend(traced.found)),
        totals="".join(_total(*line) for line in totals(traced)),
        largest=escape(largest(traced)),
        stages="".join(_stage(stage) for stage in stages) if len(stages) > 1 else "",
        columns="".join(_head(*column) for column in _COLUMNS),
        rows="\n".join(_row(row, most, row is top) for row in rows),
    )


def _total(what: str, number: int, short: str) -> str:
    return f"<div><dt>{escape(what)}</dt><dd>{escape(short)}</dd><small>{number:,}</small></div>"


def _stage(stage: str) -> str:
    return f'<label><input type="checkbox" name="stage" value="{escape(stage)}" checked> {escape(stage)}</label>'


def _head(name: str, kind: str) -> str:
    return f'<th scope="col" aria-sort="none" data-kind="{kind}"><button type="button">{escape(name)}</button></th>'


def _row(row: Row, most: dict[str, int], top: bool) -> str:
    cells = [
        _text(row.stage),
        _text(row.path, "code"),
        _pair(f"<b>{escape(row.op)}</b>", row.formula, "op"),
        _pair(f"<code>{escape(symbols(row))}</code>", f"({', '.join(map(str, row.shape))})", "shape"),
        _number(row.params),
        _number(row.cost.full, "flops", most["flops"]),
        _number(row.bytes, "bytes", most["bytes"]),
        _number(row.saved_bytes, "kept", most["kept"]),
        _number(row.repeat),
        _text(row.note, "note"),
    ]
    kinds = " ".join(["largest"] * top + ["repeats"] * (row.repeat > 1))
    product = "yes" if row.cost.full else "no"
    marked = f' class="{kinds}"' if kinds else ""
    return f'<tr{marked} data-stage="{escape(row.stage)}" data-product="{product}">{"".join(cells)}</tr>'


def _text(text: str, kind: str = "") -> str:
    return f'<td class="{kind}">{escape(text)}</td>' if kind else f"<td>{escape(text)}</td>"


def _pair(first: str, second: str, kind: str) -> str:
    """Two lines: HTML, and below it a text in small."""
    return f'<td class="{kind}">{first}<small>{escape(second)}</small></td>'


def _number(n: int, kind: str = "", most: int = 0) -> str:
    """A number, with a bar of its share of the largest where there is one."""
    bar = f' style="--share: {100 * n / most:.1f}%"' if most and n else ""
    return f'<td class="{f"number {kind}".strip()}" data-value="{n}"{bar}>{f"{n:,}" if n else ""}</td>'
