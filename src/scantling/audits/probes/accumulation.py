"""Gradient accumulation: is a step in micro-batches the step of the whole batch?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from scantling.audits import draw
from scantling.audits.ask import Question, Shown, ask, could_not, listed, not_applicable
from scantling.audits.draw import Effort
from scantling.audits.finding import Finding
from scantling.audits.planted_subject import planted
from scantling.audits.protocol import Feed, Loss, Subject
from scantling.audits.registry import Plant, Probe

NAME = "accumulation"
SCORED = (2, 9)
MEANING = "a loss over rows of 2 and 9 scored tokens is not their mean per token: short rows weigh too much"
COUNTED = "micro-batches that are told the step's number of tokens do not add up to the whole batch"
GOOD = "the loss is a mean over tokens, however the rows are grouped"


def probe(subject: Subject, effort: Effort) -> list[Finding]:
    """Two rows with 2 and 9 scored tokens: together, each alone and weighted by its tokens, and each alone with the
    number of tokens of both, for loss and gradients."""
    if not subject.facts.per_token:
        return [not_applicable(NAME, "the head gives one answer per row")]
    if subject.can.loss is None:
        return [could_not(NAME, "it has no loss of its own")]
    tokens = draw.length(subject, effort, 11)
    if tokens < 10:
        return [could_not(NAME, "its rows are too short for 9 scored tokens")]
    found = [ask(subject, Question(NAME, "one batch", _weighted(effort.seed), MEANING, GOOD), tokens, fewest=10)]
    if not subject.can.counts_items:
        return [*found, could_not(NAME, "its loss takes no number of tokens", "micro-batches")]
    found.append(ask(subject, Question(NAME, "micro-batches", _counted(effort.seed), COUNTED, GOOD), tokens, fewest=10))
    if subject.can.module is not None:
        where = "gradients of micro-batches"
        found.append(ask(subject, Question(NAME, where, _gradients(effort.seed), COUNTED, GOOD), tokens, fewest=10))
    return found


def _rows(subject: Subject, tokens: int, seed: int) -> tuple[Feed, Tensor]:
    """Two rows, and labels of which the last 2 and the last 9 are scored."""
    ids = draw.ids(subject.facts, 2, tokens, seed)
    labels = torch.full_like(ids, -100)
    for row, scored in enumerate(SCORED):
        labels[row, tokens - scored :] = ids[row, tokens - scored :]
    feed = draw.feed(subject, ids)
    return feed, labels.to(subject.device)


def _one(feed: Feed, row: int) -> Feed:
    source = None if feed.source is None else feed.source[row : row + 1]
    return Feed(feed.ids[row : row + 1], source=source)


def _loss(subject: Subject) -> Loss:
    assert subject.can.loss is not None
    return subject.can.loss


def _weighted(seed: int) -> Callable[[Subject, int], tuple[Tensor, Tensor, Shown]]:
    def measure(subject: Subject, tokens: int) -> tuple[Tensor, Tensor, Shown]:
        feed, labels = _rows(subject, tokens, seed)
        loss = _loss(subject)
        apart = [loss(_one(feed, i), labels[i : i + 1], None) * SCORED[i] for i in range(2)]
        wanted = (apart[0] + apart[1]) / sum(SCORED)
        shown = {"ids": listed(feed.ids), "labels": listed(labels)}
        return wanted.reshape(1), loss(feed, labels, None).reshape(1), shown

    return measure


def _counted(seed: int) -> Callable[[Subject, int], tuple[Tensor, Tensor, Shown]]:
    def measure(subject: Subject, tokens: int) -> tuple[Tensor, Tensor, Shown]:
        feed, labels = _rows(subject, tokens, seed)
        loss = _loss(subject)
        parts = [loss(_one(feed, i), labels[i : i + 1], sum(SCORED)) for i in range(2)]
        shown = {"ids": listed(feed.ids), "labels": listed(labels), "tokens of the step": sum(SCORED)}
        return loss(feed, labels, None).reshape(1), (parts[0] + parts[1]).reshape(1), shown

    return measure


def _gradients(seed: int) -> Callable[[Subject, int], tuple[Tensor, Tensor, Shown]]:
    def measure(subject: Subject, tokens: int) -> tuple[Tensor, Tensor, Shown]:
        feed, labels = _rows(subject, tokens, seed)
        loss, module = _loss(subject), subject.can.module
        assert module is not None
        weights = [p for p in module.parameters() if p.is_floating_point()]
        before = [p.requires_grad for p in weights]
        try:
            for p in weights:
                p.requires_grad_(True)
            with torch.enable_grad():
                whole = _flat(loss(feed, labels, None), weights)
                parts = [_flat(loss(_one(feed, i), labels[i : i + 1], sum(SCORED)), weights) for i in range(2)]
        finally:
            for p, was in zip(weights, before, strict=True):
                p.requires_grad_(was)
        return whole, parts[0] + parts[1], {"ids": listed(feed.ids), "labels": listed(labels)}

    return measure


def _flat(loss: Tensor, weights: Sequence[Tensor]) -> Tensor:
    if not loss.requires_grad:
        raise NotImplementedError("its loss takes no gradient")
    grads = torch.autograd.grad(loss, weights, allow_unused=True)
    return torch.cat([g.flatten() for g in grads if g is not None])


def lossy(how: str) -> Subject:
    """A small model whose loss is normalised in some way."""
    subject = planted(name=f"loss: {how}")

    def loss(feed: Feed, labels: Tensor, items: int | None = None) -> Tensor:
        logits, wanted = subject.run(feed)[:, :-1], labels[:, 1:]
        each = F.cross_entropy(logits.transpose(1, 2), wanted, reduction="none")
        scored = (wanted != -100).sum(-1)
        if how == "mean of rows":
            return (each.sum(-1) / scored).mean() / (1 if items is None else 2)
        if how == "over all places":
            return each.mean()
        if how == "count not heeded":
            return each.sum() / scored.sum()
        if how == "count of rows":
            return each.sum() / (scored.sum() if items is None else 2 * len(feed.ids) * scored.sum())
        return each.sum() / (scored.sum() if items is None else items)

    return replace(subject, can=replace(subject.can, loss=loss, cast=None))


PROBE = Probe(
    NAME,
    "whether a step in micro-batches is the step of the whole batch",
    probe,
    (
        Plant("a mean of the rows' means", lambda: lossy("mean of rows")),
        Plant("unscored places are in the denominator", lambda: lossy("over all places")),
        Plant("the step's number of tokens is not heeded", lambda: lossy("count not heeded")),
        Plant("divided by rows, not tokens", lambda: lossy("count of rows")),
        Plant("a denominator larger than the micro-batch", lambda: lossy("right"), False),
        Plant("sound", planted, False),
        Plant("no number of tokens", lambda: replace(planted(), can=replace(planted().can, counts_items=False)), False),
    ),
)
