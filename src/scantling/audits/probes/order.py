"""Order: does the order of tokens reach the output, and only through what the model has for it?"""

from __future__ import annotations

import torch
from torch import Tensor

from scantling.audits import draw
from scantling.audits.ask import Measure, Question, Shown, ask, listed, not_applicable
from scantling.audits.draw import Effort
from scantling.audits.finding import Finding, Verdict
from scantling.audits.planted_subject import planted
from scantling.audits.protocol import Subject
from scantling.audits.registry import Plant, Probe

NAME = "order"
IN_ATTENTION = ("none", "rope", "alibi", "relative")
"""Positions that act, if at all, where tokens read each other."""
LOST = "the order of tokens does not reach the output: a reordered row gives the reordered logits"


def probe(subject: Subject, effort: Effort) -> list[Finding]:
    """A row and the same row reordered. Without positions and without a causal mask the logits are reordered alike
    (permutation equivariance); with either they are not."""
    facts = subject.facts
    tokens = min(draw.length(subject, effort), 12)
    if not facts.per_token:
        return [not_applicable(NAME, "the head gives one answer per row")]
    question = Question(NAME, "the whole row reordered", _reordered(effort.seed), "", "")
    found = ask(subject, question, tokens)
    if found.verdict is Verdict.COULD_NOT_RUN or "crash" in found.data:
        return [found]
    alike = found.verdict in (Verdict.CLEAN, Verdict.ROUNDING)
    shown = {"ids": listed(draw.ids(facts, 1, 4, effort.seed))}
    if facts.position == "none" and facts.family == "encoder":
        if alike:
            text = "without positions the logits of a reordered row are reordered alike, as they must be"
            return [Finding(NAME, found.verdict, text, found.size)]
        text = "it says that it has no positions, and the order of tokens moves their logits"
        return [Finding(NAME, Verdict.DEFECT, text, found.size, smallest=found.smallest or shown)]
    if not alike:
        via = "its causal mask" if facts.position == "none" else "its positions or its mask"
        return [Finding(NAME, Verdict.CLEAN, f"the order of tokens reaches the output, through {via}", found.size)]
    if facts.position in IN_ATTENTION and _alone(subject, tokens, effort.seed):
        text = "no token reads another and no position is added: a row is a bag of words"
        return [Finding(NAME, Verdict.BY_DESIGN, text, found.size)]
    return [Finding(NAME, Verdict.DEFECT, LOST, found.size, "the whole row reordered", smallest=shown)]


def _reordered(seed: int) -> Measure:
    def measure(subject: Subject, tokens: int) -> tuple[Tensor, Tensor, Shown]:
        ids = draw.ids(subject.facts, 1, tokens, seed)
        order = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))
        if torch.equal(order, torch.arange(tokens)):
            order = order.flip(0)
        a = subject.run(draw.feed(subject, ids))[:, order]
        b = subject.run(draw.feed(subject, ids[:, order]))
        return a, b, {"ids": listed(ids), "reordered": listed(ids[:, order])}

    return measure


def _alone(subject: Subject, tokens: int, seed: int) -> bool:
    """Whether no token's logits depend on another token."""
    ids = draw.ids(subject.facts, 1, tokens, seed)
    with torch.no_grad():
        a = subject.run(draw.feed(subject, ids))[:, 1:]
        b = subject.run(draw.feed(subject, draw.replaced(subject.facts, ids, 0)))[:, 1:]
    return torch.equal(a, b)


PROBE = Probe(
    NAME,
    "whether the order of tokens reaches the output, and only where the model has something for it",
    probe,
    (
        Plant("no mask and no positions", lambda: planted("no mask", position="none").without(position=None)),
        Plant("an encoder whose positions are not used", lambda: _encoder("positions ignored", position="learned")),
        Plant("rotary angles are all zero, no mask", lambda: planted("positions ignored", "no mask")),
        Plant("says it has no positions and has", lambda: _encoder(position="learned").without(position="none")),
        Plant("sound, rotary", planted, False, Verdict.CLEAN),
        Plant("an encoder without positions", lambda: _encoder(position="none"), False),
        Plant("a decoder without positions", lambda: planted(position="none"), False, Verdict.CLEAN),
        Plant("an encoder with positions", lambda: _encoder(position="sinusoidal"), False, Verdict.CLEAN),
        Plant("a bag of words", lambda: planted(position="none", n_layers=0), False, Verdict.BY_DESIGN),
    ),
)


def _encoder(*faults: str, position: str = "rope") -> Subject:
    return planted(*faults, family="encoder", position=position)
