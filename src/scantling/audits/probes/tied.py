"""Tied weights: is the head's matrix the embedding table where it says so, and does it stay so?"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import nn

from scantling.audits.ask import could_not, not_applicable
from scantling.audits.draw import Effort
from scantling.audits.finding import Finding, Verdict
from scantling.audits.planted import Tiny
from scantling.audits.planted_subject import planted, subject_of
from scantling.audits.protocol import Subject
from scantling.audits.registry import Plant, Probe
from scantling.audits.wide import cast

NAME = "tied"


def probe(subject: Subject, _: Effort) -> list[Finding]:
    """As it stands, after a cast, after saving and loading, and as its config alone builds it."""
    tied = subject.facts.tied
    if tied is None:
        return [not_applicable(NAME, "it does not say whether the head is the embedding table")]
    if subject.can.tables is None:
        return [could_not(NAME, "its embedding and its head's matrix cannot be reached, or have different shapes")]
    found = [_judged(subject, tied, "as it stands")]
    other = "bfloat16" if subject.facts.dtype != "bfloat16" else "float32"
    turned = cast(subject, other)
    if turned is not None and turned is not subject:
        found.append(_judged(turned, tied, f"after a cast to {other}"))
    if subject.can.reload is not None:
        found.append(_judged(subject.can.reload(lambda _: None), tied, "saved and loaded"))
    if subject.can.rebuild is not None:
        found.append(_judged(subject.can.rebuild(), _together(subject), "built from its config alone"))
    return found


def _together(subject: Subject) -> bool:
    assert subject.can.tables is not None
    table, head = subject.can.tables()
    return table.data_ptr() == head.data_ptr()


def _judged(subject: Subject, tied: bool, where: str) -> Finding:
    if subject.can.tables is None:
        return could_not(NAME, "its tables cannot be reached", where)
    table, head = subject.can.tables()
    together = table.data_ptr() == head.data_ptr()
    if together == tied:
        text = "the head is the embedding table" if tied else "the head has a matrix of its own"
        return Finding(NAME, Verdict.CLEAN, f"{text}, as it says", 0.0, where, "values")
    if together:
        text = f"it says untied, and the head is the embedding table: {table.numel():,} parameters are missing"
        return Finding(NAME, Verdict.DEFECT, text, float(table.numel()), where, "values")
    with torch.no_grad():
        apart = int((table.float() != head.float()).sum())
    if apart:
        text = f"it says tied, and the head has a matrix of its own: {apart:,} of {table.numel():,} values differ"
    else:
        text = "it says tied, and the head is a copy of the table: the first step of training parts them"
    return Finding(NAME, Verdict.DEFECT, text, float(apart), where, "values")


def _copied(change: float = 0.0) -> Subject:
    """Tied in words only."""
    subject = planted(tied=True, name="a copied head")
    net = subject.can.module
    assert isinstance(net, Tiny)
    net.head.weight = nn.Parameter(net.embed.weight.detach() * (1 + change))
    return subject


def _parted(when: str) -> Subject:
    """The head becomes a copy when the model is cast or loaded."""
    subject = planted(tied=True, name=f"parted when {when}")
    net = subject.can.module
    assert isinstance(net, Tiny)

    def again(_: object) -> Subject:
        twin = copy.deepcopy(net)
        twin.head.weight = nn.Parameter(twin.embed.weight.detach().clone())
        return subject_of(twin, subject.name)

    named = {"cast": {"cast": again}, "loaded": {"reload": again}}[when]
    return replace(subject, can=replace(subject.can, **named))  # type: ignore[arg-type]


def _rebuilt(tied: bool, again: bool) -> Subject:
    subject = planted(tied=tied, name="as its config builds it")
    return replace(subject, can=replace(subject.can, rebuild=lambda: planted(tied=again)))


PROBE = Probe(
    NAME,
    "whether the head's matrix is the embedding table exactly where it says so, after casts and loading too",
    probe,
    (
        Plant("a copy of the table", _copied),
        Plant("another matrix", lambda: _copied(0.01)),
        Plant("says untied and is tied", lambda: planted(tied=True).without(tied=False)),
        Plant("parted by a cast", lambda: _parted("cast")),
        Plant("parted by loading", lambda: _parted("loaded")),
        Plant("its config builds a tied one", lambda: _rebuilt(False, True)),
        Plant("tied", lambda: planted(tied=True), False, Verdict.CLEAN),
        Plant("untied", planted, False, Verdict.CLEAN),
        Plant("its config builds it alike", lambda: _rebuilt(True, True), False, Verdict.CLEAN),
        Plant("says nothing", lambda: planted().without(tied=None), False, Verdict.NOT_APPLICABLE),
    ),
)
