"""`scantling fill`."""

from __future__ import annotations

import click

from scantling.cli import show
from scantling.errors import need


@click.command()
@click.argument("text")
@click.option("-m", "--model", required=True, help="Folder, .safetensors or hub id of a masked language model.")
@click.option("--top", type=click.IntRange(min=1), default=5, show_default=True, help="Words per mask.")
@click.option("--device", default="cpu", show_default=True)
@show.revision_option
@show.json_option
def command(text: str, model: str, top: int, device: str, revision: str | None, as_json: bool) -> None:
    """The likeliest tokens at each mask of TEXT, such as [MASK] or <mask>."""
    show.not_empty([text])
    need("torch", "fill masks")
    from scantling.generate.embed import fill

    guesses, notes = fill(show.encoder(model, device, revision), text, top)
    for note in notes:
        click.echo(f"note: {note}", err=True)
    if as_json:
        show.emit(
            {"tokens": [[{"token": g.token, "id": g.id, "probability": g.probability} for g in at] for at in guesses]}
        )
        return
    rows = [(i, repr(g.token), g.id, g.probability) for i, at in enumerate(guesses, 1) for g in at]
    show.table(("mask", "token", "id", "probability"), rows)
