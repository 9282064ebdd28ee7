"""Rotary positions: do scores depend on the distance of query and key alone?"""

from __future__ import annotations

import torch
from torch import Tensor

from scantling.audits import draw
from scantling.audits.ask import Measure, Question, Shown, ask, could_not, listed, not_applicable
from scantling.audits.draw import Effort
from scantling.audits.finding import Finding, Verdict
from scantling.audits.planted_subject import planted
from scantling.audits.protocol import Subject
from scantling.audits.registry import Plant, Probe

NAME = "rotation"
GOOD = "moving every position by as much moves nothing: scores depend on distances (they are Toeplitz)"
MEANING = "moving every position by as much moves the logits: scores are not a function of the distance (not Toeplitz)"


def probe(subject: Subject, effort: Effort) -> list[Finding]:
    """A row at positions 0, 1, ... and the same at positions moved by 1 and by 9."""
    position = subject.facts.position
    if position not in ("rope", None):
        return [not_applicable(NAME, f"its positions are {position}, not rotary")]
    if "positions" not in subject.can.takes:
        return [could_not(NAME, "it takes no positions")]
    tokens = draw.length(subject, effort)
    if subject.facts.context is not None:
        tokens = min(tokens, subject.facts.context - 9)
    found = [ask(subject, _question(by, effort.seed), tokens) for by in (1, 9)]
    if position is None and any(f.verdict is Verdict.DEFECT for f in found):
        text = "moving positions moves the logits; it does not say whether its positions are rotary or absolute"
        return [not_applicable(NAME, text)]
    return found


def _question(by: int, seed: int) -> Question:
    where = f"moved by {by}"
    return Question(NAME, where, _moved(by, seed), MEANING, GOOD, total=lambda n: n + by, moved=True)


def _moved(by: int, seed: int) -> Measure:
    def measure(subject: Subject, tokens: int) -> tuple[Tensor, Tensor, Shown]:
        ids = draw.ids(subject.facts, 1, tokens, seed)
        at = torch.arange(tokens)[None]
        a = subject.run(draw.feed(subject, ids, positions=at))
        b = subject.run(draw.feed(subject, ids, positions=at + by))
        return a, b, {"ids": listed(ids), "position_ids": listed(at + by)}

    return measure


PROBE = Probe(
    NAME,
    "whether rotary scores depend on distances alone",
    probe,
    (
        Plant("angles for neighbours, halves turned", lambda: planted("angle pairs mixed")),
        Plant("keys are not turned", lambda: planted("only queries turned")),
        Plant("queries are turned faster than keys", lambda: planted("queries turned faster")),
        Plant("positions are rounded to eights", lambda: planted("positions eight apart")),
        Plant("sound", planted, False),
        Plant("sound, in bfloat16", lambda: planted(dtype="bfloat16"), False, Verdict.ROUNDING),
        Plant("learned positions", lambda: planted(position="learned"), False, Verdict.NOT_APPLICABLE),
        Plant(
            "learned positions that it does not name", lambda: planted(position="learned").without(position=None), False
        ),
    ),
)
