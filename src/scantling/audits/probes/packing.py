"""Packing: do the documents of one row read each other?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from scantling.audits import draw
from scantling.audits.ask import Measure, Question, Shown, ask, could_not, listed, not_applicable
from scantling.audits.draw import Effort
from scantling.audits.finding import Finding, Verdict
from scantling.audits.planted import Tiny
from scantling.audits.planted_subject import own_loss, planted
from scantling.audits.protocol import Feed, Run, Subject
from scantling.audits.registry import Plant, Probe

NAME = "packing"
GOOD = "documents of a packed row do not read each other"


def probe(subject: Subject, effort: Effort) -> list[Finding]:
    """Documents packed into one row against each alone; and another first document, which must not move the second.

    Every way in which the subject can be handed packed rows is asked.
    """
    if not subject.facts.per_token:
        return [not_applicable(NAME, "the head gives one answer per row")]
    if not subject.can.packed:
        return [could_not(NAME, "it has no way to be handed packed rows")]
    tokens = draw.length(subject, effort)
    found = []
    for name in subject.can.packed:
        pick = _picker(name)
        other = Question(
            NAME, name, _other(pick, effort.seed), "another first document moves the second: they read each other", GOOD
        )
        found.append(ask(subject, other, tokens, fewest=4))
        alone = Question(
            NAME, name, _alone(pick, effort.seed), "a document is not in a packed row what it is alone", GOOD
        )
        if found[-1].verdict is not Verdict.DEFECT:
            found.append(ask(subject, alone, tokens, fewest=4))
    if subject.can.packed_loss is not None and subject.can.loss is not None:
        text = "the loss of a packed row is not that of its documents: a token is judged across a boundary"
        found.append(ask(subject, Question(NAME, "loss", _losses(effort.seed), text, GOOD), tokens, fewest=4))
    return found


def _picker(name: str) -> Callable[[Subject], Run]:
    return lambda subject: subject.can.packed[name]


def lengths(tokens: int) -> list[int]:
    """Three documents, or two where there are few tokens."""
    if tokens < 9:
        return [tokens - tokens // 2, tokens // 2]
    third = tokens // 3
    return [tokens - 2 * third + 1, third, third - 1]


def packed(subject: Subject, tokens: int, seed: int, instead: bool = False) -> Feed:
    """A row of several documents; with `instead`, the first has other tokens."""
    sizes = lengths(tokens)
    ids = draw.ids(subject.facts, 1, tokens, seed)
    if instead:
        ids = draw.replaced(subject.facts, ids, slice(0, sizes[0]))
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(sizes)])[None]
    positions = torch.cat([torch.arange(n) for n in sizes])[None]
    return draw.feed(subject, ids, documents=documents, positions=positions)


def _other(pick: Callable[[Subject], Run], seed: int) -> Measure:
    def measure(subject: Subject, tokens: int) -> tuple[Tensor, Tensor, Shown]:
        first, second = packed(subject, tokens, seed), packed(subject, tokens, seed, instead=True)
        start, run = lengths(tokens)[0], pick(subject)
        shown = {"ids": listed(first.ids), "instead": listed(second.ids), "document_ids": listed(_documents(first))}
        return run(first)[:, start:], run(second)[:, start:], shown

    return measure


def _alone(pick: Callable[[Subject], Run], seed: int) -> Measure:
    def measure(subject: Subject, tokens: int) -> tuple[Tensor, Tensor, Shown]:
        feed = packed(subject, tokens, seed)
        pieces = torch.split(feed.ids, lengths(tokens), 1)
        alone = torch.cat([subject.run(draw.feed(subject, piece, source=feed.source)) for piece in pieces], 1)
        shown = {"ids": listed(feed.ids), "document_ids": listed(_documents(feed))}
        return alone, pick(subject)(feed), shown

    return measure


def _losses(seed: int) -> Measure:
    """The loss of a packed row against the mean of its documents' own, weighted by what each scores."""

    def measure(subject: Subject, tokens: int) -> tuple[Tensor, Tensor, Shown]:
        assert subject.can.packed_loss is not None
        assert subject.can.loss is not None
        feed = packed(subject, tokens, seed)
        pieces = torch.split(feed.ids, lengths(tokens), 1)
        unscored = int(subject.facts.family == "decoder")
        scored = [piece.shape[1] - unscored for piece in pieces]
        alone = [subject.can.loss(draw.feed(subject, p), p, None) * n for p, n in zip(pieces, scored, strict=True) if n]
        whole = subject.can.packed_loss(feed, feed.ids, None)
        shown = {"ids": listed(feed.ids), "document_ids": listed(_documents(feed)), "scored targets": sum(scored)}
        return (torch.stack(alone).sum() / sum(scored)).reshape(1), whole.reshape(1), shown

    return measure


def _crossing() -> Subject:
    """Sound but for its loss."""
    subject = planted(name="a loss across documents")
    net = subject.can.module
    assert isinstance(net, Tiny)
    return replace(subject, can=replace(subject.can, packed_loss=own_loss(net, crosses=True), cast=None))


def _documents(feed: Feed) -> Tensor:
    assert feed.documents is not None
    return feed.documents


PROBE = Probe(
    NAME,
    "whether documents packed into one row read each other, in every way of packing",
    probe,
    (
        Plant("documents are not kept apart", lambda: planted("packing ignored")),
        Plant("they are not in one block", lambda: planted("packing ignored in the last block")),
        Plant("a document's first token reads the one before", lambda: planted("packing off by one")),
        Plant("positions go on", lambda: planted("packed positions go on", position="learned")),
        Plant("an encoder's documents are not kept apart", lambda: planted("packing ignored", family="encoder")),
        Plant("a token is judged on the next document's first", _crossing),
        Plant("sound, rotary", planted, False),
        Plant("rotary positions that go on", lambda: planted("packed positions go on"), False),
        Plant("sound, learned positions", lambda: planted(position="learned"), False),
        Plant("sound, with a window", lambda: planted(window=4), False),
    ),
)
