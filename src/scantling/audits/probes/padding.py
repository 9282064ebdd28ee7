"""Padding: do the tokens of a row change when padding stands beside them?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from scantling.audits import draw
from scantling.audits.ask import Question, Shown, ask, could_not, listed
from scantling.audits.draw import Effort
from scantling.audits.finding import Finding, Verdict
from scantling.audits.planted_subject import planted
from scantling.audits.protocol import ABSOLUTE, Abilities, Feed, Subject
from scantling.audits.registry import Plant, Probe

NAME = "padding"
PADS = 5
GOOD = "padding moves no real token"
COUNTED = (
    "it counts padding as positions, as models with absolute positions do: give positions that start at the first "
)
COUNTED += "real token"


FIRST = "its answer is read from the first column, as classifiers with a first token do: pad rows on the right"


def probe(subject: Subject, effort: Effort) -> list[Finding]:
    """The same row alone and with padding to its right or left; other ids in the padding; gradients beside padding."""
    if "mask" not in subject.can.takes:
        return [could_not(NAME, "it takes no padding mask")]
    tokens = draw.length(subject, effort, min(effort.tokens, (subject.facts.context or 10**9) - PADS))
    numbered = "positions" in subject.can.takes
    found = [ask(subject, beside("padding on the right", 0, PADS, False, effort.seed), tokens)]
    if numbered:
        found.append(ask(subject, beside("padding on the left, with positions", PADS, 0, True, effort.seed), tokens))
    content = ask(subject, _content(numbered, effort.seed, PADS - 2), tokens)
    found.append(content)
    bare = ask(subject, beside("padding on the left", PADS, 0, False, effort.seed), tokens)
    found.append(_explained(subject, bare, found, content))
    if not subject.facts.per_token:
        found = _by_row(subject, found, tokens, numbered, effort.seed)
    return found + _gradients(subject, tokens, effort.seed)


def _by_row(subject: Subject, found: list[Finding], tokens: int, numbered: bool, seed: int) -> list[Finding]:
    """Of a head that gives one answer per row: what padding on the left moves is by design if it reads the first column
    and padding on the right moves nothing."""
    content = ask(subject, _content(numbered, seed, 0), tokens)
    right, *left = found
    if Verdict.DEFECT in (right.verdict, content.verdict):
        return [right, content, *left]
    designed = [
        replace(f, verdict=Verdict.BY_DESIGN, message=FIRST, smallest=None) if f.verdict is Verdict.DEFECT else f
        for f in left
        if "crash" not in f.data
    ]
    return [right, content, *designed, *(f for f in left if "crash" in f.data)]


def beside(where: str, left: int, right: int, numbered: bool, seed: int) -> Question:
    """A row alone against the same with padding."""

    def measure(subject: Subject, tokens: int) -> tuple[Tensor, Tensor, Shown]:
        ids = draw.ids(subject.facts, 1, tokens, seed)
        whole, mask = draw.pad(subject.facts, ids, left, right)
        positions = draw.counted(mask) if numbered else None
        alone = subject.run(draw.feed(subject, ids))
        padded = subject.run(draw.feed(subject, whole, mask=mask, positions=positions))
        if alone.shape[1] == tokens:
            padded = padded[:, left : left + tokens]
        shown = {"ids": listed(ids), "padded": listed(whole), "attention_mask": listed(mask)}
        return alone, padded, shown | ({"position_ids": listed(positions)} if positions is not None else {})

    side = "left" if left else "right"
    return Question(
        NAME,
        where,
        measure,
        f"padding on the {side} moves real tokens",
        GOOD,
        total=lambda tokens: tokens + left + right,
        place=lambda at: f"token {at[1]}",
        moved=left > 0,
    )


def _content(numbered: bool, seed: int, left: int) -> Question:
    """Other ids where the mask says padding: two on the right, and so many on the left."""

    def measure(subject: Subject, tokens: int) -> tuple[Tensor, Tensor, Shown]:
        ids = draw.ids(subject.facts, 1, tokens, seed)
        whole, mask = draw.pad(subject.facts, ids, left, 2)
        positions = draw.counted(mask) if numbered else None
        instead = torch.where(mask.bool(), whole, draw.other(subject.facts, whole))
        a = subject.run(draw.feed(subject, whole, mask=mask, positions=positions))
        b = subject.run(draw.feed(subject, instead, mask=mask, positions=positions))
        if a.shape[1] == whole.shape[1]:
            a, b = a[:, left:-2], b[:, left:-2]
        return a, b, {"ids": listed(whole), "instead": listed(instead), "attention_mask": listed(mask)}

    where = "other ids in the padding" + (" on the right" if left == 0 else "")
    return Question(NAME, where, measure, "real tokens read what stands in the padding", GOOD)


def _explained(subject: Subject, bare: Finding, before: list[Finding], content: Finding) -> Finding:
    """Left padding without positions: whether absolute positions explain what it moves."""
    if bare.verdict is not Verdict.DEFECT or bare.size is None:
        return bare
    fine = (Verdict.CLEAN, Verdict.ROUNDING)
    numbered = [f for f in before if f.where.startswith("padding on the left, with positions")]
    sound = content.verdict in fine and all(f.verdict in fine for f in numbered)
    if sound and subject.facts.position in (*ABSOLUTE, None):
        return replace(bare, verdict=Verdict.BY_DESIGN, message=COUNTED, smallest=None, where="padding on the left")
    return bare


def _gradients(subject: Subject, tokens: int, seed: int) -> list[Finding]:
    """A row of padding beside real ones must leave every gradient a number."""
    module = subject.can.module
    if module is None or not any(p.is_floating_point() for p in module.parameters()):
        return []
    whole, mask = draw.pad(subject.facts, draw.ids(subject.facts, 2, tokens, seed), 3, 2)
    mask[1, : tokens // 2 + 3] = 0
    asked = [p for p in module.parameters() if p.is_floating_point()]
    before = [p.requires_grad for p in asked]
    try:
        for p in asked:
            p.requires_grad_(True)
        with torch.enable_grad():
            out = subject.run(draw.feed(subject, whole, mask=mask))
            if not out.requires_grad:
                return []
            real = out[mask.to(out.device).bool()] if out.shape[1] == whole.shape[1] else out
            grads = torch.autograd.grad(real.square().mean(), asked, allow_unused=True)
    finally:
        for p, was in zip(asked, before, strict=True):
            p.requires_grad_(was)
    shown: dict[str, Any] = {"ids": listed(whole), "attention_mask": listed(mask)}
    if all(g is None or bool(g.isfinite().all()) for g in grads) and bool(real.isfinite().all()):
        return [Finding(NAME, Verdict.CLEAN, GOOD, 0.0, "gradients")]
    text = "beside padding, gradients or logits are no numbers"
    return [Finding(NAME, Verdict.DEFECT, text, None, "gradients", smallest=shown)]


def _no_number() -> Subject:
    """Padded queries divide nothing by nothing, and the stream's mean spreads it."""
    sound = planted(name="a row of padding becomes no number")

    def run(feed: Feed) -> Tensor:
        out = sound.run(feed)
        if feed.mask is None:
            return out
        return out + (out * 0).masked_fill(~feed.mask.bool()[..., None], float("nan")).mean(1, keepdim=True)

    return Subject(sound.name, run, sound.facts, Abilities(takes=sound.can.takes))


def _learned() -> Subject:
    return planted(name="learned positions", position="learned")


PROBE = Probe(
    NAME,
    "whether padding to the right or left of a row moves its tokens, or makes them no numbers",
    probe,
    (
        Plant("the mask is not used", lambda: planted("padding read")),
        Plant("the mask is not used on the left", lambda: planted("padding read on the left")),
        Plant("the padding next to a token is read", lambda: planted("padding off by one")),
        Plant("padding is counted in a mean", lambda: planted("padding spreads")),
        Plant("an encoder reads padding", lambda: planted("padding read", family="encoder", position="learned")),
        Plant("padding becomes no number and spreads", _no_number),
        Plant("sound, rotary", planted, False, Verdict.CLEAN),
        Plant("learned positions, bare padding on the left", _learned, False, Verdict.BY_DESIGN),
        Plant("ALiBi", lambda: planted(position="alibi"), False),
        Plant("sound, in bfloat16", lambda: planted(dtype="bfloat16"), False),
    ),
)
