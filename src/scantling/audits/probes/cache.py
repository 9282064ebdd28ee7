"""Cached decoding and chunked prefill: do pieces over a cache give what one pass gives?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from scantling.audits import draw
from scantling.audits.ask import Measure, Question, Shown, ask, could_not, listed, not_applicable
from scantling.audits.draw import Effort
from scantling.audits.finding import Finding, Verdict
from scantling.audits.planted_subject import planted
from scantling.audits.protocol import Subject
from scantling.audits.registry import Plant, Probe

NAME = "cache"
GOOD = "decoding over a cache gives what one pass gives"
MEANING = "decoding over a cache gives other logits than one pass"
PADS = 4


def probe(subject: Subject, effort: Effort) -> list[Finding]:
    """A prompt, then one token at a time; from the first token on; and behind padding on the left."""
    if no := unasked(NAME, subject):
        return no
    tokens = draw.length(subject, effort)
    found = []
    for name in subject.can.decoded:
        for where, measure in (
            (f"{name}, a prompt and single tokens", pieces(name, _prompt, effort.seed)),
            (f"{name}, single tokens from the first", pieces(name, _singles, effort.seed)),
        ):
            found.append(ask(subject, Question(NAME, where, measure, MEANING, GOOD, place=_place), tokens))
        if {"mask", "positions"} <= subject.can.takes and subject.facts.family == "decoder":
            where = f"{name}, behind padding on the left"
            most = None if subject.facts.context is None else subject.facts.context - PADS
            short = tokens if most is None else min(tokens, most)
            question = Question(NAME, where, _padded(name, effort.seed), MEANING, GOOD, total=lambda n: n + PADS)
            found.append(ask(subject, question, short, fewest=3))
    return found


def unasked(probe_name: str, subject: Subject) -> list[Finding]:
    """Why a question about caches cannot be asked; empty where it can."""
    if subject.facts.family == "encoder" or not subject.facts.per_token:
        return [not_applicable(probe_name, "an encoder reads both ways and keeps no cache")]
    if not subject.can.decoded:
        return [could_not(probe_name, "it has no cache, or none that can be reached")]
    return []


def _place(at: tuple[int, ...]) -> str:
    return f"token {at[1]}"


def _prompt(tokens: int) -> list[int]:
    first = max(1, tokens // 2)
    return [first] + [1] * (tokens - first)


def _singles(tokens: int) -> list[int]:
    return [1] * tokens


def same_places(whole: Tensor, out: Tensor, lengths: Sequence[int]) -> Tensor:
    """What of (B, T, V) stands beside a cached result: all of it, or the last of each piece."""
    if out.shape[1] == whole.shape[1]:
        return whole
    ends = torch.tensor(lengths).cumsum(0) - 1
    return whole[:, ends]


def pieces(name: str, cut: Callable[[int], list[int]], seed: int) -> Measure:
    """One pass against pieces; `cut` gives their lengths for a number of tokens."""

    def measure(subject: Subject, tokens: int) -> tuple[Tensor, Tensor, Shown]:
        ids, start = draw.ids(subject.facts, 2, tokens, seed), subject.facts.start_id
        if start is not None:
            ids[:, 0] = start
        feed = draw.feed(subject, ids)
        lengths = cut(tokens)
        out = subject.can.decoded[name](feed, lengths)
        return same_places(subject.run(feed), out, lengths), out, {"ids": listed(feed.ids), "pieces": lengths}

    return measure


def _padded(name: str, seed: int) -> Measure:
    def measure(subject: Subject, tokens: int) -> tuple[Tensor, Tensor, Shown]:
        ids = draw.ids(subject.facts, 1, tokens, seed)
        whole, mask = draw.pad(subject.facts, ids, left=PADS)
        lengths = [PADS + tokens // 2] + [1] * (tokens - tokens // 2)
        feed = draw.feed(subject, whole, mask=mask, positions=draw.counted(mask))
        out = subject.can.decoded[name](feed, lengths)
        alone = subject.run(draw.feed(subject, ids))
        shown = {"ids": listed(whole), "attention_mask": listed(mask), "pieces": lengths}
        if out.shape[1] == whole.shape[1]:
            return alone, out[:, PADS:], shown
        return same_places(alone, out, [tokens // 2, *lengths[1:]]), out, shown

    return measure


PROBE = Probe(
    NAME,
    "whether decoding over a cache gives what one pass gives",
    probe,
    (
        Plant("angles start anew with each piece", lambda: planted("angles start anew with a cache")),
        Plant("angles are one late", lambda: planted("angles one late with a cache")),
        Plant("the mask is aligned at the first key", lambda: planted("mask aligned at the first key")),
        Plant("the first key is lost", lambda: planted("first key lost with a cache")),
        Plant("the last value is that of the one before", lambda: planted("last value kept with a cache")),
        Plant("padding is read once something is cached", lambda: planted("padding read with a cache")),
        Plant("the window is one too wide in the cache", lambda: planted("window plus one with a cache", window=5)),
        Plant("learned positions start anew", lambda: planted("angles start anew with a cache", position="learned")),
        Plant("sound", planted, False),
        Plant("sound, with a window", lambda: planted(window=5), False),
        Plant("sound, in bfloat16", lambda: planted(dtype="bfloat16"), False, Verdict.ROUNDING),
        Plant("sound, an encoder-decoder", lambda: planted(family="encoder-decoder"), False),
        Plant(
            "angles that depend on the length, and say so",
            lambda: planted("remembers the longest row", trained_length=9).without(switch=9),
            False,
        ),
    ),
)
