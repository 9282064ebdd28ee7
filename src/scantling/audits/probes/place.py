"""Use of information by its place: is what stands at the start, in the middle and at the end used?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from scantling.audits import draw
from scantling.audits.ask import listed, not_applicable
from scantling.audits.draw import Effort
from scantling.audits.finding import Finding, Verdict
from scantling.audits.planted_subject import planted
from scantling.audits.protocol import Abilities, Facts, Feed, Subject
from scantling.audits.reach import reach
from scantling.audits.registry import Plant, Probe
from scantling.audits.wide import wide

NAME = "place"
PLACES = (0.0, 0.25, 0.5, 0.75, 0.95)
SURE = 1.0
"""Nats that a needle must gain at its best place before places are compared."""
ROWS = 3
"""Rows in none of which a token that is lost may move the last logits."""
LOST = 0.1
"""Share of the best place's gain below which a place counts as not used."""


def probe(subject: Subject, effort: Effort) -> list[Finding]:
    """By gradient: whether each token of a row reaches the last logits. Of a trained model: a pair of tokens at some
    place, the first of them again at the end, and how much likelier the second became."""
    if not subject.facts.per_token:
        return [not_applicable(NAME, "the head gives one answer per row")]
    found = [_reaches(subject, draw.length(subject, effort, 48), effort.seed)]
    if subject.can.sample is not None and subject.facts.family == "decoder":
        found.append(_needle(subject, subject.can.sample, effort))
    return found


def span(facts: Facts) -> int | None:
    """How many tokens back, its own included, the last logits can read through all layers; None for all."""
    windows = facts.windows
    if windows is None or any(w is None for w in windows):
        return None
    return 1 + sum(w - 1 for w in windows if w is not None)


def _reaches(subject: Subject, tokens: int, seed: int) -> Finding:
    ids = draw.ids(subject.facts, 1, tokens, seed)
    far = span(subject.facts)
    where = f"{tokens} tokens"
    rows = reach(wide(subject), wide(subject).run, draw.feed(subject, ids))
    seen = [False] * tokens if rows is None else [bool(x) for x in (rows[-1] > 0).tolist()]
    for other in range(seed, seed + ROWS):
        # A clamp has no gradient, and a token passes it all the same; in one row a weight may vanish by chance.
        if not all(seen):
            moved = _by_bits(wide(subject), draw.ids(subject.facts, 1, tokens, other))
            seen = [a or b for a, b in zip(seen, moved, strict=True)]
    lost = [i for i in range(tokens) if not seen[i]]
    within = [i for i in lost if far is None or i >= tokens - far]
    data = {"reached": "".join("x" if x else "." for x in seen)}
    if not lost:
        return Finding(NAME, Verdict.CLEAN, "every token reaches the last logits", 0.0, where, "tokens", data=data)
    if not within:
        text = f"its windows reach {far} tokens back through all layers; what is further is not read"
        return Finding(NAME, Verdict.BY_DESIGN, text, float(len(lost)), where, "tokens", data=data)
    if subject.facts.sparse:
        text = "its layers read chosen positions only, as it says"
        return Finding(NAME, Verdict.BY_DESIGN, text, float(len(lost)), where, "tokens", data=data)
    if len(lost) == tokens - 1:
        text = "no token reads another"
        return Finding(NAME, Verdict.NOT_APPLICABLE, text, float(len(lost)), where, "tokens", data=data)
    if rows is None and subject.facts.position == "alibi":
        text = "far tokens move the last logits by less than a last place, as ALiBi's penalty makes them"
        return Finding(NAME, Verdict.BY_DESIGN, text, float(len(lost)), where, "tokens", data=data)
    text = f"{len(within)} tokens never reach the last logits, the first at {within[0]} of {tokens}"
    return Finding(NAME, Verdict.DEFECT, text, float(len(within)), where, "tokens", {"ids": listed(ids)}, data)


def _by_bits(subject: Subject, ids: Tensor) -> list[bool]:
    """Whether another token in each place moves the last logits at all."""
    seen = []
    with torch.no_grad():
        base = subject.run(draw.feed(subject, ids))[:, -1]
        for t in range(ids.shape[1]):
            changed = draw.replaced(subject.facts, ids, t)
            seen.append(not torch.equal(base, subject.run(draw.feed(subject, changed))[:, -1]))
    return seen


def _needle(subject: Subject, sample: Tensor, effort: Effort) -> Finding:
    """How much a needle in each place gains, in nats, over a row without it."""
    most = min(effort.longest, 128, (subject.facts.trained_length or 10**9) - 1, (subject.facts.context or 10**9) - 1)
    hay = sample[:, :most].cpu()
    tokens = hay.shape[1]
    if tokens < 16:
        return replace(not_applicable(NAME, "the text is too short to hide anything in"), where="needle")
    gains = [sum(column) / 2 for column in zip(*(_gains(subject, hay, i) for i in range(2)), strict=True)]
    best = max(gains)
    data = {"gain by place": [[p, round(g, 3)] for p, g in zip(PLACES, gains, strict=True)]}
    where = f"needle in {tokens + 1} tokens"
    if best < SURE:
        text = "it does not repeat what it reads, in any place: it is not trained to"
        return Finding(NAME, Verdict.NOT_APPLICABLE, text, best, where, "nats", data=data)
    lost = [p for p, g in zip(PLACES, gains, strict=True) if g < LOST * best]
    if not lost:
        return Finding(NAME, Verdict.CLEAN, "a needle is found in every place", min(gains), where, "nats", data=data)
    far = span(subject.facts)
    if far is not None and all(tokens - 2 - int(p * (tokens - 4)) > far for p in lost):
        text = f"its windows reach {far} tokens back through all layers"
        return Finding(NAME, Verdict.BY_DESIGN, text, min(gains), where, "nats", data=data)
    text = f"a needle is lost at {', '.join(f'{100 * p:.0f} %' for p in lost)} of the row and found elsewhere"
    return Finding(NAME, Verdict.DEFECT, text, min(gains), where, "nats", {"tokens": tokens + 1}, data)


def _gains(subject: Subject, hay: Tensor, which: int) -> list[float]:
    """Log-probability of the needle's second token behind its first, at each place, less that without a needle."""
    key, value = _pair(subject.facts, hay, which)
    tokens = hay.shape[1]
    rows = [torch.cat([hay[0], torch.tensor([key])])]
    for place in PLACES:
        row = rows[0].clone()
        # The first token of a row serves many models as a place to attend to where nothing fits.
        at = 2 + int(place * (tokens - 4))
        row[at : at + 2] = torch.tensor([key, value])
        rows.append(row)
    with torch.no_grad():
        last = [subject.run(draw.feed(subject, row[None]))[0, -1].double().log_softmax(-1)[value] for row in rows]
    return [float(x - last[0]) for x in last[1:]]


def _pair(facts: Facts, hay: Tensor, which: int) -> tuple[int, int]:
    """Two tokens that do not stand in the text."""
    there = set(hay.flatten().tolist()) | {facts.pad_id}
    step = max(1, facts.vocab_size // 7)
    free = [i for i in range(1 + which, facts.vocab_size, step) if i not in there]
    free += [i for i in range(facts.vocab_size) if i not in there]
    if len(free) < 2:
        free = [1 + which, 3 + which]
    return free[0], free[1]


def finder(reads: Callable[[int, int], bool], name: str, tokens: int = 64, **facts: object) -> Subject:
    """Looks up what followed the last token before, where `reads(query, key)` lets it."""

    def run(feed: Feed) -> Tensor:
        rows, length = feed.ids.shape
        out = torch.zeros(rows, length, 97)
        for r in range(rows):
            row = feed.ids[r].tolist()
            for t in range(length):
                for s in range(t):
                    if reads(t, s):
                        out[r, t, row[s]] += 1e-4
                        if s and row[s - 1] == row[t]:
                            out[r, t, row[s]] += 6.0
                out[r, t, row[t]] += 1e-4
        return out

    can = Abilities(sample=draw.ids(Facts(40), 1, tokens, 3))
    return Subject(name, run, Facts(97, **facts), can)  # type: ignore[arg-type]


def _sparse() -> Subject:
    return planted(window=9).without(windows=None, sparse=True)


PROBE = Probe(
    NAME,
    "whether tokens at the start, in the middle and at the end of a row are used",
    probe,
    (
        Plant("the middle is not read", lambda: finder(lambda t, s: s < t // 4 or s > 3 * t // 4, "no middle")),
        Plant("the start is cut off", lambda: finder(lambda t, s: s > t // 4, "no start")),
        Plant("only the last 20 are read", lambda: finder(lambda t, s: t - s < 20, "the last 20")),
        Plant("a window that it does not name", lambda: planted(window=9).without(windows=None)),
        Plant("sound", planted, False, Verdict.CLEAN),
        Plant("a needle is found everywhere", lambda: finder(lambda t, s: True, "all"), False, Verdict.CLEAN),
        Plant("a window that it names", lambda: planted(window=9), False, Verdict.BY_DESIGN),
        Plant(
            "a window of 20 that it names",
            lambda: finder(lambda t, s: t - s < 20, "the last 20", windows=(20,)),
            False,
            Verdict.BY_DESIGN,
        ),
        Plant("chosen positions only, as it says", _sparse, False, Verdict.BY_DESIGN),
        Plant("ALiBi", lambda: planted(position="alibi"), False, Verdict.CLEAN),
    ),
)
