"""Chunked prefill: a prompt in several pieces against one pass."""

from __future__ import annotations

from scantling.audits import draw
from scantling.audits.ask import Question, ask, could_not
from scantling.audits.draw import Effort
from scantling.audits.finding import Finding, Verdict
from scantling.audits.planted_subject import planted
from scantling.audits.probes.cache import pieces, unasked
from scantling.audits.protocol import Subject
from scantling.audits.registry import Plant, Probe

NAME = "chunks"
GOOD = "a prompt in pieces gives what it gives in one"
MEANING = "a prompt in pieces gives other logits than in one"


def probe(subject: Subject, effort: Effort) -> list[Finding]:
    """Two equal pieces, and four of unequal lengths."""
    if no := unasked(NAME, subject):
        return no
    if not subject.can.cached:
        return [could_not(NAME, "its cache takes a prompt in one piece")]
    tokens = draw.length(subject, effort)
    questions = [
        Question(NAME, f"{name}, {where}", pieces(name, cut, effort.seed), MEANING, GOOD)
        for name in subject.can.cached
        for where, cut in (("two pieces", _halves), ("four pieces", _uneven))
    ]
    return [ask(subject, question, tokens, fewest=4) for question in questions]


def _halves(tokens: int) -> list[int]:
    return [tokens - tokens // 2, tokens // 2]


def _uneven(tokens: int) -> list[int]:
    """Four pieces; where there are few tokens, fewer."""
    third = max(1, tokens // 3)
    sizes = [third, max(0, tokens - third - max(1, tokens // 6) - 2), max(1, tokens // 6), 2]
    sizes = [n for n in sizes if n > 0]
    return sizes if sum(sizes) == tokens else _halves(tokens)


PROBE = Probe(
    NAME,
    "whether a prompt in pieces gives what it gives in one",
    probe,
    (
        Plant("tokens of a piece read each other both ways", lambda: planted("piece without a mask")),
        Plant("a piece does not read what is cached", lambda: planted("piece alone")),
        Plant("angles start anew with each piece", lambda: planted("angles start anew with a cache")),
        Plant("the window is one too wide in the cache", lambda: planted("window plus one with a cache", window=4)),
        Plant("the mask is aligned at the first key", lambda: planted("mask aligned at the first key")),
        Plant("sound", planted, False),
        Plant("sound, with a window", lambda: planted(window=4), False),
        Plant("sound, in bfloat16", lambda: planted(dtype="bfloat16"), False, Verdict.ROUNDING),
        Plant("sound, ALiBi", lambda: planted(position="alibi"), False),
    ),
)
