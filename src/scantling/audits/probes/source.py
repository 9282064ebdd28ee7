"""Cross-attention padding: does the target change when its source is padded?"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from scantling.audits import draw
from scantling.audits.ask import Measure, Question, Shown, ask, could_not, listed, not_applicable
from scantling.audits.draw import Effort
from scantling.audits.finding import Finding, Verdict
from scantling.audits.planted_subject import planted
from scantling.audits.protocol import ABSOLUTE, Subject
from scantling.audits.registry import Plant, Probe

NAME = "source"
GOOD = "padding of the source moves nothing"
PADS = 4


def probe(subject: Subject, effort: Effort) -> list[Finding]:
    """A source alone, padded right, padded left, with other ids in its padding; over a cache too."""
    if subject.facts.family != "encoder-decoder":
        return [not_applicable(NAME, "it has no source")]
    if "mask" not in subject.can.takes:
        return [could_not(NAME, "it takes no mask of the source")]
    tokens = min(8, draw.length(subject, effort))
    found = [
        ask(subject, Question(NAME, where, measure, meaning, GOOD), tokens, fewest=1)
        for where, measure, meaning in (
            ("padding on the right", _beside(0, PADS, effort.seed), "padding of the source is read"),
            ("other ids in the padding", _content(effort.seed), "what stands in the source's padding is read"),
        )
    ]
    for name in subject.can.cached:
        question = Question(
            NAME, f"{name}, padding on the right", _cached(name, effort.seed), "the source's padding is read", GOOD
        )
        found.append(ask(subject, question, tokens, fewest=2))
    left = ask(
        subject,
        Question(NAME, "padding on the left", _beside(PADS, 0, effort.seed), "padding of the source is read", GOOD),
        tokens,
        fewest=1,
    )
    sound = all(f.verdict in (Verdict.CLEAN, Verdict.ROUNDING) for f in found)
    if left.verdict is Verdict.DEFECT and sound and subject.facts.position in (*ABSOLUTE, None):
        text = "the source's positions count padding, as absolute ones do: pad it on the right"
        left = replace(left, verdict=Verdict.BY_DESIGN, message=text, smallest=None, where="padding on the left")
    return [*found, left]


def _beside(left: int, right: int, seed: int) -> Measure:
    def measure(subject: Subject, tokens: int) -> tuple[Tensor, Tensor, Shown]:
        ids, source = draw.ids(subject.facts, 1, tokens, seed), draw.ids(subject.facts, 1, 6, seed + 3)
        whole, mask = draw.pad(subject.facts, source, left, right)
        a = subject.run(draw.feed(subject, ids, source=source))
        b = subject.run(draw.feed(subject, ids, source=whole, source_mask=mask))
        return a, b, {"source": listed(whole), "source_mask": listed(mask), "target": listed(ids)}

    return measure


def _content(seed: int) -> Measure:
    def measure(subject: Subject, tokens: int) -> tuple[Tensor, Tensor, Shown]:
        ids, source = draw.ids(subject.facts, 1, tokens, seed), draw.ids(subject.facts, 1, 6, seed + 3)
        whole, mask = draw.pad(subject.facts, source, 0, PADS)
        instead = torch.where(mask.bool(), whole, draw.other(subject.facts, whole))
        a = subject.run(draw.feed(subject, ids, source=whole, source_mask=mask))
        b = subject.run(draw.feed(subject, ids, source=instead, source_mask=mask))
        return a, b, {"source": listed(whole), "instead": listed(instead), "source_mask": listed(mask)}

    return measure


def _cached(name: str, seed: int) -> Measure:
    def measure(subject: Subject, tokens: int) -> tuple[Tensor, Tensor, Shown]:
        ids, source = draw.ids(subject.facts, 1, tokens, seed), draw.ids(subject.facts, 1, 6, seed + 3)
        whole, mask = draw.pad(subject.facts, source, 0, PADS)
        run, lengths = subject.can.cached[name], [1] * tokens
        a = run(draw.feed(subject, ids, source=source), lengths)
        b = run(draw.feed(subject, ids, source=whole, source_mask=mask), lengths)
        return a, b, {"source": listed(whole), "source_mask": listed(mask), "target": listed(ids)}

    return measure


def _seq2seq(*faults: str, **shape: str) -> Subject:
    return planted(*faults, family="encoder-decoder", **shape)


PROBE = Probe(
    NAME,
    "whether padding of an encoder-decoder's source moves its target",
    probe,
    (
        Plant("cross-attention reads padding", lambda: _seq2seq("source padding read")),
        Plant("the mask of the source is off by one", lambda: _seq2seq("source mask shifted")),
        Plant("the encoder reads padding", lambda: _seq2seq("source padding read in the encoder")),
        Plant("nobody masks it", lambda: _seq2seq("source padding read", "source padding read in the encoder")),
        Plant("sound, rotary", _seq2seq, False),
        Plant("learned positions, padding on the left", lambda: _seq2seq(position="learned"), False, Verdict.BY_DESIGN),
        Plant("a decoder alone", planted, False, Verdict.NOT_APPLICABLE),
    ),
)
