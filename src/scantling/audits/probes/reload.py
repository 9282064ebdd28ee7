"""Save and load: is it the same model afterwards?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from scantling.audits import draw
from scantling.audits.ask import Question, Shown, ask, could_not, listed
from scantling.audits.draw import Effort
from scantling.audits.finding import Finding, Verdict
from scantling.audits.planted import Tiny
from scantling.audits.planted_subject import planted, subject_of
from scantling.audits.protocol import Change, Subject
from scantling.audits.registry import Plant, Probe

NAME = "reload"
GOOD = "saved and loaded, it is the same model"


def probe(subject: Subject, effort: Effort) -> list[Finding]:
    """Logits before and after, and every weight by name, shape, dtype and value."""
    if subject.can.reload is None:
        return [could_not(NAME, "it cannot be saved and loaded")]
    again = subject.can.reload(lambda _: None)
    question = Question(NAME, "logits", _logits(again, effort.seed), "saved and loaded, it gives other logits", GOOD)
    # Only what was saved can be compared: a cast to float64 was not.
    plain = replace(subject, can=replace(subject.can, cast=None))
    # Longer rows than this depend on what ran before in models that remember the longest one.
    most = effort.tokens if subject.facts.switch is None else max(2, subject.facts.switch // 2)
    return [ask(plain, question, draw.length(subject, effort, most)), *_weights(subject, again)]


def _logits(again: Subject, seed: int) -> Callable[[Subject, int], tuple[Tensor, Tensor, Shown]]:
    def measure(subject: Subject, tokens: int) -> tuple[Tensor, Tensor, Shown]:
        feed = draw.feed(subject, draw.ids(subject.facts, 1, tokens, seed))
        return subject.run(feed), again.run(feed), {"ids": listed(feed.ids)}

    return measure


def _weights(subject: Subject, again: Subject) -> list[Finding]:
    if subject.can.module is None or again.can.module is None:
        return []
    before = dict(subject.can.module.named_parameters())
    after = dict(again.can.module.named_parameters())
    if lost := sorted(before.keys() ^ after.keys()):
        text = f"saved and loaded, it has other weights: {lost[0]!r}" + (f" and {len(lost) - 1} more" * (len(lost) > 1))
        return [Finding(NAME, Verdict.DEFECT, text, float(len(lost)), "weights", "weights")]
    for name, weight in before.items():
        new = after[name]
        if weight.dtype != new.dtype or weight.shape != new.shape:
            was, now = (f"{str(w.dtype).removeprefix('torch.')} {tuple(w.shape)}" for w in (weight, new))
            return [Finding(NAME, Verdict.DEFECT, f"{name!r} was {was} and is {now}", 1.0, "weights", "weights")]
        if not torch.equal(weight.detach().cpu(), new.detach().cpu()):
            return [Finding(NAME, Verdict.DEFECT, f"{name!r} has other values", 1.0, "weights", "weights")]
    return [Finding(NAME, Verdict.CLEAN, GOOD, 0.0, "weights")]


def _changed(how: Callable[[Tiny], None], name: str) -> Subject:
    """Something is done to the weights on the way."""
    subject = planted(name=name)
    whole = subject.can.reload
    assert whole is not None

    def again(change: Change) -> Subject:
        net = whole(change).can.module
        assert isinstance(net, Tiny)
        with torch.no_grad():
            how(net)
        return subject_of(net, name)

    return replace(subject, can=replace(subject.can, reload=again))


def _fresh(net: Tiny) -> None:
    net.blocks[0].get_parameter("q.weight").normal_()


def _half(net: Tiny) -> None:
    net.half().float()


def _swapped(net: Tiny) -> None:
    q, k = net.blocks[1].get_parameter("q.weight"), net.blocks[1].get_parameter("k.weight")
    kept = q.clone()
    q.copy_(k)
    k.copy_(kept)


def _table() -> Subject:
    """A random projection that is not saved is drawn anew."""
    sound = planted(name="a buffer that is not saved")

    def projected(seed: int) -> Subject:
        mixing = torch.randn(41, 41, generator=torch.Generator().manual_seed(seed)) * 0.1 + torch.eye(41)
        return replace(sound, run=lambda feed: sound.run(feed) @ mixing)

    first = projected(0)
    return replace(first, can=replace(first.can, reload=lambda _: projected(1)))


PROBE = Probe(
    NAME,
    "whether it is the same model after saving and loading",
    probe,
    (
        Plant("a matrix is drawn anew", lambda: _changed(_fresh, "a matrix drawn anew")),
        Plant("saved in half the bits", lambda: _changed(_half, "saved in half the bits")),
        Plant("queries and keys change places", lambda: _changed(_swapped, "queries and keys swapped")),
        Plant("a buffer is not saved and drawn anew", _table),
        Plant("sound", planted, False, Verdict.CLEAN),
        Plant("sound, tied", lambda: planted(tied=True), False, Verdict.CLEAN),
        Plant("sound, in bfloat16", lambda: planted(dtype="bfloat16"), False, Verdict.CLEAN),
    ),
)
