"""`scantling parts`."""

from __future__ import annotations

import click

from scantling.assembly import assemble
from scantling.checkpoint.find import card_of
from scantling.cli import show
from scantling.parts.part import Workload, total


@click.command()
@click.argument("model")
@show.workload_options(tokens=1, past=False)
@show.revision_option
@show.json_option
def command(model: str, batch: int, tokens: int, revision: str | None, as_json: bool) -> None:
    """The exploded parts list of MODEL: component, formula, output shape, parameters, repeats, and why it is there."""
    parts = assemble(card_of(model, revision=revision))
    w = Workload(batch=batch, tokens=tokens)
    steps = list(parts.steps(w))
    if as_json:
        keys = ("path", "op", "formula", "symbols", "shape", "params", "repeat", "note")
        listed = [{key: getattr(step, key) for key in keys} for step in steps]
        show.emit({"parts": listed, "total_params": parts.params})
        return
    rows = [(s.path, s.op, s.formula, s.symbols, s.shape, s.params or None, s.repeat, s.note) for s in steps]
    show.table(("path", "part", "formula", "output", "in numbers", "parameters", "repeat", "why"), rows)
    show.say(f"total: {total(steps, 'params'):,} parameters")
