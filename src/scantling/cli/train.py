"""`scantling train`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scantling.cards.read import training_of
from scantling.checkpoint.find import card_of
from scantling.cli import show
from scantling.cli.train_options import SHORT, short_options
from scantling.cli.train_run import Ask, Place, Run, made
from scantling.errors import ScantlingInputError, need

if TYPE_CHECKING:
    from scantling.cards.training import Training


@click.command()
@click.argument("model")
@click.option("--data", multiple=True, metavar="D", help="Text files, folders, .jsonl, .parquet, .tsv or datasets.")
@click.option(
    "--kind", type=click.Choice(["text", "pairs", "chat"]), default="text", show_default=True, help="Of data."
)
@click.option("--field", "fields", multiple=True, help="Of JSON lines and tables; of pairs two.")
@show.encoding_option
@click.option("--out", type=click.Path(path_type=Path), metavar="RUN", help="Folder of the run. [default: runs/NAME]")
@click.option("--resume", "go_on", is_flag=True, help="Go on from the newest checkpoint of RUN that is whole.")
@click.option("--prove", is_flag=True, help="Check the equalities of training on this card and data, and stop.")
@click.option("--tokenizer", metavar="T", help="A path, or `bytes`. [default: the model's, or a learned one]")
@click.option("--held-out", type=click.FloatRange(0, 0.9), default=0.05, show_default=True, help="Share of documents.")
@short_options
@click.option("--set", "more", multiple=True, metavar="KEY=VALUE", help="Any key of the card's training section.")
@click.option("--track", multiple=True, type=click.Choice(["wandb", "trackio"]), help="Send the numbers there, too.")
@click.option("--device", default="cpu", show_default=True)
@click.option("--over-memory", is_flag=True, help="Several processes: also where the plan says that it does not fit.")
@click.option("--plain", is_flag=True, help="Lines instead of a panel, also on a terminal.")
@show.revision_option
def command(
    model: str,
    data: tuple[str, ...],
    kind: Any,
    fields: tuple[str, ...],
    encoding_errors: Any,
    out: Path | None,
    go_on: bool,
    prove: bool,
    tokenizer: str | None,
    held_out: float,
    device: str,
    over_memory: bool,
    plain: bool,
    track: tuple[str, ...],
    revision: str | None,
    more: tuple[str, ...],
    short: dict[str, Any],
) -> None:
    """Train MODEL: a card from new weights, or a checkpoint further.

    Settings are those of the card's `training` section, changed by the options. Without --data the sources of Python's
    standard library are the text. The last line of standard output is JSON: step, loss, tokens_per_second, mfu.
    Under torchrun the processes share the run, as --set parallel={sharded: N, tensor: M} or {replicated: N} says.
    """
    card, changes = card_of(model, revision=revision), _changes(short, more)
    training_of(card, changes, card.name)
    need("torch", "train")
    need("tokenizers", "train on text")
    for library in track:
        need(library, f"track a run with {library}")
    from scantling.data import Sources

    ask = Ask(model, Sources(data, kind, fields, encoding_errors), tokenizer, held_out, device, revision)
    if prove:
        _prove(ask, training_of(card, changes, card.name))
        return
    from scantling.train.ranks import joined

    with joined(device) as own:
        Run(replace(ask, device=own), card, changes, Place(out, go_on, plain, over_memory, track)).train()


def _changes(short: Mapping[str, Any], more: tuple[str, ...]) -> dict[str, Any]:
    """Values by dotted key."""
    from scantling import strict_yaml

    changes = {SHORT[name]: value for name, value in short.items() if value is not None}
    for text in more:
        key, sign, value = text.partition("=")
        if not sign or not key:
            raise ScantlingInputError(f"--set {text!r}: a key and its value are needed, as in --set optimizer.lr=0.001")
        changes[key.strip()] = strict_yaml.parse(value, f"--set {key}", "a value")
    return changes


def _prove(ask: Ask, training: Training) -> None:
    """A verdict per line on standard output; exit status 1 where one is broken."""
    from scantling.train.prove import prove
    from scantling.train.ranks import launched
    from scantling.train.setup import Asked

    if launched() > 1:
        raise ScantlingInputError("--prove starts a second process itself: run it without torchrun")
    lm, corpus = made(ask, Asked(ask.sources, ask.tokenizer, None, ask.held_out), training)
    broken = 0
    for verdict in prove(lm, corpus, training, lm.origin is None):
        word = {True: "holds", False: "BROKEN", None: "skipped"}[verdict.holds]
        show.say(f"{word:8}{verdict.name}: {verdict.message}")
        broken += verdict.holds is False
    if broken:
        raise SystemExit(1)
