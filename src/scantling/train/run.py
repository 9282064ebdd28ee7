"""The loop: data in, updates, looks at held-out text, checkpoints, until the steps or somebody's patience end."""

from __future__ import annotations

import copy
import hashlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from scantling.cards import to_yaml
from scantling.cards.training import Training
from scantling.checkpoint.save import Saved
from scantling.data import Batch, Corpus, batches
from scantling.errors import ScantlingError
from scantling.model import Model
from scantling.saving import save
from scantling.tensor import router_losses
from scantling.train import checkpoints, settings, state
from scantling.train.division import Division, rows_of_a_pass
from scantling.train.ema import Ema
from scantling.train.evaluate import Score
from scantling.train.evaluation import evaluate, samples, wants_samples
from scantling.train.forward import Inputs, forward, inputs
from scantling.train.lora import Adapters
from scantling.train.ranks import Told
from scantling.train.signals import Stop
from scantling.train.speed import (
    CONVENTION,
    MEMORY_CONVENTION,
    MFU_CONVENTION,
    DocumentFlops,
    Peak,
    counted_flops,
    forget_peak,
    memory_bytes,
    training_flops,
)
from scantling.train.step import Outcome, Stepper
from scantling.train.watch import Watcher

MEAN = "ema"
"""The folder in a checkpoint that has the mean of the weights, a model like any other."""


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
    division: Division
    ema: Ema | None
    adapters: Adapters | None
    peak: Peak
    progress: state.Progress = field(default_factory=state.Progress)
    started_at: int = 0
    tokens_here: int = 0
    seconds_here: float = 0.0
    flops_here: int = 0
    base_memory: int | None = None
    net_bytes: int = 0
    predicted_memory: int | None = None
    most_memory: int | None = None
    saved_step: int | None = None
    last_batch: Inputs | None = None
    document_flops: DocumentFlops = field(init=False)

    def __post_init__(self) -> None:
        self.document_flops = DocumentFlops(self.lm.parts)

    def loop(self, stop: Stop) -> Summary:
        """Train to the end.

        Raises:
            TrainingStopped: an update was refused and the policy is to stop.
            ScantlingInputError: a checkpoint cannot be written.
        """
        training, progress = self.training, self.progress
        self.started_at = progress.step
        schedule = settings.schedule_of(training)
        rows = self._rows()
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

    def _rows(self) -> Iterator[Batch]:
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
        ranks = self.stepper.ranks
        work = [float(batch.tokens), float(self.document_flops.of(batch))]
        tokens, flops = (int(value) for value in ranks.sums(work, self.lm.device))
        self.progress.step += 1
        self.progress.tokens += tokens
        self.progress.seconds += seconds
        # The first update also pays for caches and, if asked for, for compiling.
        if self.progress.step > self.started_at + 1 or self.training.steps == 1:
            self.tokens_here += tokens
            self.seconds_here += seconds
            self.flops_here += flops

    def _judge(self, outcome: Outcome) -> None:
        """Act on an update that was refused.

        Raises:
            TrainingStopped: the policy is to stop, or too many were skipped in a row.
        """
        progress, bad = self.progress, self.training.bad
        if outcome.fault is None:
            progress.skipped = 0
            if self.ema is not None:
                self.ema.update()
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
        progress = self.progress
        if self.ema is None:
            score, texts = self._look()
        else:
            with self.ema.swapped():
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
        self.division.rest()
        return score, self._samples()

    def _samples(self) -> list[str]:
        """Texts; of several processes rank 0 writes them, with all weights in a net of its own."""
        ranks = self.stepper.ranks
        if not wants_samples(self.lm, self.training):
            return []
        held = self.division.state() if self.division.divided else None
        with ranks.together():
            lm = self.lm if held is None else self._rebuilt(held)
            return samples(lm, self.corpus, self.training) if ranks.rank == 0 else []

    def _rebuilt(self, held: Mapping[str, Tensor]) -> Model:
        """The model with whole weights, in host memory, where there are any."""
        whole = copy.copy(self.lm)
        if held:
            whole.net = self.lm.parts.build("meta", str(self.lm.dtype).removeprefix("torch."))
            whole.net.load_state_dict(held, assign=True)
        return whole

    def save(self) -> Path:
        """Write a checkpoint of the run as it stands."""
        self.progress.norms = list(self.stepper.guard.past)
        progress, ranks = self.progress, self.stepper.ranks
        weights, tensors = self._held()

        def write() -> str:
            put = partial(self._write, weights, tensors)
            return str(checkpoints.save(self.out, progress.step, put, self.training.keep, progress.best_step))

        folder = Path(ranks.alone(write))
        self.saved_step = self.progress.step
        self.tell("saved", folder=str(folder))
        forget_peak(self.lm.device)
        return folder

    def _held(self) -> tuple[dict[str, Tensor] | None, dict[str, Tensor]]:
        """What a checkpoint holds, whole in rank 0: the net's weights (None: as they stand there), and the rest."""
        tensors = {
            f"optimizer/{name}": value for name, value in self.division.whole(self.stepper.optimizers.state()).items()
        }
        if self.ema is not None:
            tensors |= {f"ema/{name}": value for name, value in self.division.whole(self.ema.means).items()}
        if self.adapters is not None:
            tensors |= {f"lora/{name}": value for name, value in self.adapters.weights.items()}
        if self.stepper.balance is not None:
            tensors |= {f"router/{path}": shift for path, shift in self.stepper.balance.shifts.items()}
        return (self.division.state() if self.division.divided else None), tensors

    def _write(self, weights: dict[str, Tensor] | None, tensors: Mapping[str, Tensor], folder: Path) -> None:
        saved = self._save(weights, folder)
        if self.ema is not None and weights is None:
            with self.ema.swapped():
                self._save(None, folder / MEAN)
        elif self.ema is not None and weights is not None:
            means = {name: tensors[f"ema/{name}"].to(weights[name].dtype) for name in self.ema.means}
            self._save(weights | means, folder / MEAN)
        notes = list(saved.notes)
        if self.adapters is not None:
            notes += self.adapters.save_peft(folder / "adapter", saved.model_type)
        if self.saved_step is None:
            for note in notes:
                self.tell("note", text=note)
        state.write(folder, self.progress, self.about(), tensors)

    def _save(self, weights: dict[str, Tensor] | None, folder: Path) -> Saved:
        """The net, adapters merged, as a folder of its own; with the weights given, or as they stand."""
        with nullcontext() if self.adapters is None else self.adapters.merged():
            return save(self.lm if weights is None else self._rebuilt(weights), folder)

    def about(self) -> dict[str, Any]:
        """What a run must have in common with the one that it goes on from."""
        return {
            "card": fingerprint(self.lm),
            "corpus": self.corpus.manifest.key,
            "training": msgspec.json.decode(msgspec.json.encode(self.training)),
            "torch": torch.__version__,
            "base": None if self.adapters is None else self.adapters.base,
        }

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
            tokens_per_second=self.rate,
            mfu=self.mfu,
            remaining_seconds=(self.training.steps - self.progress.step) * self._mean_seconds,
            memory_bytes=self._marked_memory(),
            memory_predicted=self.predicted_memory,
            norms=outcome.norms,
            **({"fault": outcome.fault} if outcome.fault else {}),
            **({"routers": _routers(outcome)} if outcome.routing else {}),
        )

    def _account(self) -> None:
        """Tell what was predicted beside what was measured."""
        if self.last_batch is None or not self.seconds_here:
            return
        batch = self.last_batch

        def once() -> None:
            result = forward(self.lm.net, self.lm.parts, batch, max(batch.judged, 1), self.stepper.how)
            result.objective.backward()  # type: ignore[no-untyped-call]

        # Torch's counter does not see through what divided weights do.
        counted = None if self.division.divided else counted_flops(once)
        self.stepper.optimizers.clear()
        self.tell(
            "account",
            flops_predicted=training_flops(self.lm.parts, batch),
            flops_counted=counted,
            convention=CONVENTION,
            flops_of_updates=self.flops_here,
            mfu_convention=MFU_CONVENTION,
            seconds=self.seconds_here,
            seconds_at_peak=self.flops_here / (self.stepper.ranks.size * self.peak.flops),
            peak=self.peak.flops,
            peak_source=self.peak.source,
            mfu=self.mfu,
            memory_predicted=self.predicted_memory,
            memory_measured=self.most_memory,
            memory_convention=MEMORY_CONVENTION,
        )

    def _marked_memory(self) -> int | None:
        """The most that updates held so far, the net included; None where the system does not tell.

        Looks at held-out text and checkpoints are not counted: they let the mark begin anew.
        """
        used = memory_bytes(self.lm.device)
        if used is not None and self.base_memory is not None:
            self.most_memory = max(self.most_memory or 0, used - self.base_memory + self.net_bytes)
        return self.most_memory

    @property
    def _mean_seconds(self) -> float:
        made = max(self.progress.step - self.started_at - 1, 1)
        return (self.seconds_here or self.progress.seconds) / made

    @property
    def rate(self) -> float:
        """Tokens per second of this process's updates, the first one left out."""
        return self.tokens_here / self.seconds_here if self.seconds_here else 0.0

    @property
    def mfu(self) -> float:
        """Share of the dense peak of all ranks, by `speed.MFU_CONVENTION`."""
        size = self.stepper.ranks.size
        return self.flops_here / self.seconds_here / (size * self.peak.flops) if self.seconds_here else 0.0

    def _summary(self, reason: str, last: float, score: Score | None) -> Summary:
        return Summary(
            step=self.progress.step,
            loss=last if score is None else score.loss,
            bits_per_byte=None if score is None else score.bits_per_byte,
            tokens_per_second=self.rate,
            mfu=self.mfu,
            reason=reason,
            folder=checkpoints.folder_of(self.out, self.progress.step),
        )


def _routers(outcome: Outcome) -> dict[str, Any]:
    """Load, entropy and dead experts of each router, in the last micro-batch."""
    found = {path: router_losses.load(routing) for path, routing in outcome.routing.items()}
    return {
        path: {"entropy": one.entropy, "dead": len(one.dead), "shares": list(one.shares)} for path, one in found.items()
    }


def fingerprint(lm: Model) -> str:
    """A hash of what the card says of the model itself."""
    bare = replace(lm.card, name="", training=None, source=None, published=None, dtype="unknown")
    return hashlib.sha256(to_yaml(bare).encode()).hexdigest()
