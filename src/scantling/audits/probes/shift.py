"""Label shift: which label is each position judged on?"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scantling.audits import draw
from scantling.audits.ask import REFUSALS, could_not, listed, not_applicable
from scantling.audits.draw import Effort
from scantling.audits.finding import Finding, Verdict
from scantling.audits.planted import Tiny
from scantling.audits.planted_subject import own_loss, planted
from scantling.audits.protocol import Abilities, Facts, Feed, Loss, Subject
from scantling.audits.registry import Plant, Probe

NAME = "shift"
CLOSE = 1e-3
"""Nats by which a loss may miss the log-probability that it is: between rounding, and the distance of two tokens'."""
CLEAR = 0.2
"""Nats by which one offset must beat the others to count as what the model was trained on."""


def probe(subject: Subject, effort: Effort) -> list[Finding]:
    """One label at a time: the loss of a single label is a single log-probability, so it says which position it was
    read from. Then, on real text: the offset with the least loss is the one that the model was trained on."""
    if not subject.facts.per_token:
        return [not_applicable(NAME, "the head gives one answer per row")]
    found = []
    if subject.can.loss is None:
        found.append(could_not(NAME, "it has no loss of its own"))
    elif subject.can.taught is not None:
        found.append(_taught(subject, subject.can.loss, min(draw.length(subject, effort), 9), effort.seed))
    else:
        found.append(_own(subject, subject.can.loss, min(draw.length(subject, effort), 9), effort.seed))
    if subject.can.sample is not None:
        found.append(_trained(subject, subject.can.sample[:, : draw.length(subject, effort, effort.longest)]))
    return found


def right(facts: Facts) -> int:
    """How much later the label of a position stands: 1 in a decoder alone, 0 where labels are not shifted."""
    return int(facts.family == "decoder")


def _own(subject: Subject, loss: Loss, tokens: int, seed: int) -> Finding:
    """Where the loss of each single label is read."""
    ids = draw.ids(subject.facts, 2, tokens, seed)
    seen: Counter[str] = Counter()
    example: dict[str, tuple[int, int]] = {}
    feed = draw.feed(subject, ids)
    with torch.no_grad():
        logits = subject.run(feed).double()
        for place in [(row, at) for row in range(2) for at in range(tokens)]:
            labels = torch.full_like(feed.ids, -100)
            labels[place] = feed.ids[place]
            offset = _offset(subject, lambda given: loss(feed, given, None), logits, labels, place)
            seen[offset] += 1
            example.setdefault(offset, place)
    scored = {k: n for k, n in seen.items() if k != "unscored"}
    wanted = str(right(subject.facts))
    data = {"labels by offset": dict(seen)}
    if not scored:
        return Finding(NAME, Verdict.COULD_NOT_RUN, "its loss scores no single label", where="own loss", data=data)
    if set(scored) == {wanted}:
        lost = tokens * 2 - scored[wanted] - 2 * int(wanted)
        if lost <= 0:
            text = f"each label is judged {_later(wanted)}"
            return Finding(NAME, Verdict.CLEAN, text, 0.0, "own loss", "offset", data=data)
        return Finding(NAME, Verdict.DEFECT, f"{lost} labels are not judged", lost, "own loss", "labels", data=data)
    if set(scored) <= {"unmatched", wanted}:
        text = "the loss of a single label is no log-probability of it (smoothed, scaled, or with terms of its own)"
        return Finding(NAME, Verdict.COULD_NOT_RUN, text, where="own loss", data=data)
    wrong = max((k for k in scored if k not in (wanted, "unmatched")), key=lambda k: scored[k])
    row, at = example[wrong]
    label = {"ids": listed(ids), "label at": [row, at]}
    text = f"labels are judged {_later(wrong)}; right is {_later(wanted)}"
    if wrong == "another row":
        text = "a label is judged on the logits of another row"
    size = float(wrong) if wrong.lstrip("-").isdigit() else None
    return Finding(NAME, Verdict.DEFECT, text, size, "own loss", "offset", label, data)


def _offset(
    subject: Subject, loss: Callable[[Tensor], Tensor], logits: Tensor, labels: Tensor, place: tuple[int, int]
) -> str:
    """How much later than its logits the single label at `place` stands, as text."""
    try:
        value = float(loss(labels))
    except REFUSALS:
        return "unscored"
    if not math.isfinite(value):
        return "unscored"
    if logits.shape[-1] < subject.facts.vocab_size:
        return "unmatched"
    given = logits.logsumexp(-1) - logits[..., int(labels[place])]
    apart, most = (given - value).abs(), CLOSE * max(1.0, value)
    row, at = apart[place[0]], place[1]
    wanted = at - right(subject.facts)
    # Where a token stands twice, two positions may have the same logits.
    if wanted >= 0 and float(row[wanted]) <= most:
        return str(at - wanted)
    if value == 0:
        # Nothing was summed; a label that is certain is caught above.
        return "unscored"
    if float(row.min()) <= most:
        return str(at - int(row.argmin()))
    return "another row" if float(apart.min()) <= most else "unmatched"


def _taught(subject: Subject, loss: Loss, tokens: int, seed: int) -> Finding:
    """Of an encoder-decoder, whose decoder reads its labels: the offset at which cross-entropy gives its loss."""
    assert subject.can.taught is not None
    labels = draw.ids(subject.facts, 2, tokens, seed).to(subject.device)
    with torch.no_grad():
        own = float(loss(draw.feed(subject, labels), labels, None))
        logits = subject.run(draw.feed(subject, subject.can.taught(labels))).double()
    losses = by_offset(logits, labels, (0, 1, 2, -1))
    data = {"its loss": own, "cross-entropy by offset": {str(k): v for k, v in losses.items()}}
    offset = min(losses, key=lambda k: abs(losses[k] - own))
    if abs(losses[offset] - own) > CLOSE:
        text = "its loss is no cross-entropy of its logits at any offset (smoothed, scaled, or with terms of its own)"
        return Finding(NAME, Verdict.COULD_NOT_RUN, text, where="own loss", data=data)
    if offset == 0:
        text = f"each label is judged {_later('0')}"
        return Finding(NAME, Verdict.CLEAN, text, 0.0, "own loss", "offset", data=data)
    text = f"labels are judged {_later(str(offset))}; the decoder's input is shifted already"
    return Finding(NAME, Verdict.DEFECT, text, float(offset), "own loss", "offset", {"labels": listed(labels)}, data)


def by_offset(logits: Tensor, ids: Tensor, offsets: Sequence[int]) -> dict[int, float]:
    """Mean cross-entropy of the logits of each position with the id `offset` later."""
    tokens, losses = ids.shape[1], {}
    for offset in offsets:
        rows = logits[:, max(0, -offset) : tokens - max(0, offset)]
        wanted = ids[:, max(0, offset) : tokens - max(0, -offset)]
        losses[offset] = float(F.cross_entropy(rows.flatten(0, 1), wanted.flatten()))
    return losses


def _later(offset: str) -> str:
    n = int(offset) if offset.lstrip("-").isdigit() else 0
    if n == 0:
        return "on the logits of its own position"
    return f"on the logits of {abs(n)} position{'s' * (abs(n) > 1)} {'before' if n > 0 else 'after'} it"


def _trained(subject: Subject, ids: Tensor) -> Finding:
    """Which offset has the least loss on real text."""
    if subject.facts.family != "decoder":
        return Finding(NAME, Verdict.NOT_APPLICABLE, "only a decoder predicts its text", where="on text")
    with torch.no_grad():
        logits = subject.run(draw.feed(subject, ids)).double().cpu()
    ids = ids.cpu()
    losses = by_offset(logits, ids, (-1, 0, 1, 2, 3))
    data = {"loss by offset": {str(k): round(v, 4) for k, v in losses.items()}}
    first, second = sorted(losses, key=lambda k: losses[k])[:2]
    if losses[first] > math.log(subject.facts.vocab_size) - 0.5 or losses[second] - losses[first] < CLEAR:
        text = "no offset has a clearly smaller loss: it is not trained on such text"
        return Finding(NAME, Verdict.NOT_APPLICABLE, text, where="on text", data=data)
    if first == right(subject.facts):
        text = f"the loss is least {_later(str(first))}"
        return Finding(NAME, Verdict.CLEAN, text, losses[first], "on text", "nats", data=data)
    why = {0: "it repeats its input: it was trained on labels that were not shifted"}.get(
        first, f"it predicts the token {first} later: it was trained on labels that were shifted {first} times"
    )
    return Finding(NAME, Verdict.DEFECT, why, losses[first], "on text", "nats", {"ids": listed(ids[:, :8])}, data)


def with_loss(shift: int, **shape: Any) -> Subject:
    """A small model whose own loss shifts by so much."""
    subject = planted(name=f"labels shifted by {shift}", **shape)
    net = subject.can.module
    assert isinstance(net, Tiny)
    return replace(subject, can=replace(subject.can, loss=own_loss(net, shift)))


def _flattened() -> Subject:
    """Rows are joined before the labels are shifted."""
    subject = planted(name="labels shifted after rows were joined")

    def loss(feed: Feed, labels: Tensor, _: int | None = None) -> Tensor:
        logits = subject.run(feed).flatten(0, 1)
        return F.cross_entropy(logits[:-1], labels.flatten()[1:])

    return replace(subject, can=replace(subject.can, loss=loss))


def counting(step: int) -> Subject:
    """Knows that the token after n is n + 1, and predicts the one `step` later."""

    def run(feed: Feed) -> Tensor:
        return 9.0 * F.one_hot((feed.ids + step) % 50, 50).float()

    sample = (torch.arange(60) % 50)[None]
    return Subject(f"predicts the token {step} later", run, Facts(50), Abilities(sample=sample))


def _summed() -> Subject:
    """The loss is a sum, not a mean."""
    subject = planted(name="a summed loss")
    mean = own_loss(subject.can.module)  # type: ignore[arg-type]
    return replace(subject, can=replace(subject.can, loss=lambda feed, labels, _: mean(feed, labels, 1)))


PROBE = Probe(
    NAME,
    "which label each position is judged on; which offset has the least loss on text",
    probe,
    (
        Plant("labels are shifted twice", lambda: with_loss(2)),
        Plant("labels are not shifted", lambda: with_loss(0)),
        Plant("labels are shifted the wrong way", lambda: with_loss(-1)),
        Plant("rows are joined before the shift", _flattened),
        Plant("an encoder's labels are shifted", lambda: with_loss(1, family="encoder")),
        Plant("a target that is shifted already is shifted again", lambda: with_loss(1, family="encoder-decoder")),
        Plant("trained to predict the token after the next", lambda: counting(2)),
        Plant("trained to repeat its input", lambda: counting(0)),
        Plant("labels are shifted once", lambda: with_loss(1), False, Verdict.CLEAN),
        Plant("an encoder's are not", lambda: with_loss(0, family="encoder"), False, Verdict.CLEAN),
        Plant("an encoder-decoder's are not", lambda: with_loss(0, family="encoder-decoder"), False, Verdict.CLEAN),
        Plant("the loss is a sum", _summed, False, Verdict.CLEAN),
        Plant("trained to predict the next token", lambda: counting(1), False, Verdict.CLEAN),
        Plant("not trained", lambda: replace(planted(), can=Abilities(sample=torch.arange(40)[None])), False),
    ),
)
