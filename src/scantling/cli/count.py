"""`scantling count`."""

from __future__ import annotations

from typing import Any

import click

from scantling.assembly import assemble
from scantling.cards import Card, presets
from scantling.checkpoint.find import card_of
from scantling.cli import show
from scantling.numbers.count import Count, count, ratios
from scantling.units import count_text


@click.command()
@click.argument("models", nargs=-1, metavar="MODEL...")
@click.option("--all", "everything", is_flag=True, help="Count every preset.")
@show.revision_option
@show.json_option
def command(models: tuple[str, ...], everything: bool, revision: str | None, as_json: bool) -> None:
    """Count the parameters of MODEL exactly: total, active, per component, per layer."""
    if everything:
        models = (*models, *presets())
    if not models:
        raise click.UsageError("name at least one MODEL, or --all", click.get_current_context())
    counted = [(card := card_of(name, revision=revision), count(assemble(card))) for name in models]
    if as_json:
        show.emit([_json(card, numbers) for card, numbers in counted])
    elif everything or len(counted) > 1:
        _many(counted)
    else:
        _one(*counted[0])


def _json(card: Card, c: Count) -> dict[str, Any]:
    return {
        "name": card.name,
        "total_params": c.total,
        "active_params": c.active,
        "buffers": c.buffers,
        "non_embedding_params": c.total - c.embedding - c.by_part.get("position", 0),
        "by_part": c.by_part,
        "per_layer": [
            {
                "stack": run.stack,
                "layer": run.first,
                "period": run.period,
                "repeat": run.times,
                "params": sum(run.by_part.values()),
                "by_part": run.by_part,
            }
            for run in c.per_layer
        ],
        "shortcut": c.shortcut,
        "shortcut_error": c.shortcut / c.total - 1 if c.total else 0.0,
        "shortcut_misses": c.reasons,
        "published": card.published.params if card.published else None,
    }


def _many(counted: list[tuple[Card, Count]]) -> None:
    rows = [
        (
            card.name,
            c.total,
            c.active,
            c.total - c.embedding - c.by_part.get("position", 0),
            f"{100 * (c.shortcut / c.total - 1):+.2f} %",
        )
        for card, c in counted
    ]
    show.table(("name", "total", "active", "without tables", "shortcut"), rows)


def _one(card: Card, c: Count) -> None:
    show.say(f"{card.name}: {c.total:,} parameters ({count_text(c.total)})")
    if c.active != c.total:
        show.say(f"active per token: {c.active:,} ({count_text(c.active)})")
    if c.buffers:
        show.say(f"stored besides, trained by no gradient: {c.buffers:,}")
    if card.published:
        show.say(f"published: {card.published.params:,} ({card.published.where})")
    show.say()
    show.table(("part", "parameters", "share"), [(p, n, f"{100 * n / c.total:.2f} %") for p, n in c.by_part.items()])
    headings = list(dict.fromkeys(role for run in c.per_layer for role in run.by_part))
    rows = []
    for run in c.per_layer:
        last, step = run.first + (run.times - 1) * run.period, f" by {run.period}" if run.period > 1 else ""
        layers = f"{run.stack} {run.first}" + ("" if run.times == 1 else f" .. {last}{step}")
        rows.append((layers, run.times, *(run.by_part.get(role, 0) for role in headings), sum(run.by_part.values())))
    if rows:
        show.table(("layer", "repeat", *headings, "one layer"), rows)
    tables = "V d" if card.tied else "2 V d"
    show.say(f"shortcut 12 L d^2 + {tables} = {c.shortcut:,}, {100 * (c.shortcut / c.total - 1):+.2f} %; it misses:")
    show.table(("what", "parameters"), c.reasons.items())
    for name, value in ratios(assemble(card), c).items():
        show.say(f"{name}: {value:.4g}")
