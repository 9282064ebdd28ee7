"""How a run begins, and how it goes on from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from msgspec.structs import replace
from torch import Tensor

from scantling.cards.training import Training
from scantling.data import Corpus
from scantling.errors import ScantlingInputError
from scantling.loading import load
from scantling.model import Model
from scantling.tensor.pages import kept_pages
from scantling.train import checkpoints, division, settings, state
from scantling.train.balance import Balance
from scantling.train.ema import Ema
from scantling.train.forward import check_head
from scantling.train.keeping import Keeping
from scantling.train.lora import Adapters
from scantling.train.meter import Meter
from scantling.train.optim import Optimizers, groups
from scantling.train.ranks import Ranks
from scantling.train.run import Run, Summary
from scantling.train.signals import stopping
from scantling.train.speed import forget_peak, memory_now, peak, predicted_memory
from scantling.train.step import WINDOW, Guard, Stepper
from scantling.train.watch import Watcher


def begin(
    lm: Model, corpus: Corpus, training: Training, out: Path, watchers: Sequence[Watcher], ranks: Ranks | None = None
) -> Run:
    """A run at its beginning: the net made ready, nothing trained yet.

    Raises:
        ScantlingInputError: settings that do not go together, a tokenizer larger than the vocabulary, or a head that
            cannot be trained.
    """
    ranks = ranks or Ranks.here(training.parallel)
    with ranks.together():
        _check(lm, corpus, training, ranks)
        lm.net.to(getattr(torch, settings.WEIGHTS[training.precision]))
        lm.net.requires_grad_(True)
        lm.card = replace(lm.card, training=training)
        adapters = None if training.lora is None else Adapters(lm, settings.lora_of(training))
    stored = {name: weight for name, weight in lm.net.named_parameters() if name in lm.parts.named_stored}
    weights: dict[str, Tensor] = dict(stored) if adapters is None else dict(adapters.weights)
    recipe = settings.recipe_of(training)
    net_bytes = sum(weight.nbytes for weight in (*lm.net.parameters(), *lm.net.buffers()))
    own = division.Division(lm, weights, ranks)
    optimizers = Optimizers(groups(lm.parts, own.weights, recipe), recipe, training.precision == "bf16-master")
    guard = Guard(training.bad.spike)
    stepper = Stepper(lm, optimizers, settings.how_of(training), training.clip, training.seed, own, guard)
    if training.router_shift and adapters is None:
        stepper.balance = Balance(lm.net, lm.parts, training.router_shift)
    if training.compile:
        stepper.compiled = torch.compile(lm.net)
    ema = None if training.ema is None else Ema(own.weights, training.ema)
    computing = torch.bfloat16 if training.precision != "fp32" else torch.float32
    meter = Meter(lm.parts, lm.device, ranks, peak(lm.device, computing), net_bytes)
    if ranks.size == 1:
        longest = max(n for _, n in settings.rows_of(lm.card, training))
        meter.predicted_memory = predicted_memory(lm.parts, training, longest)
    forget_peak(lm.device)
    meter.base_memory = memory_now(lm.device)
    run = Run(lm, corpus, training, out, watchers, stepper, Keeping(lm, stepper, own, ema, adapters), meter)
    with ranks.together():
        run.rows()
    return run


def _check(lm: Model, corpus: Corpus, training: Training, ranks: Ranks) -> None:
    check_head(lm.parts)
    division.check(lm, training, ranks)
    settings.schedule_of(training)
    if corpus.manifest.vocab_size > lm.card.vocab_size:
        raise ScantlingInputError(
            f"the tokenizer has {corpus.manifest.vocab_size:,} tokens, and vocab_size of {lm.card.name} is "
            f"{lm.card.vocab_size:,}: take a smaller tokenizer, or a card with more rows"
        )


def resume(run: Run, found: checkpoints.Found) -> Sequence[str]:
    """Put a run where a checkpoint was; returns notes on what is not as it was then.

    Raises:
        ScantlingInputError: the checkpoint is of another card, other data, or of settings that change the losses.
    """
    keeping = run.keeping
    stored = state.read(found.folder, keeping.division.piece)
    about, now = stored.about, run.about()
    if about.get("card") != now["card"]:
        raise ScantlingInputError(f"{found.folder}: is a checkpoint of another card than {run.lm.card.name}")
    if about.get("corpus") != now["corpus"]:
        raise ScantlingInputError(f"{found.folder}: was trained on other data, or with another tokenizer")
    changed = settings.differences(about["training"], now["training"])
    if keeping.adapters is None:
        place = "cpu" if keeping.division.divided else str(run.lm.device)
        loaded = load(found.folder, device=place).net.state_dict()
        known = run.lm.parts.named_stored
        keeping.division.put({name: value for name, value in loaded.items() if name in known})
    else:
        if about.get("base") != now["base"]:
            raise ScantlingInputError(f"{found.folder}: its adapters are for other weights than those of this model")
        keeping.adapters.restore(stored.under("lora"))
    run.stepper.optimizers.restore(stored.under("optimizer"))
    if keeping.ema is not None:
        keeping.ema.restore(stored.under("ema"))
    if run.stepper.balance is not None:
        run.stepper.balance.restore(stored.under("router"))
    run.progress = stored.progress
    run.stepper.guard.past.extend(stored.progress.norms[-WINDOW:])
    run.saved_step = run.progress.step
    notes = [*found.skipped]
    if changed:
        notes.append(
            f"training is not as it was: {', '.join(changed)}; the losses are those of a new plan from here on"
        )
    if about.get("torch") != now["torch"]:
        notes.append(f"torch {now['torch']} instead of {about.get('torch')}: losses may differ in their last digits")
    return notes


def train(
    lm: Model,
    corpus: Corpus,
    training: Training,
    out: Path,
    watchers: Sequence[Watcher] = (),
    found: checkpoints.Found | None = None,
    ranks: Ranks | None = None,
) -> Summary:
    """Train a model, in a folder that the caller holds (`checkpoints.held`).

    Args:
        watchers: of several processes only rank 0 has any.
        found: the checkpoint to go on from.
        ranks: default those that torch.distributed knows, divided as the settings say.

    Raises:
        ScantlingInputError: see `begin` and `resume`.
        TrainingStopped: an update was refused and the policy is to stop.
    """
    run = begin(lm, corpus, training, out, watchers, ranks)
    if found is not None:
        notes: Sequence[str] = ()
        with run.stepper.ranks.together():
            notes = resume(run, found)
        for note in notes:
            run.tell("note", text=note)
    with stopping() as stop, kept_pages(run.meter.predicted_memory or 0) if lm.device.type == "cpu" else nullcontext():
        return run.loop(stop)
