"""`scantling verify`."""

from __future__ import annotations

from typing import Any

import click

from scantling.assembly import assemble
from scantling.checkpoint.find import card_of
from scantling.cli import show
from scantling.study.verify import verify


@click.command()
@click.argument("model")
@show.revision_option
@show.json_option
@click.pass_context
def command(ctx: click.Context, model: str, revision: str | None, as_json: bool) -> None:
    """Build MODEL on the meta device, run it, and compare: predicted, built, counted. Exit 0 only if all are equal.

    Compared are parameters, names, every shape of the trace in order, FLOPs (torch's own counter, attention through
    the math backend), and cache bytes; for a prefill, a decode step and a training step, with both kernels.
    No weights are allocated.
    """
    card = card_of(model, revision=revision)
    rows = verify(assemble(card))
    equal = all(row.equal for row in rows)
    if as_json:
        keys = ("what", "predicted", "built", "counted", "equal")
        show.emit({"name": card.name, "rows": [{k: getattr(r, k) for k in keys} for r in rows], "equal": equal})
    else:
        show.table(("what", "predicted", "built", "counted", "equal"), [_row(r) for r in rows])
        show.say(f"{card.name}: " + ("all equal" if equal else "NOT equal"))
    ctx.exit(0 if equal else 1)


def _row(row: Any) -> tuple[Any, ...]:
    cells = (f"{v:,}" if isinstance(v, int) else v for v in (row.predicted, row.built, row.counted))
    return (row.what, *cells, row.equal)
