"""A cache in few bits: does it cost what its bits explain?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from scantling.audits import draw
from scantling.audits.ask import could_not, not_applicable
from scantling.audits.draw import Effort
from scantling.audits.finding import Finding, Verdict
from scantling.audits.planted import Tiny
from scantling.audits.planted_pass import steps_of
from scantling.audits.planted_subject import cached, planted
from scantling.audits.probes.cache import same_places
from scantling.audits.probes.precision import drift
from scantling.audits.protocol import Cached, Feed, Narrow, Subject
from scantling.audits.registry import Plant, Probe

NAME = "kept"
TIMES = 4.0
"""How much more the logits may move than random rounding of the same size moves them."""


def probe(subject: Subject, effort: Effort) -> list[Finding]:
    """Decoding over the narrow cache against the plain pass, beside a cache whose vectors are moved at random by as
    much as the bits round them."""
    if subject.facts.family == "encoder":
        return [not_applicable(NAME, "an encoder reads both ways and keeps no cache")]
    if not subject.can.kept:
        return [could_not(NAME, "it has no cache in fewer bits")]
    lengths = sorted({draw.length(subject, effort, n) for n in (8, 32, 128)})
    feeds = {n: draw.feed(subject, draw.ids(subject.facts, 1, n, effort.seed)) for n in lengths}
    found = []
    with torch.no_grad():
        for name, kept in subject.can.kept.items():
            drifts = {n: _drift(subject, kept.run, feed) for n, feed in feeds.items()}
            moved = {n: _drift(subject, kept.moved, feed) for n, feed in feeds.items()}
            found.append(_judged(subject, name, kept.bits, drifts, moved))
    return found


def _drift(subject: Subject, run: Cached, feed: Feed) -> float:
    tokens = feed.ids.shape[1]
    pieces = [n for n in (tokens // 2, tokens - tokens // 2 - 1, 1) if n]
    out = run(feed, pieces)
    return drift(same_places(subject.run(feed), out, pieces), out).whole


def _judged(subject: Subject, name: str, bits: float, drifts: dict[int, float], moved: dict[int, float]) -> Finding:
    size, at = max((d / max(moved[n], 1e-30), n) for n, d in drifts.items())
    data = {
        "drift by length": {str(n): d for n, d in drifts.items()},
        "of random rounding": {str(n): d for n, d in moved.items()},
        "bits": bits,
    }
    if not max(drifts.values()) < float("inf"):
        return Finding(NAME, Verdict.DEFECT, "decoding over it gives no numbers", float("inf"), name, data=data)
    if size > TIMES:
        text = f"{name} moves the logits {size:.1f} times as much as rounding to {bits:g} bits explains"
        if subject.facts.routed:
            said = f"{text}: rounding sends tokens to other experts"
            return Finding(NAME, Verdict.BY_DESIGN, said, drifts[at], name, data=data)
        return Finding(NAME, Verdict.DEFECT, text, drifts[at], name, data=data, smallest={"tokens": at})
    said = "fewer bits in the cache cost what their rounding explains"
    return Finding(NAME, Verdict.ROUNDING, said, max(drifts.values()), name, data=data)


def rounded(x: Tensor, bits: int, late: int = 0, gain: float = 1.0) -> Tensor:
    """Vectors (..., T, D) in steps of their largest value; with `late`, each in those of the one so many before."""
    step = steps_of(x, bits)
    return (x / step).round() * step.roll(late, -2) * gain


def keeping(bits: int, how: Callable[[Tensor], Tensor], **shape: Any) -> Subject:
    """The small Transformer with a cache that keeps what `how` makes of keys and values."""
    subject = planted(name=f"a cache in {bits} bits", **shape)
    net = subject.can.module
    assert isinstance(net, Tiny)
    noise = torch.Generator().manual_seed(12)

    def moved(x: Tensor) -> Tensor:
        return x + (torch.rand(x.shape, generator=noise) - 0.5) * steps_of(x, bits)

    narrow = Narrow(cached(net, how), cached(net, moved), float(bits))
    return replace(subject, can=replace(subject.can, kept={f"{bits} bits": narrow}))


def _first_only(x: Tensor) -> Tensor:
    """Every vector in the steps of the first one: large ones are cut off."""
    step = steps_of(x, 8)[..., :1, :]
    return (x / step).round().clamp(-127, 127) * step / 2


PROBE = Probe(
    NAME,
    "whether a cache in fewer bits costs what its bits explain",
    probe,
    (
        Plant("each vector has its neighbour's scale", lambda: keeping(8, lambda x: rounded(x, 8, late=1))),
        Plant("every scale is a tenth too large", lambda: keeping(8, lambda x: rounded(x, 8, gain=1.1))),
        Plant("4 bits that are called 8", lambda: keeping(8, lambda x: rounded(x, 4))),
        Plant("signs are lost", lambda: keeping(8, lambda x: rounded(x, 8).abs())),
        Plant("one scale for all, and too small", lambda: keeping(8, _first_only)),
        Plant("8 bits", lambda: keeping(8, lambda x: rounded(x, 8)), False, Verdict.ROUNDING),
        Plant("4 bits", lambda: keeping(4, lambda x: rounded(x, 4)), False, Verdict.ROUNDING),
        Plant("8 bits and a window", lambda: keeping(8, lambda x: rounded(x, 8), window=5), False, Verdict.ROUNDING),
        Plant("none", planted, False, Verdict.COULD_NOT_RUN),
    ),
)
