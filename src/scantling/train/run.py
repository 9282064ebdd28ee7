"""The loop: data in, updates, looks at held-out text, checkpoints, until the steps or somebody's patience end."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from scantling.cards.training import Training
from scantling.data import Batch, Corpus, batches
from scantling.errors import ScantlingError
from scantling.model import Model
from scantling.tensor import router_losses
from scantling.train import checkpoints, settings, state
from scantling.train.division import rows_of_a_pass
from scantling.train.evaluate import Score
from scantling.train.evaluation import evaluate, samples, wants_samples
from scantling.train.forward import Inputs, forward, inputs
from scantling.train.keeping import Held, Keeping
from scantling.train.meter import Meter
from scantling.train.ranks import Told
from scantling.train.signals import Stop
from scantling.train.speed import counted_flops, forget_peak
from scantling.train.step import Outcome, Stepper
from scantling.train.watch import Watcher


class TrainingStopped(ScantlingError):
    """The run ended itself: the message says at which update and why."""


@dataclass(frozen=True)
class Summary:
    """How a run ended.

    Attributes:
        step: updates in all.
        loss: of the held-out text, in nats; where nothing is held out, the last update's.
        bits_per_byte: of the held-out text, where bytes have a meaning.
        tokens_per_second, mfu: over the updates of this process.
        reason: ``done``, ``patience`` or the signal's name.
        folder: of the last checkpoint.
    """

    step: int
    loss: float
    bits_per_byte: float | None
    tokens_per_second: float
    mfu: float
    reason: str
    folder: Path


@dataclass
class Run:
    """One run in one folder. Made by `begin`; `loop` trains."""

    lm: Model
    corpus: Corpus
    training: Training
    out: Path
    watchers: Sequence[Watcher]
    stepper: Stepper
    keeping: Keeping
    meter: Meter
    progress: state.Progress = field(default_factory=state.Progress)
    saved_step: int | None = None
    last_batch: Inputs | None = None

    def loop(self, stop: Stop) -> Summary:
        """Train to the end.

        Raises:
            TrainingStopped: an update was refused and the policy is to stop.
            ScantlingInputError: a checkpoint cannot be written.
        """
        training, progress = self.training, self.progress
        schedule = settings.schedule_of(training)
        rows = self.rows()
        reason, last = "done", math.nan
        score: Score | None = None
        while progress.step < training.steps and reason == "done":
            began = time.perf_counter()
            batch = next(rows)
            micro = self._micro(batch)
            self.last_batch = micro[-1]
            factor = schedule.factor(progress.step)
            outcome = self.stepper.update(progress.step, micro, factor)
            progress.cursor = dict(batch.cursor)
            self._count(batch, time.perf_counter() - began)
            last, score = outcome.loss, None
            self._tell_step(outcome, factor, time.perf_counter() - began)
            self._judge(outcome)
            if self._due(training.evaluation.every):
                score = self._evaluate()
                if training.save_every and progress.best_step == progress.step:
                    self.save()
                if training.evaluation.patience and progress.waited >= training.evaluation.patience:
                    reason = "patience"
            if self._due(training.save_every) and self.saved_step != progress.step:
                self.save()
            if (signal := self._asked_to_stop(stop)) is not None:
                reason = signal
        if score is None and reason == "done":
            score = self._evaluate()
        if self.saved_step != progress.step:
            self.save()
        self._account()
        return self._summary(reason, last, score)

    def rows(self) -> Iterator[Batch]:
        """The batches that are still to come.

        Raises:
            ScantlingInputError: data and settings that do not go together.
        """
        training, ranks = self.training, self.stepper.ranks
        return batches(
            self.corpus,
            settings.objective(self.lm, training),
            training.batch * training.accumulation,
            settings.rows_of(self.lm.card, training),
            settings.boundary_of(self.lm.card, training),
            training.seed,
            self.progress.cursor,
            ranks.data,
            ranks.data_rank,
        )

    def _micro(self, batch: Batch) -> list[Inputs]:
        """The micro-batches of an update, as tensors."""
        rows, size = len(batch.ids), rows_of_a_pass(self.training, self.stepper.ranks)
        return [inputs(batch.rows(i, i + size), self.lm.parts, self.lm.device) for i in range(0, rows, size)]

    def _asked_to_stop(self, stop: Stop) -> str | None:
        """The signal by which any process was asked to stop; all get the same answer."""
        ranks = self.stepper.ranks
        if not ranks.totals([float(stop.by is not None)], self.lm.device)[0]:
            return None
        return ranks.first(stop.by)

    def _count(self, batch: Batch, seconds: float) -> None:
        self.progress.step += 1
        self.progress.tokens += self.meter.count(batch, seconds, only=self.training.steps == 1)
        self.progress.seconds += seconds

    def _judge(self, outcome: Outcome) -> None:
        """Act on an update that was refused.

        Raises:
            TrainingStopped: the policy is to stop, or too many were skipped in a row.
        """
        progress, bad = self.progress, self.training.bad
        if outcome.fault is None:
            progress.skipped = 0
            if self.keeping.ema is not None:
                self.keeping.ema.update()
            return
        progress.skipped += 1
        progress.skipped_in_all += 1
        if bad.policy == "skip" and progress.skipped < bad.most:
            self.tell("note", text=f"update {progress.step} is skipped: {outcome.fault}")
            return
        newest = f"the newest checkpoint is of step {self.saved_step}" if self.saved_step else "nothing is saved yet"
        again = f" ({progress.skipped} in a row)" if progress.skipped > 1 else ""
        sentence = (
            f"update {progress.step} was not made{again}: {outcome.fault}; the weights are those of before, {newest}"
        )
        raise (TrainingStopped if self.stepper.ranks.rank == 0 else Told)(sentence)

    def _due(self, every: int) -> bool:
        return bool(every) and self.progress.step % every == 0

    def _evaluate(self) -> Score | None:
        """Score held-out text, remember the best, and write samples; None where nothing is held out."""
        if not len(self.corpus.held_out):
            return None
        progress, ema = self.progress, self.keeping.ema
        with nullcontext() if ema is None else ema.swapped():
            score, texts = self._look()
        if progress.best is None or score.loss < progress.best:
            progress.best, progress.best_step, progress.waited = score.loss, progress.step, 0
        else:
            progress.waited += 1
        self.tell(
            "evaluation",
            loss=score.loss,
            perplexity=score.perplexity,
            bits_per_byte=score.bits_per_byte,
            tokens=score.tokens,
        )
        for text in texts:
            self.tell("sample", text=text)
        forget_peak(self.lm.device)
        return score

    def _look(self) -> tuple[Score, list[str]]:
        score = evaluate(self.lm, self.corpus, self.training, self.stepper.how, self.stepper.ranks)
        self.keeping.division.rest()
        return score, self._samples()

    def _samples(self) -> list[str]:
        """Texts; of several processes rank 0 writes them, with all weights in a net of its own."""
        ranks = self.stepper.ranks
        if not wants_samples(self.lm, self.training):
            return []
        division = self.keeping.division
        weights = division.state() if division.divided else None
        with ranks.together():
            lm = self.lm if weights is None else self.keeping.rebuilt(weights)
            return samples(lm, self.corpus, self.training) if ranks.rank == 0 else []

    def save(self) -> Path:
        """Write a checkpoint of the run as it stands."""
        self.progress.norms = list(self.stepper.guard.past)
        progress, ranks = self.progress, self.stepper.ranks
        held = self.keeping.held()

        def write() -> str:
            put = partial(self._write, held)
            return str(checkpoints.save(self.out, progress.step, put, self.training.keep, progress.best_step))

        folder = Path(ranks.alone(write))
        self.saved_step = self.progress.step
        self.tell("saved", folder=str(folder))
        forget_peak(self.lm.device)
        return folder

    def _write(self, held: Held, folder: Path) -> None:
        notes = self.keeping.write(held, folder)
        if self.saved_step is None:
            for note in notes:
                self.tell("note", text=note)
        state.write(folder, self.progress, self.about(), held.tensors)

    def about(self) -> dict[str, Any]:
        """What a run must have in common with the one that it goes on from."""
        return self.keeping.about(self.corpus, self.training)

    def tell(self, kind: str, **values: Any) -> None:
        """Give a record to everyone who watches."""
        for watcher in self.watchers:
            watcher.record({"kind": kind, "step": self.progress.step, **values})

    def _tell_step(self, outcome: Outcome, factor: float, seconds: float) -> None:
        self.tell(
            "step",
            loss=outcome.loss,
            objective=outcome.objective,
            lr=self.training.optimizer.lr * factor,
            norm=outcome.norm,
            tokens=outcome.tokens,
            seconds=seconds,
            tokens_per_second=self.meter.rate,
            mfu=self.meter.mfu,
            remaining_seconds=(self.training.steps - self.progress.step) * self._seconds_of_one,
            memory_bytes=self.meter.marked_memory(),
            memory_predicted=self.meter.predicted_memory,
            norms=outcome.norms,
            **({"fault": outcome.fault} if outcome.fault else {}),
            **({"routers": _routers(outcome)} if outcome.routing else {}),
        )

    def _account(self) -> None:
        """Tell what was predicted beside what was measured."""
        if self.last_batch is None or not self.meter.seconds:
            return
        batch = self.last_batch

        def once() -> None:
            result = forward(self.lm.net, self.lm.parts, batch, max(batch.judged, 1), self.stepper.how)
            result.objective.backward()  # type: ignore[no-untyped-call]

        # Torch's counter does not see through what divided weights do.
        counted = None if self.keeping.division.divided else counted_flops(once)
        self.stepper.optimizers.clear()
        self.tell("account", **self.meter.account(batch, counted))

    @property
    def _seconds_of_one(self) -> float:
        measured = self.meter.seconds_of_one
        return self.progress.seconds / self.progress.step if measured is None else measured

    def _summary(self, reason: str, last: float, score: Score | None) -> Summary:
        return Summary(
            step=self.progress.step,
            loss=last if score is None else score.loss,
            bits_per_byte=None if score is None else score.bits_per_byte,
            tokens_per_second=self.meter.rate,
            mfu=self.meter.mfu,
            reason=reason,
            folder=checkpoints.folder_of(self.out, self.progress.step),
        )


def _routers(outcome: Outcome) -> dict[str, Any]:
    """Load, entropy and dead experts of each router, in the last micro-batch."""
    found = {path: router_losses.load(routing) for path, routing in outcome.routing.items()}
    return {
        path: {"entropy": one.entropy, "dead": len(one.dead), "shares": list(one.shares)} for path, one in found.items()
    }
