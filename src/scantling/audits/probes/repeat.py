"""Repetition: does evaluation give the same logits again, whatever ran before?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from scantling.audits import draw
from scantling.audits.ask import listed
from scantling.audits.draw import Effort
from scantling.audits.finding import Finding, Verdict
from scantling.audits.judge import unit_of, worst
from scantling.audits.planted_subject import planted
from scantling.audits.protocol import Feed, Subject
from scantling.audits.registry import Plant, Probe

NAME = "repeat"
LAST_PLACES = 8.0
"""Roundings by which sums in a random order (atomics on a GPU) may differ from one run to the next."""


def probe(subject: Subject, effort: Effort) -> list[Finding]:
    """The same row twice; after another, longer row; after a pass in training mode; and whether training drops."""
    tokens = draw.length(subject, effort)
    feed = draw.feed(subject, draw.ids(subject.facts, 2, tokens, effort.seed))
    with torch.no_grad():
        first = subject.run(feed)
        found = [
            _same(
                first, subject.run(feed), "twice", "evaluation does not repeat: something random acts in it", feed.ids
            )
        ]
        if found[0].verdict is Verdict.DEFECT:
            return found
        for where, meaning, between in _between(subject, effort):
            between()
            again = subject.run(feed)
            found.append(_same(first, again, where, meaning, feed.ids))
            # Each circumstance is judged against what came just before it.
            first = again
        found += _dropped(subject, feed, first)
    return found


def _between(subject: Subject, effort: Effort) -> list[tuple[str, str, Callable[[], object]]]:
    # Longer than any row that another probe has run.
    longer = draw.length(subject, effort, effort.longest + 9)
    row = draw.feed(subject, draw.ids(subject.facts, 1, longer, effort.seed + 1))
    ways: list[tuple[str, str, Callable[[], object]]] = [
        (
            f"after a row of {longer}",
            "it remembers an earlier row",
            lambda: subject.run(row),
        )
    ]
    module = subject.can.module
    if module is not None:

        def training() -> None:
            module.train()
            module.eval()

        ways.append(("after train() and eval()", "a part of it is not told of evaluation", training))
    if "in training" in subject.can.modes:
        text = "a pass in training changes evaluation after it"
        ways.append(("after a pass in training", text, lambda: subject.can.modes["in training"](row)))
    return ways


def _same(first: Tensor, again: Tensor, where: str, meaning: str, ids: Tensor) -> Finding:
    apart, spread = worst(first, again)
    good = "evaluation gives the same logits again"
    if apart == 0:
        return Finding(NAME, Verdict.CLEAN, good, 0.0, where)
    limit = LAST_PLACES * unit_of(str(first.dtype).removeprefix("torch.")) * float(first.abs().max())
    if apart <= limit:
        return Finding(
            NAME, Verdict.ROUNDING, "it repeats but for rounding: sums run in a random order", apart / spread, where
        )
    return Finding(NAME, Verdict.DEFECT, meaning, apart / spread, where, smallest={"ids": listed(ids[:1])})


def _dropped(subject: Subject, feed: Feed, first: Tensor) -> list[Finding]:
    """Where it says that training drops: whether it does."""
    if not subject.facts.dropout or "in training" not in subject.can.modes:
        return []
    if torch.equal(subject.can.modes["in training"](feed), first):
        return [
            Finding(
                NAME, Verdict.DEFECT, "it says that it drops in training, and nothing is dropped", where="in training"
            )
        ]
    return [Finding(NAME, Verdict.CLEAN, "training drops, evaluation does not", where="in training")]


def _never() -> Subject:
    """Dropout in words only."""
    return planted(name="no dropout").without(dropout=True)


def _jitter() -> Subject:
    """Sums in an order that changes from run to run, as atomics give."""
    sound = planted(name="a changing order of summation")

    def run(feed: Feed) -> Tensor:
        out = sound.run(feed)
        order = torch.randperm(7)
        parts = torch.stack([out * 2.0**-k for k in range(7)])
        whole = parts[order[0]]
        for k in order[1:]:
            whole = whole + parts[k]
        return whole / 1.984375

    return replace(sound, run=run, can=replace(sound.can, modes={}, module=None))


PROBE = Probe(
    NAME,
    "whether evaluation repeats: twice, after other rows, after training; whether training drops",
    probe,
    (
        Plant("dropout in evaluation", lambda: planted("dropout always", dropout=0.1)),
        Plant("a block is not told of evaluation", lambda: planted("block kept in training", dropout=0.1)),
        Plant("a random number is added", lambda: planted("noise")),
        Plant("it remembers the longest row", lambda: planted("remembers the longest row")),
        Plant("dropout that never drops", _never),
        Plant("sound", planted, False, Verdict.CLEAN),
        Plant("dropout in training", lambda: planted(dropout=0.3), False, Verdict.CLEAN),
        Plant("a changing order of summation", _jitter, False, Verdict.ROUNDING),
    ),
)
