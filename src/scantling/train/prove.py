"""The equalities that training must keep, checked on the user's own card and data."""

from __future__ import annotations

import copy
import dataclasses
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from scantling.assembly import assemble
from scantling.cards.schema import Dropout
from scantling.cards.training import Evaluation, Training
from scantling.data import Batch, Corpus, MaskedLM, batches
from scantling.model import Model
from scantling.train import checkpoints, rearranged, settings, two_ranks
from scantling.train import forward as passes
from scantling.train.forward import How, Inputs
from scantling.train.optim import Recipe, groups
from scantling.train.scoring import IGNORED
from scantling.train.signals import Stop
from scantling.train.start import begin, resume
from scantling.train.step import Stepper

CLOSE = 1e-4
"""Largest relative difference of a gradient in float32, over all weights together."""

ROWS, TOKENS = 4, 128
"""Of the batches that are compared, at most."""

STEPS = 4
"""Of the run that is interrupted after half of them."""


@dataclass(frozen=True)
class Verdict:
    """On one equality.

    Attributes:
        holds: None where it does not apply to this card or data; `message` then says why.
        message: what was compared, and how far it is apart.
    """

    name: str
    holds: bool | None
    message: str


@dataclass(frozen=True)
class Ground:
    """What is proved on.

    Attributes:
        lm: the model without dropout and in float32.
        given: the model as it is.
        batch: rows of the data.
        new: the weights are initial ones.
    """

    lm: Model
    given: Model
    batch: Batch
    corpus: Corpus
    training: Training
    new: bool


def prove(lm: Model, corpus: Corpus, training: Training, new: bool) -> Iterator[Verdict]:
    """Check every equality; the model that is given is not changed.

    Raises:
        ScantlingInputError: settings or data that cannot be trained with at all.
    """
    ground = _ground(lm, corpus, training, new)
    for name, check in CHECKS.items():
        holds, message = check(ground)
        yield Verdict(name, holds, message)


def _ground(lm: Model, corpus: Corpus, training: Training, new: bool) -> Ground:
    card = replace(lm.card, dropout=Dropout())
    parts = assemble(card)
    net = parts.build(device=str(lm.device), dtype="float32", seed=0)
    net.load_state_dict(lm.net.state_dict())
    still = copy.copy(lm)
    still.card, still.parts, still.net = card, parts, net.requires_grad_(True)
    tokens = min(TOKENS, training.tokens or lm.card.context)
    rows = _rows(still, corpus, training, tokens)
    return Ground(still, lm, rows, corpus, training, new)


def _rows(lm: Model, corpus: Corpus, training: Training, tokens: int) -> Batch:
    """A batch, of several documents in a row where rows are packed."""
    objective, mode = settings.objective(lm, training), settings.boundary_of(lm.card, training)
    found = batches(corpus, objective, ROWS, tokens, mode, training.seed)
    tried = [next(found) for _ in range(8)]
    return max(tried, key=lambda batch: batch.documents)


def gradient(lm: Model, micro: Sequence[Inputs], how: How | None = None) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradient of one update over micro-batches."""
    weights = {name: weight for name, weight in lm.net.named_parameters() if name in lm.parts.named_stored}
    recipe = Recipe("sgd", momentum=0.0)
    kept = two_ranks.Kept(groups(lm.parts, weights, recipe), recipe)
    outcome = Stepper(lm, kept, how or How(), None, 0).update(0, micro, 1.0)
    return outcome.loss, kept.kept


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """|a - b| / |b| over all weights together; infinite where a weight has a gradient in one of them only."""
    if one.keys() != other.keys():
        return math.inf
    difference = math.sqrt(sum(float((a - other[name]).double().square().sum()) for name, a in one.items()))
    return difference / max(math.sqrt(sum(float(b.double().square().sum()) for b in other.values())), 1e-300)


def _close(what: str, one: tuple[float, dict[str, Tensor]], other: tuple[float, dict[str, Tensor]]) -> tuple[bool, str]:
    far, loss = apart(one[1], other[1]), abs(one[0] - other[0]) / abs(other[0])
    message = f"{what}: gradients {far:.1e} and losses {loss:.1e} apart, {CLOSE:g} allowed"
    return far <= CLOSE and loss <= CLOSE, message


def accumulation(g: Ground) -> tuple[bool | None, str]:
    """Micro-batches of unequal numbers of judged tokens against one batch of them all."""
    half = max(1, len(g.batch.ids) // 2)
    batch = rearranged.uneven(g.batch)
    whole = gradient(g.lm, [_inputs(g, batch)])
    pieces = gradient(g.lm, [_inputs(g, batch.rows(0, half)), _inputs(g, batch.rows(half, len(batch.ids)))])
    counts = [int((part != IGNORED).sum()) for part in (batch.labels[:half], batch.labels[half:])]
    return _close(f"micro-batches of {counts[0]} and {counts[1]} judged tokens", pieces, whole)


def packed(g: Ground) -> tuple[bool | None, str]:
    """Rows of several documents against the same documents in rows of their own."""
    if settings.boundary_of(g.lm.card, g.training) != "packed":
        return None, f"rows are {settings.boundary_of(g.lm.card, g.training)}, so no two documents share one"
    batch = g.batch if len(rearranged.separate(g.batch).ids) > len(g.batch.ids) else rearranged.halves(g.batch)
    alone = rearranged.separate(batch)
    together, separate = gradient(g.lm, [_inputs(g, batch)]), gradient(g.lm, [_inputs(g, alone)])
    return _close(f"{len(alone.ids)} documents in {len(batch.ids)} rows", together, separate)


def pieces(g: Ground) -> tuple[bool | None, str]:
    """The loss in pieces against torch's own on all logits, with smoothing and z-loss."""
    how = How(settings.how_of(g.training).terms)
    thinned = g.batch.labels.copy()
    thinned[:, ::5] = IGNORED
    micro = [_inputs(g, dataclasses.replace(g.batch, labels=thinned))]
    size = max(1, thinned.size // 3)
    cut = gradient(g.lm, micro, dataclasses.replace(how, rows=size))
    return _close(f"pieces of {size} rows", cut, gradient(g.lm, micro, dataclasses.replace(how, plain=True)))


def resumed(g: Ground) -> tuple[bool | None, str]:
    """A run that stops half-way and goes on from its checkpoint against one that does not, bit by bit."""
    quiet = Evaluation(every=0, tokens=2, samples=0)
    short = {"steps": STEPS, "batch": 1, "accumulation": 2, "tokens": g.batch.ids.shape[1], "save_every": 0}
    plan = replace(g.training, **short, evaluation=quiet, curriculum=[], bad=replace(g.training.bad, spike=None))
    with tempfile.TemporaryDirectory() as folder:
        straight = _run(g, plan, Path(folder) / "straight", None)
        _run(g, plan, Path(folder) / "broken", STEPS // 2)
        went_on = _run(g, plan, Path(folder) / "broken", None)
        ours, theirs = ((Path(folder) / n / f"step-{STEPS}") for n in ("broken", "straight"))
        same = went_on == straight[STEPS // 2 :] and all(
            (ours / name).read_bytes() == (theirs / name).read_bytes()
            for name in ("training/optimizer.safetensors", *(p.name for p in theirs.glob("*.safetensors")))
        )
    compared = "losses, weights and optimizer state are " + ("equal to the bit" if same else "not the same")
    return same, f"{STEPS} updates in {g.training.precision}, stopped after {STEPS // 2}: {compared}"


def _run(g: Ground, plan: Training, out: Path, stop_after: int | None) -> list[tuple[float, float]]:
    """Losses and norms of the updates of a run, of the card with its dropout."""
    seen: list[tuple[float, float]] = []
    stop = Stop()

    class Ear:
        def record(self, record: Any) -> None:
            if record["kind"] == "step":
                seen.append((record["loss"], record["norm"]))
                stop.by = "half" if record["step"] == stop_after else None

        def close(self) -> None:
            return

    trained = copy.copy(g.given)
    trained.net = copy.deepcopy(g.given.net)
    run = begin(trained, g.corpus, plan, out, [Ear()])
    if (found := checkpoints.newest(out)) is not None:
        resume(run, found)
    run.loop(stop)
    return seen


def shift(g: Ground) -> tuple[bool | None, str]:
    """Each label against the token that it should be, and the loss against log-probabilities at those places."""
    labels, judged = g.batch.labels, g.batch.labels != IGNORED
    name = settings.objective_of(g.lm.card, g.training)
    if name == "masked":
        text, what = _unhidden(g).ids, f"{int(judged.sum())} labels are what stood at their places"
        aligned = bool((labels == text)[judged].all()) and bool((g.batch.ids == text)[~judged].all())
    else:
        read = g.batch.ids if g.batch.decoder_ids is None else g.batch.decoder_ids
        # What follows the last token of a document is not among the tokens that are read.
        same = judged[:, :-1] & _goes_on(g.batch)
        aligned = bool((labels[:, :-1] == read[:, 1:])[same].all()) and bool(same.any())
        what = f"{int(same.sum())} labels are the next token"
    batch = _inputs(g, g.batch)
    with torch.no_grad():
        how = How()
        ctx = passes.context(batch, how, training=False)
        ctx.before_scores = False
        logits = g.lm.net(batch.ids, ctx) if batch.source is None else g.lm.net(batch.ids, ctx, batch.source)
        each = logits.float().log_softmax(-1).gather(-1, batch.labels.clamp(min=0)[..., None])[..., 0]
        wanted_loss = float(-each[batch.labels != IGNORED].mean())
    loss, _ = gradient(g.lm, [batch])
    close = abs(loss - wanted_loss) <= CLOSE * abs(wanted_loss)
    wrong = "what stood at their places" if name == "masked" else "the next token"
    said = what if aligned else f"labels are not {wrong}"
    return aligned and close, f"{said}; loss {loss:.4f}, by hand {wanted_loss:.4f}"


def _unhidden(g: Ground) -> Batch:
    """The same rows with the same places chosen, and nothing hidden in them."""
    objective = MaskedLM(hidden=0.0, replaced=0.0, whole_words=g.training.whole_words)
    mode, tokens = settings.boundary_of(g.lm.card, g.training), g.batch.ids.shape[1]
    found = batches(g.corpus, objective, ROWS, tokens, mode, g.training.seed)
    return next(batch for batch in found if batch.cursor["step"] == g.batch.cursor["step"])


def _goes_on(batch: Batch) -> Any:
    """Whether the place behind each but the last is of the same document, (B, T - 1)."""
    if batch.decoder_mask is not None:
        return batch.decoder_mask[:, 1:]
    return (batch.document_ids[:, 1:] == batch.document_ids[:, :-1]) & batch.attention_mask[:, 1:]


def first_loss(g: Ground) -> tuple[bool | None, str]:
    """The loss of new weights against ln V, what a uniform guess costs."""
    uniform = math.log(g.lm.card.vocab_size)
    loss, _ = gradient(g.lm, [_inputs(g, g.batch)])
    message = f"loss {loss:.3f}, ln {g.lm.card.vocab_size} = {uniform:.3f}"
    if not g.new:
        return None, f"{message}; the weights are trained ones"
    return abs(loss - uniform) <= 0.05 * uniform, message


def reaches(g: Ground) -> tuple[bool | None, str]:
    """A gradient for every weight."""
    _, found = gradient(g.lm, [_inputs(g, g.batch)])
    trained = [name for name, _ in g.lm.net.named_parameters() if name in g.lm.parts.named_stored]
    missing = [name for name in trained if name not in found or not bool(found[name].any())]
    if missing:
        return False, f"{len(missing)} of {len(trained)} weights get none, {missing[0]} first"
    return True, f"all {len(trained)} weights"


def ranks(g: Ground) -> tuple[bool | None, str]:
    """Two processes that this one starts, each with its half of the rows, against one."""
    batch = rearranged.uneven(g.batch)
    rows = [_inputs(g, batch.rows(i, i + 1)) for i in range(len(batch.ids) // 2 * 2)]
    found = two_ranks.by_two(g.lm, rows, g.training)
    if isinstance(found, str):
        return False, found
    one = two_ranks.alone(g.lm, rows, g.training)
    holds, message = _close(
        f"rows of {sum(r.judged for r in rows[: len(rows) // 2])} and {sum(r.judged for r in rows[len(rows) // 2 :])} "
        "judged tokens",
        (found.losses[0], found.gradients),
        (one.losses[0], one.gradients),
    )
    far = max(abs(a - b) / abs(b) for a, b in zip(found.losses, one.losses, strict=True))
    updates = f"losses of {len(one.losses)} updates {far:.1e} apart"
    return holds and far <= CLOSE, f"{message}; {updates}"


def _inputs(g: Ground, batch: Batch) -> Inputs:
    return passes.inputs(batch, g.lm.parts, g.lm.device)


CHECKS: dict[str, Callable[[Ground], tuple[bool | None, str]]] = {
    "accumulation == full batch": accumulation,
    "packed == separate": packed,
    "loss in pieces == plain loss": pieces,
    "resumed == uninterrupted": resumed,
    "inputs and targets are one apart": shift,
    "first loss is ln V": first_loss,
    "gradient reaches every weight": reaches,
    "2 ranks == 1 rank": ranks,
}
