"""Length: what happens past the table of positions, and past the trained length?"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from scantling.audits import draw
from scantling.audits.ask import listed, not_applicable
from scantling.audits.draw import Effort
from scantling.audits.finding import Finding, Verdict
from scantling.audits.planted_subject import planted
from scantling.audits.protocol import Abilities, Facts, Feed, Subject
from scantling.audits.registry import Plant, Probe

NAME = "length"
FALLS = 1.0
"""Nats by which the loss may rise within the trained length before that length is not believed."""
RISES = 0.5
"""Nats past which the loss beyond the trained length counts as risen."""


def probe(subject: Subject, effort: Effort) -> list[Finding]:
    """A row longer than the table of positions must be refused; past the trained length logits must be numbers and
    positions distinct; and on real text, the loss by position."""
    if not subject.facts.per_token:
        return [not_applicable(NAME, "the head gives one answer per row")]
    found = [*_past_table(subject, effort), *_past_training(subject, effort)]
    if subject.can.sample is not None and subject.facts.family == "decoder":
        found.append(_by_position(subject, subject.can.sample, effort))
    return found or [
        not_applicable(NAME, "it says neither how many positions it has nor on which length it was trained")
    ]


def _past_table(subject: Subject, effort: Effort) -> list[Finding]:
    limit = subject.facts.context
    if limit is None:
        return []
    where = f"{limit + 1:,} tokens"
    if limit > max(effort.longest, 600):
        return [replace(not_applicable(NAME, "its table is longer than the longest row asked"), where=where)]
    try:
        with torch.no_grad():
            subject.run(draw.feed(subject, draw.ids(subject.facts, 1, limit + 1, effort.seed)))
    except Exception as error:
        data = {"said": (str(error).strip() or type(error).__name__).splitlines()[0][:160]}
        return [
            Finding(NAME, Verdict.CLEAN, "a row longer than the table of positions is refused", 0.0, where, data=data)
        ]
    text = f"it has {limit:,} positions and takes a longer row without a word"
    return [Finding(NAME, Verdict.DEFECT, text, 1.0, where, "positions", {"tokens": limit + 1})]


def _past_training(subject: Subject, effort: Effort) -> list[Finding]:
    trained = subject.facts.trained_length
    if trained is None:
        return []
    tokens = draw.length(subject, effort, min(effort.longest, 2 * trained))
    if tokens <= trained:
        text = f"its trained length of {trained:,} is not shorter than the longest row asked, or than its table"
        return [not_applicable(NAME, text)]
    ids = draw.ids(subject.facts, 1, tokens, effort.seed)
    where = f"{tokens:,} tokens, trained on {trained:,}"
    with torch.no_grad():
        out = subject.run(draw.feed(subject, ids))
    lost = (~out.isfinite()).any(-1)[0].nonzero().flatten().tolist()
    if lost:
        text = f"from position {lost[0]} on its logits are no numbers"
        return [Finding(NAME, Verdict.DEFECT, text, math.inf, where, smallest={"tokens": lost[0] + 1})]
    found = [Finding(NAME, Verdict.CLEAN, "past the trained length its logits are numbers", 0.0, where)]
    if "positions" in subject.can.takes and subject.facts.position not in ("none", "alibi", "relative"):
        found += _distinct(subject, trained, effort.seed)
    return found


def _distinct(subject: Subject, trained: int, seed: int) -> list[Finding]:
    """Whether positions past the trained length are positions of their own."""
    ids = draw.ids(subject.facts, 1, 6, seed)
    limit = subject.facts.context or 2**40
    asked = [p for p in (trained - 3, trained, trained + 2) if p + 1 < limit]
    same = []
    with torch.no_grad():
        for p in asked:
            rows = [
                subject.run(
                    draw.feed(subject, ids, positions=torch.tensor([[0, 1, 2, 3, 4, q]]), mask=torch.ones_like(ids))
                )
                for q in (p, p + 1)
            ]
            same.append(torch.equal(rows[0][:, -1], rows[1][:, -1]))
    if any(same[1:]) and not same[0]:
        text = f"positions past {trained:,} are all one: order is lost there"
        shown = {"ids": listed(ids), "position_ids": [[0, 1, 2, 3, 4, trained], [0, 1, 2, 3, 4, trained + 1]]}
        return [Finding(NAME, Verdict.DEFECT, text, 1.0, "positions past the trained length", "positions", shown)]
    return [
        Finding(
            NAME,
            Verdict.CLEAN,
            "positions past it are positions of their own",
            0.0,
            "positions past the trained length",
        )
    ]


def _by_position(subject: Subject, sample: Tensor, effort: Effort) -> Finding:
    """The loss of each position of real text, within and beyond the trained length."""
    ids = sample[:, : draw.length(subject, effort, effort.longest)].to(subject.device)
    tokens = ids.shape[1]
    with torch.no_grad():
        logits = subject.run(draw.feed(subject, ids)).double()
    losses = F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none").cpu()
    inside = min(subject.facts.trained_length or tokens, tokens) - 1
    eighth = max(1, tokens // 8)
    series = [[i, round(float(losses[i : i + eighth].mean()), 4)] for i in range(0, len(losses), eighth)]
    data = {"loss by position": series}
    early, late = losses[inside // 4 : inside // 2].mean(), losses[inside - inside // 4 : inside].mean()
    if float(losses[: max(1, inside // 2)].mean()) > math.log(subject.facts.vocab_size) - 0.5:
        return replace(
            not_applicable(NAME, "it is not trained: its loss is that of chance"), where="loss by position", data=data
        )
    where = f"loss by position, {tokens:,} tokens"
    if float(late - early) > FALLS:
        text = f"within its trained length the loss rises by {late - early:.2f} nats: it was trained on shorter rows"
        return Finding(NAME, Verdict.DEFECT, text, float(late - early), where, "nats", {"tokens": inside + 1}, data)
    beyond = losses[inside:]
    if len(beyond) >= 4:
        rise = float(beyond.mean() - late)
        if rise > RISES:
            text = (
                f"past its trained length of {inside + 1:,} the loss rises by {rise:.2f} nats: it was not trained there"
            )
            return Finding(NAME, Verdict.BY_DESIGN, text, rise, where, "nats", data=data)
        return Finding(
            NAME, Verdict.CLEAN, "past its trained length the loss does not rise", rise, where, "nats", data=data
        )
    text = "the loss does not rise with the position"
    return Finding(NAME, Verdict.CLEAN, text, float(late - early), where, "nats", data=data)


def tiring(fails: int, says: int, tokens: int = 64) -> Subject:
    """Predicts the next number of a count, up to some position; past it, another."""

    def run(feed: Feed) -> Tensor:
        at = torch.arange(feed.tokens)[None]
        return 9.0 * F.one_hot((feed.ids + torch.where(at < fails, 1, 3)) % 50, 50).float()

    can = Abilities(sample=(torch.arange(tokens) % 50)[None])
    return Subject(f"right up to {fails}, says {says}", run, Facts(50, trained_length=says), can)


def _clamped() -> Subject:
    return planted("table clamped", position="learned", context=48, trained_length=48)


PROBE = Probe(
    NAME,
    "what happens past the table of positions and past the trained length; the loss by position",
    probe,
    (
        Plant("no numbers past the trained length", lambda: planted("blow-up past the trained length")),
        Plant("positions past it are all one", lambda: planted("positions clamped")),
        Plant("a longer row than the table is taken", _clamped),
        Plant("fails at 32 and says 64", lambda: tiring(32, 64)),
        Plant("sound", planted, False, Verdict.CLEAN),
        Plant("a table that is not overrun", lambda: planted(position="learned", context=48), False, Verdict.CLEAN),
        Plant("fails past the length that it says", lambda: tiring(32, 32), False, Verdict.BY_DESIGN),
        Plant("does not fail", lambda: tiring(99, 32), False, Verdict.CLEAN),
    ),
)
