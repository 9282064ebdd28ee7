"""`scantling card`."""

from __future__ import annotations

import click

from scantling.cards import to_yaml
from scantling.checkpoint.find import card_of
from scantling.cli import show


@click.command()
@click.argument("model")
@show.revision_option
@show.json_option
def command(model: str, revision: str | None, as_json: bool) -> None:
    """Print the card of MODEL as YAML, sizes that follow from others filled in."""
    card = card_of(model, revision=revision)
    if as_json:
        import msgspec

        show.emit(msgspec.to_builtins(card))
    else:
        click.echo(to_yaml(card), nl=False)
