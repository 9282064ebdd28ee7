"""Kernels: do two pieces of code for one function give one function?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from scantling.audits import draw
from scantling.audits.ask import Question, Shown, ask, could_not, listed
from scantling.audits.draw import Effort
from scantling.audits.finding import Finding, Verdict
from scantling.audits.planted_subject import planted
from scantling.audits.protocol import Subject
from scantling.audits.registry import Plant, Probe

NAME = "kernels"
GOOD = "kernels give the same logits"
PADS = 5


def probe(subject: Subject, effort: Effort) -> list[Finding]:
    """Every kernel against the first, at three lengths, and beside padding."""
    names = list(subject.can.kernels)
    if len(names) < 2:
        return [could_not(NAME, "it has one kernel only, or none that can be chosen")]
    longest = draw.length(subject, effort, min(effort.longest, 160))
    lengths = sorted({draw.length(subject, effort, n) for n in (2, effort.tokens)} | {longest})
    found = []
    for name in names[1:]:
        for tokens in lengths:
            found.append(ask(subject, _question(names[0], name, tokens, False, effort.seed), tokens))
            if found[-1].verdict is Verdict.DEFECT:
                break
        if "mask" in subject.can.takes and found[-1].verdict is not Verdict.DEFECT:
            most = min(effort.tokens, (subject.facts.context or 10**9) - 2 * PADS)
            found.append(ask(subject, _question(names[0], name, most, True, effort.seed), most))
    return found


def _question(first: str, second: str, tokens: int, padded: bool, seed: int) -> Question:
    where = f"{first} and {second}, " + ("beside padding" if padded else f"{tokens} tokens")
    meaning = f"kernels {first} and {second} compute different functions: one of them is wrong"
    return Question(
        NAME, where, _measure(first, second, padded, seed), meaning, GOOD, place=lambda at: f"token {at[1]}"
    )


def _measure(
    first: str, second: str, padded: bool, seed: int
) -> Callable[[Subject, int], tuple[Tensor, Tensor, Shown]]:
    def measure(subject: Subject, tokens: int) -> tuple[Tensor, Tensor, Shown]:
        ids = draw.ids(subject.facts, 1, tokens, seed)
        if not padded:
            feed = draw.feed(subject, ids)
            return subject.can.kernels[first](feed), subject.can.kernels[second](feed), {"ids": listed(ids)}
        left, mask = draw.pad(subject.facts, ids, PADS, 0)
        right, other = draw.pad(subject.facts, ids, 0, PADS)
        whole, masks = torch.cat([left, right]), torch.cat([mask, other])
        feed = draw.feed(subject, whole, mask=masks)
        a, b = subject.can.kernels[first](feed), subject.can.kernels[second](feed)
        if a.shape[1] == whole.shape[1]:
            real = masks.bool().to(a.device)
            a, b = a[real][None], b[real][None]
        return a, b, {"ids": listed(whole), "attention_mask": listed(masks)}

    return measure


def _single() -> Subject:
    sound = planted()
    return replace(sound, can=replace(sound.can, kernels={}))


PROBE = Probe(
    NAME,
    "whether all kernels give the same logits, short, long and beside padding",
    probe,
    (
        Plant("scores are scaled twice on one", lambda: planted("scale twice")),
        Plant("a bias is added on one", lambda: planted("bias on the diagonal")),
        Plant("a small bias on an encoder's", lambda: planted("bias on the diagonal", family="encoder")),
        Plant("scaled twice, in bfloat16", lambda: planted("scale twice", dtype="bfloat16")),
        Plant("sound", planted, False),
        Plant("sound, ALiBi", lambda: planted(position="alibi"), False),
        Plant("sound, in bfloat16", lambda: planted(dtype="bfloat16"), False, Verdict.ROUNDING),
        Plant("one kernel", _single, False, Verdict.COULD_NOT_RUN),
    ),
)
