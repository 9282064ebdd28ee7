"""`scantling diff`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from scantling.checkpoint.find import card_of
from scantling.cli import show
from scantling.cli.compare import text, workload_of
from scantling.study.diff import FATES, Change, Diff, PartChange, diff

_FATES = {
    "same": "same name and shape",
    "other_shape": "same name, other shape",
    "new": "only in the second",
    "gone": "only in the first",
}


@click.command()
@click.argument("a")
@click.argument("b")
@show.workload_options(past=False)
@click.option("--source-tokens", type=click.IntRange(1, 2**40), help="Of encoder-decoders' sources (S). [default: T]")
@show.json_option
def command(a: str, b: str, batch: int, tokens: int | None, source_tokens: int | None, as_json: bool) -> None:
    """What changes from model A to model B: card, parts list, numbers, and the weights that could be carried over.

    Without --tokens, the shorter of the two contexts is the length. The exit status is 0 also where they differ.
    """
    old, new = card_of(a), card_of(b)
    length = min(old.context, new.context) if tokens is None else tokens
    workloads = [workload_of(card, batch, length, source_tokens) for card in (old, new)]
    found = diff(old, new, *workloads)
    if as_json:
        show.emit({"a": old.name, "b": new.name, "batch": batch, "tokens": length, **_json(found)})
        return
    show.say(f"{old.name} -> {new.name}, B {batch}, T {length:,}")
    if found.equal:
        show.say("nothing differs")
        return
    show.say()
    _tables(found)


def _json(d: Diff) -> dict[str, Any]:
    def changes(rows: tuple[Change, ...]) -> list[dict[str, Any]]:
        return [{"what": row.what, "old": row.old, "new": row.new} for row in rows]

    counts = {fate: dict(zip(("tensors", "elements"), d.tensors(fate), strict=True)) for fate in FATES}
    return {
        "equal": d.equal,
        "keys": changes(d.keys),
        "parts": [{"path": row.path, "old": row.old, "new": row.new} for row in d.parts],
        "numbers": changes(d.numbers),
        "weights": counts,
        "weights_by_name": [
            {"fate": w.fate, "name": w.name, "tensors": w.tensors, "old": w.old, "new": w.new} for w in d.weights
        ],
    }


def _tables(d: Diff) -> None:
    if d.keys:
        show.table(("card", "old", "new"), [(c.what, _plain(c.old), _plain(c.new)) for c in d.keys])
    if d.parts:
        show.table(("parts list, one token", "", "old", "new"), [_part(change) for change in d.parts])
    if d.numbers:
        rows = [(c.what, text(c.what, c.old), text(c.what, c.new), _by(c)) for c in d.numbers]
        show.table(("number", "old", "new", "new / old"), rows)
    show.table(
        ("weights that could be carried over", "tensors", "elements"),
        [(_FATES[fate], *d.tensors(fate)) for fate in FATES],
    )
    moved = [w for w in d.weights if w.fate != "same"]
    if moved:
        show.table(
            ("weight", "what becomes of it", "tensors", "old", "new"),
            [(w.name, _FATES[w.fate], w.tensors, w.old, w.new) for w in moved],
        )


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else value


def _part(change: PartChange) -> tuple[str, str, str, str]:
    if change.old is None or change.new is None:
        row = change.old or change.new or {}
        said = _row(row, list(row))
        return change.path, "added" if change.old is None else "removed", *(("", said) if change.new else (said, ""))
    keys = [key for key in change.old if change.old[key] != change.new[key]]
    return change.path, "changed", _row(change.old, keys), _row(change.new, keys)


def _row(row: Mapping[str, Any], keys: list[str]) -> str:
    """``shape (1, 1, 1024), params 4,194,304, repeat 32``."""
    said = {"op": "", "formula": "", "shape": "shape ", "params": "parameters ", "repeat": "x "}
    cells = [(said[key], row[key]) for key in keys if row[key] or key == "params"]
    return ", ".join(f"{name}{value:,}" if isinstance(value, int) else f"{name}{value}" for name, value in cells)


def _by(change: Change) -> str | None:
    numbers = isinstance(change.old, int | float) and isinstance(change.new, int | float)
    return f"{change.new / change.old:.4g}" if numbers and change.old else None
