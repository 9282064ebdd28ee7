"""`scantling tokenize`."""

from __future__ import annotations

import click

from scantling.cli import show
from scantling.errors import ScantlingInputError


@click.command()
@click.argument("text")
@click.option("-m", "--model", help="Whose tokenizer; default: the default model's.")
@show.revision_option
@show.json_option
def command(text: str, model: str | None, revision: str | None, as_json: bool) -> None:
    """Cut TEXT into the tokens of a model: ids and pieces."""
    from scantling.loading import tokenizer_of

    tokenizer = tokenizer_of(model, revision=revision)
    ids = tokenizer.encode(text)
    if not ids:
        raise ScantlingInputError("the text is empty: at least one character is needed")
    pieces = [tokenizer.decode([i], skip_special=False) for i in ids]
    if as_json:
        show.emit({"ids": ids, "tokens": pieces, "count": len(ids)})
        return
    show.table(("id", "token"), [(str(i), repr(piece)) for i, piece in zip(ids, pieces, strict=True)])
    show.say(f"{len(ids)} tokens, {len(text)} characters, {len(text.encode())} bytes")
