"""A run of `scantling train`: what this process does of it, alone or as one of several."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scantling.cards.read import training_of
from scantling.cli import show
from scantling.errors import ScantlingInputError

if TYPE_CHECKING:
    from scantling.cards import Card
    from scantling.cards.training import Training
    from scantling.data import Corpus, Sources
    from scantling.model import Model
    from scantling.train.checkpoints import Found
    from scantling.train.ranks import Ranks
    from scantling.train.run import Summary
    from scantling.train.setup import Asked
    from scantling.train.watch import Watcher


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
    """Where a run is written, and whether it goes on there; `plain` lines or a panel.

    Attributes:
        out: None is a folder named after the card.
        over_memory: the memory that the plan predicts is not looked at.
        track: libraries that are told the numbers, too.
    """

    out: Path | None
    go_on: bool
    plain: bool
    over_memory: bool
    track: tuple[str, ...]


class Run:
    """A run of this process, or its part of one that several share: rank 0 writes, tells and judges what is on disk."""

    def __init__(self, ask: Ask, card: Card, changes: Mapping[str, Any], place: Place) -> None:
        from scantling.train.ranks import Ranks

        self.ask, self.card, self.changes, self.place = ask, card, changes, place
        self.all = Ranks.any_layout()

    def train(self) -> None:
        """Train, and print how it ended."""
        from scantling.train import checkpoints

        asked = [self.changes, repr(self.card), self.ask.held_out, self.place.go_on]
        self.all.agree("another card or other settings", json.dumps(asked, default=str))
        out = Path(self.all.alone(lambda: str(_folder(self.place.out, self.card.name, self.place.go_on))))
        with ExitStack() as stack:
            with self.all.together():
                if self.all.rank == 0:
                    stack.enter_context(checkpoints.held(out))
                    checkpoints.clean(out)
            self._train(out)

    def _train(self, out: Path) -> None:
        from scantling.train.start import train

        found = self._found(out)
        training = training_of(_as_before(self.card, found), self.changes, self.card.name)
        ranks = self.all
        with self.all.together():
            ranks = self.all.here(training.parallel)
        asked = self._data(out, found)
        lm, corpus = self._made(asked, training)
        if not self.place.over_memory:
            self._check_memory(lm, training, ranks)
        watchers = self._watchers(out, training, found, lm.card.name)
        try:
            summary = train(lm, corpus, training, out, watchers, found, ranks)
        finally:
            # What was made last may still have a word for those before it.
            for watcher in reversed(watchers):
                watcher.close()
        if self.all.rank == 0:
            _report(out, lm.card.name)
            _tell_end(summary)

    def _found(self, out: Path) -> Found | None:
        """The newest checkpoint that is whole, as rank 0 sees it."""
        from scantling.train import checkpoints

        if not self.place.go_on:
            return None
        held: list[Found | None] = []

        def look() -> str:
            held.append(checkpoints.newest(out))
            return "" if held[0] is None else str(held[0].step)

        step = self.all.alone(look)
        if not step:
            return None
        return held[0] if held else checkpoints.Found(checkpoints.folder_of(out, int(step)), int(step), ())

    def _data(self, out: Path, found: Found | None) -> Asked:
        """What the run is trained on; rank 0 writes it down."""
        with self.all.together():
            if self.all.rank == 0:
                _data_of(self.ask, out, found, write=True)
        with self.all.together():
            return _data_of(self.ask, out, found, write=False)

    def _made(self, asked: Asked, training: Training) -> tuple[Model, Corpus]:
        """Model and data, of the first rank of a machine before the others, which find the data in the cache."""
        with self.all.node_first():
            lm, corpus = made(self.ask, asked, training, quiet=self.all.rank > 0)
        self.all.agree("other data or another tokenizer", corpus.manifest.key)
        self.all.agree("other weights", _weighed(lm) if self.all.size > 1 else "")
        return lm, corpus

    def _check_memory(self, lm: Model, training: Training, ranks: Ranks) -> None:
        from scantling.train.fits import check

        with self.all.together():
            check(lm, training, ranks)

    def _watchers(self, out: Path, training: Training, found: Found | None, name: str) -> list[Watcher]:
        from scantling.cli.train_view import view
        from scantling.train.watch import Metrics

        if self.all.rank > 0:
            return []
        first: list[Watcher] = [Metrics(out, 0 if found is None else found.step), view(training, self.place.plain)]
        return [*first, *_sinks(out, self.place.track, name, training, first)]


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


def _weighed(lm: Model) -> str:
    """A number that other weights hardly have: their sum in float64."""
    return repr(sum(float(weight.detach().double().sum()) for weight in lm.net.parameters()))


def _tell_end(summary: Summary) -> None:
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
    """The card with the settings of the run that goes on, which the options then change; how many go on is new."""
    from msgspec import structs

    from scantling.cards import read_file
    from scantling.cards.training import Parallel, Training

    if found is None:
        return card
    before = read_file(found.folder / "card.yaml").training
    if isinstance(before, Training):
        own = card.training.parallel if isinstance(card.training, Training) else Parallel()
        before = structs.replace(before, parallel=own)
    return structs.replace(card, training=before)


def _data_of(ask: Ask, out: Path, found: Found | None, write: bool) -> Asked:
    """The data that is named; of a run that goes on, what it was begun with where nothing is named."""
    from scantling.train.setup import Asked, read_asked, write_asked

    asked = Asked(ask.sources, ask.tokenizer, None, ask.held_out)
    if found is not None and not ask.sources.paths:
        return read_asked(out) or asked
    if write:
        write_asked(out, asked)
    return asked


def made(ask: Ask, asked: Asked, training: Training, quiet: bool = False) -> tuple[Model, Corpus]:
    """The model that is trained, and the data in its tokens; what is to be said about both goes to standard error."""
    from scantling.data import shown_progress
    from scantling.train.setup import corpus_of, model_of, single_thread_note, slow_products_note

    lm = model_of(ask.model, training, training.seed, ask.device, ask.revision)
    with nullcontext(None) if quiet else shown_progress() as progress:
        corpus = corpus_of(lm, training, asked, progress)
    if quiet:
        return lm, corpus
    slow = slow_products_note(training.precision, ask.device), single_thread_note(ask.device)
    for note in (*lm.notes, *corpus.notes, *filter(None, slow)):
        click.echo(f"note: {note}", err=True)
    return lm, corpus


def _sinks(
    out: Path, track: Sequence[str], name: str, training: Training, watchers: Sequence[Watcher]
) -> list[Watcher]:
    """TensorBoard's files where the library is installed, and the trackers that were asked for.

    Args:
        watchers: are told where one of them fails.
    """
    from importlib.util import find_spec

    import msgspec

    from scantling.train.sinks import Spare, TensorBoard, Tracker

    def say(text: str) -> None:
        for watcher in watchers:
            watcher.record({"kind": "note", "step": 0, "text": text})

    settings = msgspec.json.decode(msgspec.json.encode(training))
    made: dict[str, Callable[[], Watcher]] = {
        library: partial(Tracker, library, out, name, settings) for library in track
    }
    if find_spec("tensorboard") is not None:
        made["tensorboard"] = partial(TensorBoard, out)
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
