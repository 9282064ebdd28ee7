"""`scantling compare`."""

from __future__ import annotations

import click

from scantling.cards import Card
from scantling.checkpoint.find import card_of
from scantling.cli import show
from scantling.errors import ScantlingInputError, need
from scantling.parts.part import Workload
from scantling.study.compare import compare, equivalences
from scantling.study.facts import Value


@click.command()
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@show.workload_options(past=False)
@click.option("--source-tokens", type=click.IntRange(1, 2**40), help="Of encoder-decoders' sources (S). [default: T]")
@click.option("--differing", is_flag=True, help="Only the rows that differ.")
@click.option("--logits", is_flag=True, help="Load both models and say whether they give the same logits.")
@show.json_option
def command(
    models: tuple[str, ...],
    batch: int,
    tokens: int | None,
    source_tokens: int | None,
    differing: bool,
    logits: bool,
    as_json: bool,
) -> None:
    """Models side by side, row by row; rows that differ are marked with *.

    Without --tokens, the shortest of the models' contexts is the length. Cards that are one model with its rows in
    another order are named. --logits loads two models and asks whether they are one function: equal, equal up to
    rounding, equal up to a constant per row (which no probability shows), or different.
    """
    if logits and len(models) != 2:
        raise ScantlingInputError(f"--logits compares two models, and {len(models)} are named")
    cards = [card_of(name) for name in models]
    length = min(card.context for card in cards) if tokens is None else tokens
    workloads = [workload_of(card, batch, length, source_tokens) for card in cards]
    rows = [row for row in compare(cards, workloads) if row.differs or not differing]
    names, notes = [card.name for card in cards], equivalences(cards)
    if logits:
        notes += verdicts(*models)
    if as_json:
        lines = [{"section": r.section, "what": r.what, "values": list(r.values), "differs": r.differs} for r in rows]
        show.emit({"models": names, "batch": batch, "tokens": length, "rows": lines, "notes": notes})
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
    for note in notes:
        show.say(note)


def verdicts(one: str, other: str) -> list[str]:
    """What two models with weights are to each other, on a row, a longer one, and beside padding.

    Raises:
        ScantlingInputError: one has no weights, or another vocabulary or family.
        MissingExtra: torch is not installed.
    """
    need("torch", "compare logits")
    from scantling.audits import Verdict, examine
    from scantling.loading import load
    from scantling.subjects.named import beside
    from scantling.subjects.ours import ours

    first, second = (ours(load(name)) for name in (one, other))
    for what in ("family", "vocab_size"):
        a, b = getattr(first.facts, what), getattr(second.facts, what)
        if a != b:
            raise ScantlingInputError(f"--logits: {one} has {what} {a} and {other} {b}; they cannot be one function")
    said = {
        Verdict.CLEAN: "equal bit by bit",
        Verdict.ROUNDING: "equal up to rounding",
        Verdict.BY_DESIGN: "equal up to a constant per row, which no probability and no loss shows",
        Verdict.DEFECT: "different",
    }
    found = examine(beside(first, second), ["reference"]).findings
    return [f"logits, {f.where}: {said.get(f.verdict, f.message)}{_size(f.size)}" for f in found]


def _size(size: float | None) -> str:
    return f"; the largest difference is {size:.3g} standard deviations of the logits" if size else ""


def workload_of(card: Card, batch: int, tokens: int, source_tokens: int | None) -> Workload:
    """A pass of `tokens` without a past; the source's length goes to encoder-decoders only."""
    return show.workload(card, batch, tokens, 0, source_tokens if card.family == "encoder-decoder" else None)


def text(what: str, value: Value) -> Value:
    """A value as the tables show it: shares in percent."""
    return f"{100 * value:.2f} %" if "share" in what and isinstance(value, float) else value
