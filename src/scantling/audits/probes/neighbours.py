"""Batch neighbours: does a row depend on the other rows of its batch?"""

from __future__ import annotations

import torch
from torch import Tensor

from scantling.audits import draw
from scantling.audits.ask import Measure, Question, Shown, ask, listed
from scantling.audits.draw import Effort
from scantling.audits.finding import Finding, Verdict
from scantling.audits.planted_subject import planted
from scantling.audits.protocol import Abilities, Feed, Subject
from scantling.audits.registry import Plant, Probe

NAME = "neighbours"
MEANING = "a row depends on the other rows of its batch"
GOOD = "a row does not depend on the other rows of its batch"
ROWS = 5


def probe(subject: Subject, effort: Effort) -> list[Finding]:
    """A row alone and in a batch; the same row beside other rows; the rows in another order."""
    tokens = draw.length(subject, effort)
    return [
        ask(subject, Question(NAME, where, measure(effort.seed), MEANING, GOOD, place=_place), tokens)
        for where, measure in (("alone and in a batch", _alone), ("beside other rows", _beside), ("reordered", _turned))
    ]


def _place(at: tuple[int, ...]) -> str:
    return f"row {at[0]}, token {at[1]}"


def _feed(subject: Subject, tokens: int, seed: int) -> Feed:
    source = draw.ids(subject.facts, ROWS, 7, seed + 5) if subject.facts.family == "encoder-decoder" else None
    return draw.feed(subject, draw.ids(subject.facts, ROWS, tokens, seed), source=source)


def rows(feed: Feed, chosen: list[int]) -> Feed:
    """The feed of some rows."""
    source = None if feed.source is None else feed.source[chosen]
    return Feed(feed.ids[chosen], source=source)


def _alone(seed: int) -> Measure:
    def measure(subject: Subject, tokens: int) -> tuple[Tensor, Tensor, Shown]:
        feed = _feed(subject, tokens, seed)
        batch = subject.run(feed)
        alone = torch.cat([subject.run(rows(feed, [i])) for i in range(ROWS)])
        return alone, batch, {"ids": listed(feed.ids)}

    return measure


def _beside(seed: int) -> Measure:
    def measure(subject: Subject, tokens: int) -> tuple[Tensor, Tensor, Shown]:
        feed = _feed(subject, tokens, seed)
        ids = feed.ids.clone()
        ids[1:] = draw.other(subject.facts, ids[1:])
        other = Feed(ids, source=feed.source)
        return subject.run(feed)[:1], subject.run(other)[:1], {"ids": listed(feed.ids), "instead": listed(ids)}

    return measure


def _turned(seed: int) -> Measure:
    def measure(subject: Subject, tokens: int) -> tuple[Tensor, Tensor, Shown]:
        feed = _feed(subject, tokens, seed)
        order = list(range(ROWS))[::-1]
        return subject.run(feed), subject.run(rows(feed, order))[order], {"ids": listed(feed.ids)}

    return measure


def _largest(dtype: str = "float32") -> Subject:
    """The largest logit of the whole batch is added and taken away."""
    sound = planted(dtype=dtype)

    def run(feed: Feed) -> Tensor:
        out = sound.run(feed)
        shift = out.max()
        return (out - shift) + shift

    return Subject("a shift that cancels", run, sound.facts, Abilities(cast=_largest))


PROBE = Probe(
    NAME,
    "whether a row depends on the other rows of its batch, or on their order",
    probe,
    (
        Plant("activations are normalised over the batch", lambda: planted("batch norm")),
        Plant("a reshape mixes rows", lambda: planted("rows mixed")),
        Plant("a hundredth of the next row is added", lambda: planted("next row added")),
        Plant("experts take a number of tokens over the whole batch", lambda: planted("capacity")),
        Plant("sound", planted, False),
        Plant("experts", lambda: planted(experts=3), False),
        Plant("a shift that cancels", _largest, False, Verdict.ROUNDING),
        Plant("an encoder-decoder", lambda: planted(family="encoder-decoder"), False),
    ),
)
