"""Quantisation: do fewer bits cost what their rounding explains?"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from scantling.audits import draw
from scantling.audits.ask import could_not
from scantling.audits.draw import Effort
from scantling.audits.finding import Finding, Verdict
from scantling.audits.planted import Tiny
from scantling.audits.planted_subject import planted, subject_of
from scantling.audits.probes.precision import drift
from scantling.audits.protocol import Feed, Subject
from scantling.audits.registry import Plant, Probe

NAME = "quantised"
TIMES = 4.0
"""How much more the logits may move than random rounding of the same size moves them."""


def probe(subject: Subject, effort: Effort) -> list[Finding]:
    """The quantised model against the plain one, beside the plain one whose weights are shaken at random by as much as
    the bits round them."""
    if not subject.can.quantised:
        return [could_not(NAME, "it has no quantised form")]
    module = subject.can.module
    lengths = sorted({draw.length(subject, effort, n) for n in (8, 32, 128)})
    feeds = {n: draw.feed(subject, draw.ids(subject.facts, 1, n, effort.seed)) for n in lengths}
    found = []
    with torch.no_grad():
        for name, (make, bits) in subject.can.quantised.items():
            narrow = make()
            drifts = {n: drift(subject.run(feed), narrow.run(feed)).whole for n, feed in feeds.items()}
            shaken = None
            if module is not None:
                shaken = _shaken(subject, module, bits, feeds[lengths[-1]], effort.seed)
            found.append(_judged(name, bits, drifts, shaken))
    return found


def _judged(name: str, bits: float, drifts: dict[int, float], shaken: float | None) -> Finding:
    size = max(drifts.values())
    data = {"drift by length": {str(n): d for n, d in drifts.items()}, "of random rounding": shaken, "bits": bits}
    if not size < float("inf"):
        return Finding(NAME, Verdict.DEFECT, "the quantised model gives no numbers", size, name, data=data)
    if shaken is None:
        return Finding(
            NAME, Verdict.COULD_NOT_RUN, "its weights cannot be shaken to compare with", size, name, data=data
        )
    if size > TIMES * shaken:
        text = f"{name} moves the logits {size / shaken:.1f} times as much as rounding to {bits:g} bits explains"
        return Finding(NAME, Verdict.DEFECT, text, size, name, data=data, smallest={"tokens": min(drifts)})
    return Finding(NAME, Verdict.ROUNDING, "fewer bits cost what their rounding explains", size, name, data=data)


def _shaken(subject: Subject, module: torch.nn.Module, bits: float, feed: Feed, seed: int) -> float:
    """The drift of weights that are moved at random, each matrix by what rounding blocks of 32 to `bits` moves it."""
    noise = torch.Generator().manual_seed(seed)
    matrices = [p for p in module.parameters() if p.dim() >= 2 and p.is_floating_point()]
    kept = [p.detach().clone() for p in matrices]
    plain = subject.run(feed)
    try:
        for p in matrices:
            p.add_(_rounding(p, bits, noise))
        return drift(plain, subject.run(feed)).whole
    finally:
        for p, was in zip(matrices, kept, strict=True):
            p.copy_(was)


def _rounding(weight: Tensor, bits: float, noise: torch.Generator) -> Tensor:
    """Uniform errors of half a step, where a block of 32 has 2^bits steps between its largest magnitude and its
    negative."""
    flat = weight.detach().float().flatten()
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % 32)).view(-1, 32)
    step = 2 * blocks.abs().amax(-1, keepdim=True) / 2.0**bits
    errors = (torch.rand(blocks.shape, generator=noise).to(blocks) - 0.5) * step
    moved: Tensor = errors.flatten()[: len(flat)].reshape(weight.shape).to(weight.dtype)
    return moved


def in_blocks(weight: Tensor, bits: int, late: int = 0, gain: float = 1.0) -> Tensor:
    """Weights rounded in blocks of 32; with `late`, each block has the scale of the one so many before."""
    blocks = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % 32)).view(-1, 32)
    scale = blocks.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    whole = (blocks / scale.clamp(min=1e-30)).round()
    back = whole * scale.roll(late, 0) * gain
    again: Tensor = back.flatten()[: weight.numel()].reshape(weight.shape)
    return again


def rounded(bits: int, how: Callable[[Tensor], Tensor]) -> Subject:
    """The small Transformer with a quantised form."""
    subject = planted(name=f"{bits} bits")
    net = subject.can.module
    assert isinstance(net, Tiny)

    def make() -> Subject:
        twin = copy.deepcopy(net)
        with torch.no_grad():
            for p in twin.parameters():
                if p.dim() >= 2:
                    p.copy_(how(p))
        return subject_of(twin, subject.name)

    return replace(subject, can=replace(subject.can, quantised={f"{bits} bits": (make, float(bits))}))


PROBE = Probe(
    NAME,
    "whether a quantised form costs what its bits explain",
    probe,
    (
        Plant("each block has its neighbour's scale", lambda: rounded(8, lambda w: in_blocks(w, 8, late=1))),
        Plant("every scale is a tenth too large", lambda: rounded(8, lambda w: in_blocks(w, 8, gain=1.1))),
        Plant("4 bits that are called 8", lambda: rounded(8, lambda w: in_blocks(w, 4))),
        Plant("signs are lost in 4 bits", lambda: rounded(4, lambda w: in_blocks(w, 4).abs())),
        Plant("8 bits", lambda: rounded(8, lambda w: in_blocks(w, 8)), False, Verdict.ROUNDING),
        Plant("4 bits", lambda: rounded(4, lambda w: in_blocks(w, 4)), False, Verdict.ROUNDING),
        Plant("none", planted, False, Verdict.COULD_NOT_RUN),
    ),
)
