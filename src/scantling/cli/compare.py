"""`scantling compare`."""

from __future__ import annotations

import click

from scantling.cards import Card
from scantling.checkpoint.find import card_of
from scantling.cli import show
from scantling.parts.part import Workload
from scantling.study.compare import compare
from scantling.study.facts import Value


@click.command()
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@show.workload_options(past=False)
@click.option("--source-tokens", type=click.IntRange(1, 2**40), help="Of encoder-decoders' sources (S). [default: T]")
@click.option("--differing", is_flag=True, help="Only the rows that differ.")
@show.json_option
def command(
    models: tuple[str, ...], batch: int, tokens: int | None, source_tokens: int | None, differing: bool, as_json: bool
) -> None:
    """Models side by side, row by row; rows that differ are marked with *.

    Without --tokens, the shortest of the models' contexts is the length.
    """
    cards = [card_of(name) for name in models]
    length = min(card.context for card in cards) if tokens is None else tokens
    workloads = [workload_of(card, batch, length, source_tokens) for card in cards]
    rows = [row for row in compare(cards, workloads) if row.differs or not differing]
    names = [card.name for card in cards]
    if as_json:
        lines = [{"section": r.section, "what": r.what, "values": list(r.values), "differs": r.differs} for r in rows]
        show.emit({"models": names, "batch": batch, "tokens": length, "rows": lines})
        return
    show.say(f"B {batch}, T {length:,}; rows that differ are marked with *")
    show.say()
    for section in dict.fromkeys(row.section for row in rows):
        cells = [
            ("*" if row.differs else "", row.what, *(text(row.what, value) for value in row.values))
            for row in rows
            if row.section == section
        ]
        show.table(("", section, *names), cells)


def workload_of(card: Card, batch: int, tokens: int, source_tokens: int | None) -> Workload:
    """A pass of `tokens` without a past; the source's length goes to encoder-decoders only."""
    return show.workload(card, batch, tokens, 0, source_tokens if card.family == "encoder-decoder" else None)


def text(what: str, value: Value) -> Value:
    """A value as the tables show it: shares in percent."""
    return f"{100 * value:.2f} %" if "share" in what and isinstance(value, float) else value
