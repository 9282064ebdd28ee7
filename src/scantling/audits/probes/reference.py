"""Another implementation: does it give the same logits?"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from scantling.audits import draw
from scantling.audits.ask import Measure, Question, Shown, ask, listed, not_applicable
from scantling.audits.draw import Effort
from scantling.audits.finding import Finding, Verdict
from scantling.audits.judge import gap
from scantling.audits.planted_subject import planted
from scantling.audits.protocol import Feed, Subject
from scantling.audits.registry import Plant, Probe

NAME = "reference"
GOOD = "both implementations give the same logits"
MEANING = "two implementations of one model give different logits"
SHIFTED = "logits differ by a constant per position, which no probability shows"
PADS = 4


def probe(subject: Subject, effort: Effort) -> list[Finding]:
    """Logits beside those of a second implementation: a short row, a longer one, and one beside padding."""
    if subject.can.reference is None:
        return [not_applicable(NAME, "no second implementation is given")]
    tokens = draw.length(subject, effort)
    longer = draw.length(subject, effort, 3 * effort.tokens)
    asked = [("a row", False, tokens), ("a longer row", False, longer)]
    if "mask" in subject.can.takes:
        asked.append(("beside padding", True, draw.length(subject, effort, tokens - PADS)))
    found = []
    for where, padded, n in asked:
        question = Question(NAME, where, _measure(padded, False, effort.seed), MEANING, GOOD, place=_place)
        answer = ask(subject, question, n, fewest=1)
        if (
            answer.verdict is Verdict.DEFECT
            and "crash" not in answer.data
            and _constant(subject, padded, n, effort.seed)
        ):
            answer = replace(answer, verdict=Verdict.BY_DESIGN, message=SHIFTED, smallest=None, where=where)
        found.append(answer)
    return found


def _place(at: tuple[int, ...]) -> str:
    return f"token {at[1]}"


def _measure(padded: bool, centred: bool, seed: int) -> Measure:
    def measure(subject: Subject, tokens: int) -> tuple[Tensor, Tensor, Shown]:
        assert subject.can.reference is not None
        ids = draw.ids(subject.facts, 1, tokens, seed)
        shown: dict[str, object] = {"ids": listed(ids)}
        mask = None
        if padded:
            ids, mask = draw.pad(subject.facts, ids, 0, PADS)
            shown = {"ids": listed(ids), "attention_mask": listed(mask)}
        feed = draw.feed(subject, ids, mask=mask)
        other = subject.can.reference()
        a, b = subject.run(feed), other.run(feed).to(subject.device)
        width = min(a.shape[-1], b.shape[-1], subject.facts.vocab_size)
        a, b = a[:, :tokens, :width], b[:, :tokens, :width]
        if centred:
            a, b = a - a.mean(-1, keepdim=True), b - b.mean(-1, keepdim=True)
        return a, b, shown

    return measure


def _constant(subject: Subject, padded: bool, tokens: int, seed: int) -> bool:
    """Whether nothing is left when the mean of each position's logits is taken away."""
    return not gap(subject, lambda s: _measure(padded, True, seed)(s, tokens)[:2]).real


def beside(*faults: str, shift: bool = False, dtype: str = "float32", **shape: str) -> Subject:
    """The sound small Transformer, and one with faults as its reference."""
    subject = planted(dtype=dtype, **shape)
    other = planted(*faults, dtype=dtype, **shape)
    run = other.can.kernels["fast"]

    def moved(feed: Feed) -> Tensor:
        out = run(feed)
        return out + out[..., :1].sin() if shift else out

    def cast(wanted: str) -> Subject:
        return beside(*faults, shift=shift, dtype=wanted, **shape)

    second = replace(other, run=moved)
    return replace(subject, can=replace(subject.can, reference=lambda: second, cast=cast))


def _turned() -> Subject:
    """Heads in another order, with the rows of their matrices reordered to match."""
    subject, other = planted(), planted()
    net = other.can.module
    assert net is not None
    with torch.no_grad():
        for name, weight in net.named_parameters():
            if name.endswith(("q.weight", "k.weight", "v.weight")):
                weight.copy_(weight.roll(12, 0))
            elif name.endswith("o.weight"):
                weight.copy_(weight.roll(12, 1))

    def cast(wanted: str) -> Subject:
        second = other.can.cast(wanted)  # type: ignore[misc]
        first = planted(dtype=wanted)
        return replace(first, can=replace(first.can, reference=lambda: second, cast=None))

    return replace(subject, can=replace(subject.can, reference=lambda: other, cast=cast))


PROBE = Probe(
    NAME,
    "whether a second implementation of the model gives the same logits",
    probe,
    (
        Plant("the norm's epsilon is another", lambda: beside("eps too large")),
        Plant("scores are scaled twice", lambda: beside("scale twice")),
        Plant("the last norm is left out", lambda: beside("no final norm")),
        Plant("the activation is approximated", lambda: beside("gelu by tanh")),
        Plant("the same", beside, False, Verdict.ROUNDING),
        Plant("a constant per position", lambda: beside(shift=True), False, Verdict.BY_DESIGN),
        Plant("heads in another order", _turned, False, Verdict.ROUNDING),
        Plant("no second implementation", planted, False, Verdict.NOT_APPLICABLE),
    ),
)
