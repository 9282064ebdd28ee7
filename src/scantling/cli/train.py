"""`scantling train`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scantling.cards.read import training_of
from scantling.checkpoint.find import card_of
from scantling.cli import show
from scantling.errors import ScantlingInputError, need

if TYPE_CHECKING:
    from scantling.cards import Card
    from scantling.cards.training import Training
    from scantling.data import Corpus, Sources
    from scantling.model import Model
    from scantling.train.checkpoints import Found
    from scantling.train.setup import Asked
    from scantling.train.watch import Watcher

SHORT = {
    "steps": "steps",
    "batch": "batch",
    "tokens": "tokens",
    "accumulation": "accumulation",
    "lr": "optimizer.lr",
    "optimizer": "optimizer.kind",
    "schedule": "schedule.kind",
    "precision": "precision",
    "objective": "objective",
    "boundary": "boundary",
    "recompute": "recompute",
    "seed": "seed",
    "eval_every": "evaluation.every",
    "save_every": "save_every",
}
"""Options that stand for a key of the card's section."""


@dataclass(frozen=True)
class Ask:
    """What the command line asks for beside the settings."""

    model: str
    sources: Sources
    tokenizer: str | None
    held_out: float
    device: str
    revision: str | None


@dataclass(frozen=True)
class Place:
    """Where a run is written, and whether it goes on there; `plain` lines or a panel; what else is told its numbers."""

    out: Path
    go_on: bool
    plain: bool
    track: tuple[str, ...]


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
@click.option("--steps", type=int, help="Updates.")
@click.option("--batch", type=int, help="Rows of a micro-batch.")
@click.option("--tokens", type=int, help="Of a row.")
@click.option("--accumulation", type=int, help="Micro-batches of an update.")
@click.option("--lr", type=float, help="The peak rate.")
@click.option("--optimizer", help="adamw, adamw-8bit, muon or sgd.")
@click.option("--schedule", help="constant, cosine, linear, wsd or inverse_sqrt.")
@click.option("--precision", help="fp32, bf16-mixed, bf16-master or bf16.")
@click.option("--objective", help="causal, masked, seq2seq, spans or prefix.")
@click.option("--boundary", help="packed, padded or concatenated.")
@click.option("--recompute", help="none, selective or block.")
@click.option("--seed", type=int)
@click.option("--eval-every", type=int, metavar="N")
@click.option("--save-every", type=int, metavar="N")
@click.option("--set", "more", multiple=True, metavar="KEY=VALUE", help="Any key of the card's training section.")
@click.option("--track", multiple=True, type=click.Choice(["wandb", "trackio"]), help="Send the numbers there, too.")
@click.option("--device", default="cpu", show_default=True)
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
    plain: bool,
    track: tuple[str, ...],
    revision: str | None,
    more: tuple[str, ...],
    **short: Any,
) -> None:
    """Train MODEL: a card from new weights, or a checkpoint further.

    Settings are those of the card's `training` section, changed by the options. Without --data the sources of Python's
    standard library are the text. The last line of standard output is JSON: step, loss, tokens_per_second, mfu.
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
    else:
        _train(ask, card, changes, Place(_folder(out, card.name, go_on), go_on, plain, track))


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


def _folder(out: Path | None, name: str, go_on: bool) -> Path:
    """The folder of the run; one that has checkpoints is used only to go on.

    Raises:
        ScantlingInputError: it has some and nobody said to go on, or it has none to go on from.
    """
    from scantling.train.checkpoints import steps

    if out is None:
        out, i = Path("runs") / name, 1
        while not go_on and out.exists() and steps(out):
            i += 1
            out = Path("runs") / f"{name}-{i}"
    if not go_on and steps(out):
        raise ScantlingInputError(f"{out}: has checkpoints; add --resume to go on, or choose another --out")
    if go_on and not steps(out):
        raise ScantlingInputError(f"{out}: has no checkpoint to go on from")
    return out


def _train(ask: Ask, card: Card, changes: Mapping[str, Any], place: Place) -> None:
    from scantling.cli.train_view import view
    from scantling.train import checkpoints
    from scantling.train.start import train
    from scantling.train.watch import Metrics

    out = place.out
    with checkpoints.held(out):
        checkpoints.clean(out)
        found: Found | None = checkpoints.newest(out) if place.go_on else None
        training = training_of(_as_before(card, found), changes, card.name)
        asked = _data_of(ask, out, found)
        lm, corpus = _made(ask, asked, training)
        watchers: list[Watcher] = [Metrics(out, 0 if found is None else found.step), view(training, place.plain)]
        watchers += _sinks(place, lm.card.name, training, watchers[:])
        try:
            summary = train(lm, corpus, training, out, watchers, found)
        finally:
            # What was made last may still have a word for those before it.
            for watcher in reversed(watchers):
                watcher.close()
    _report(out, lm.card.name)
    click.echo(f"{summary.folder}: {summary.reason} after update {summary.step}", err=True)
    show.say(
        json.dumps(
            {
                "step": summary.step,
                "loss": summary.loss,
                "tokens_per_second": summary.tokens_per_second,
                "mfu": summary.mfu,
                "bits_per_byte": summary.bits_per_byte,
                "reason": summary.reason,
                "folder": str(summary.folder),
            }
        )
    )


def _as_before(card: Card, found: Found | None) -> Card:
    """The card with the settings of the run that goes on, which the options then change."""
    from msgspec.structs import replace

    from scantling.cards import read_file

    if found is None:
        return card
    return replace(card, training=read_file(found.folder / "card.yaml").training)


def _data_of(ask: Ask, out: Path, found: Found | None) -> Asked:
    """The data that is named; of a run that goes on, what it was begun with where nothing is named."""
    from scantling.train.setup import Asked, read_asked, write_asked

    asked = Asked(ask.sources, ask.tokenizer, None, ask.held_out)
    if found is not None and not ask.sources.paths:
        return read_asked(out) or asked
    write_asked(out, asked)
    return asked


def _made(ask: Ask, asked: Asked, training: Training) -> tuple[Model, Corpus]:
    """The model that is trained, and the data in its tokens; what is to be said about both goes to standard error."""
    from scantling.data import shown_progress
    from scantling.train.setup import corpus_of, model_of, single_thread_note

    lm = model_of(ask.model, training, training.seed, ask.device, ask.revision)
    with shown_progress() as progress:
        corpus = corpus_of(lm, training, asked, progress)
    for note in (*lm.notes, *corpus.notes, *filter(None, [single_thread_note(ask.device)])):
        click.echo(f"note: {note}", err=True)
    return lm, corpus


def _sinks(place: Place, name: str, training: Training, watchers: list[Watcher]) -> list[Watcher]:
    """TensorBoard's files where the library is installed, and the trackers that were asked for."""
    from importlib.util import find_spec

    import msgspec

    from scantling.train.sinks import Spare, TensorBoard, Tracker

    def say(text: str) -> None:
        for watcher in watchers:
            watcher.record({"kind": "note", "step": 0, "text": text})

    settings = msgspec.json.decode(msgspec.json.encode(training))
    made: dict[str, Callable[[], Watcher]] = {
        library: partial(Tracker, library, place.out, name, settings) for library in place.track
    }
    if find_spec("tensorboard") is not None:
        made["tensorboard"] = partial(TensorBoard, place.out)
    return [Spare(sink, make, say) for sink, make in made.items()]


def _report(out: Path, name: str) -> None:
    """The report where matplotlib is installed; a failure to write it is no failure of the run."""
    from importlib.util import find_spec

    from scantling.train.report import write_report

    if find_spec("matplotlib") is None:
        click.echo("note: no report is written: it needs matplotlib (pip install 'scantling[plot]')", err=True)
        return
    try:
        click.echo(f"report: {write_report(out, name)}", err=True)
    except OSError as error:
        click.echo(f"note: no report is written: {error.strerror or error}", err=True)


def _prove(ask: Ask, training: Training) -> None:
    """A verdict per line on standard output; exit status 1 where one is broken."""
    from scantling.train.prove import prove
    from scantling.train.setup import Asked

    lm, corpus = _made(ask, Asked(ask.sources, ask.tokenizer, None, ask.held_out), training)
    broken = 0
    for verdict in prove(lm, corpus, training, lm.origin is None):
        word = {True: "holds", False: "BROKEN", None: "skipped"}[verdict.holds]
        show.say(f"{word:8}{verdict.name}: {verdict.message}")
        broken += verdict.holds is False
    show.say("skipped several ranks == one rank: this process is alone")
    if broken:
        raise SystemExit(1)
