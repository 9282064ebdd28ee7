"""Precision: is what 16 bits change rounding, at every length?"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from scantling.audits import draw
from scantling.audits.ask import REFUSALS, could_not
from scantling.audits.draw import Effort
from scantling.audits.finding import Finding, Verdict
from scantling.audits.judge import spread_of, unit_of
from scantling.audits.planted import Tiny
from scantling.audits.planted_subject import planted
from scantling.audits.protocol import Subject
from scantling.audits.registry import Plant, Probe
from scantling.audits.wide import cast

NAME = "precision"
DTYPES = ("bfloat16", "float16")
TIMES = 4.0
"""How much more than float32's own error, scaled by the ratio of the last places, 16 bits may cost. Errors are first
order in the last place, so the ratio is about 1; norms and softmax that stay in float32 make it smaller."""
GROWS = 6.0
"""How much more late positions of a long row may drift than early ones."""


@dataclass(frozen=True)
class Drift:
    """How far a row is from the reference.

    Attributes:
        by_place: root mean square over the vocabulary, per position, over the spread of the logits: (T).
    """

    by_place: Tensor

    @property
    def whole(self) -> float:
        """Root mean square over all positions."""
        return float(self.by_place.square().mean().sqrt())

    @property
    def growth(self) -> float:
        """The last eighth over the median."""
        tokens = len(self.by_place)
        late = float(self.by_place[-max(1, tokens // 8) :].median())
        return late / max(float(self.by_place.median()), 1e-300)


def probe(subject: Subject, effort: Effort) -> list[Finding]:
    """The weights in bfloat16 and float16 against float32, at several lengths, beside what float32's own error (against
    float64) predicts; and whether late positions drift more than early ones."""
    base = cast(subject, "float32")
    if base is None:
        return [could_not(NAME, "it cannot be cast")]
    longest = draw.length(subject, effort, effort.longest)
    lengths = sorted({min(n, longest) for n in (8, 32, 128, longest)})
    precise = cast(subject, "float64")
    rows = {n: draw.feed(subject, draw.ids(subject.facts, 1, n, effort.seed)) for n in lengths}
    with torch.no_grad():
        reference = {n: base.run(feed) for n, feed in rows.items()}
        own = None
        if precise is not None:
            own = drift(precise.run(rows[lengths[-1]]), reference[lengths[-1]]).whole
        found = []
        for dtype in DTYPES:
            narrow = cast(subject, dtype)
            if narrow is None:
                found.append(could_not(NAME, "it cannot be cast", dtype))
                continue
            try:
                outs = {n: narrow.run(feed) for n, feed in rows.items()}
            except (*REFUSALS, RuntimeError) as error:
                found.append(could_not(NAME, f"it does not run: {str(error).splitlines()[0][:120]}", dtype))
                continue
            found.append(_judged(subject, narrow, dtype, {n: (reference[n], outs[n]) for n in lengths}, own, rows))
    return found


def drift(reference: Tensor, out: Tensor) -> Drift:
    """How far `out` is from `reference`, both (1, T, V)."""
    spread = spread_of(reference)
    return Drift((out.double() - reference.double()).square().mean(-1).sqrt()[0].cpu() / spread)


def _judged(
    subject: Subject,
    narrow: Subject,
    dtype: str,
    pairs: dict[int, tuple[Tensor, Tensor]],
    own: float | None,
    rows: dict[int, Any],
) -> Finding:
    longest = max(pairs)
    for n, (_, out) in pairs.items():
        if not bool(out.isfinite().all()):
            return _overflow(subject, narrow, dtype, n, rows[n])
    drifts = {n: drift(a, b) for n, (a, b) in pairs.items()}
    by_length = {str(n): d.whole for n, d in drifts.items()}
    last = drifts[longest]
    data: dict[str, Any] = {"drift by length": by_length, "growth": last.growth}
    size = max(by_length.values())
    if own is not None:
        predicted = max(own, unit_of("float32")) * unit_of(dtype) / unit_of("float32")
        data["predicted"] = predicted
        if size > TIMES * predicted:
            text = f"{dtype} moves the logits {size / predicted:.0f} times as much as rounding explains"
            if subject.facts.routed:
                return Finding(
                    NAME, Verdict.BY_DESIGN, f"{text}: rounding sends tokens to other experts", size, dtype, data=data
                )
            return Finding(NAME, Verdict.DEFECT, text, size, dtype, smallest={"tokens": longest}, data=data)
    if longest > 64 and last.growth > GROWS and not subject.facts.routed:
        text = f"in {dtype} late positions drift {last.growth:.0f} times as much as the median: positions are rounded"
        at = int((last.by_place > GROWS * last.by_place.median()).int().argmax())
        return Finding(
            NAME, Verdict.DEFECT, text, size, f"{dtype}; from position {at} on", smallest={"tokens": at + 1}, data=data
        )
    return Finding(
        NAME, Verdict.ROUNDING, "16 bits cost what their rounding explains, at every length", size, dtype, data=data
    )


def _overflow(subject: Subject, narrow: Subject, dtype: str, tokens: int, feed: Any) -> Finding:
    """Where the first number is lost."""
    first = _first_not_finite(narrow, feed)
    at = f"the first is in {first}" if first else "where, its modules do not tell"
    largest = f"{torch.finfo(getattr(torch, dtype)).max:,.0f}"
    text = f"{dtype} overflows: numbers past {largest}, {at}; bfloat16 has float32's range"
    verdict = Verdict.DEFECT if subject.facts.dtype == dtype or dtype != "float16" else Verdict.BY_DESIGN
    if verdict is Verdict.BY_DESIGN:
        text += f" (its own dtype is {subject.facts.dtype})"
    return Finding(NAME, verdict, text, math.inf, dtype, smallest={"tokens": tokens})


def _first_not_finite(subject: Subject, feed: Any) -> str:
    module, seen = subject.can.module, []
    if module is None:
        return ""

    def watch(name: str) -> Any:
        def hook(_: nn.Module, __: Any, out: Any) -> None:
            values = out if isinstance(out, tuple | list) else (out,)
            if any(isinstance(v, Tensor) and v.is_floating_point() and not bool(v.isfinite().all()) for v in values):
                seen.append(name)

        return hook

    hooks = [m.register_forward_hook(watch(name)) for name, m in module.named_modules() if name]
    try:
        subject.run(feed)
    finally:
        for hook in hooks:
            hook.remove()
    return seen[0] if seen else ""


def _loud(dtype: str) -> Subject:
    """A feed-forward whose output passes what float16 holds."""
    subject = planted(dtype=dtype, name=f"a loud feed-forward in {dtype}")
    net = subject.can.module
    assert isinstance(net, Tiny)
    with torch.no_grad():
        net.get_parameter("blocks.1.down.0.weight").mul_(3e4)
    return subject


def _wrong(dtype: str, how: str) -> Subject:
    """A cast that does more than round."""
    subject = planted(name=how)
    net = subject.can.module
    assert isinstance(net, Tiny)

    def cast_to(wanted: str) -> Subject:
        twin = subject.can.cast(wanted)  # type: ignore[misc]
        module = twin.can.module
        if wanted == dtype and isinstance(module, Tiny):
            with torch.no_grad():
                module.head.weight.mul_(0.5) if how == "a halved head" else module.final.zero_().add_(1.25)
        return twin

    return replace(subject, can=replace(subject.can, cast=cast_to))


PROBE = Probe(
    NAME,
    "whether bfloat16 and float16 cost what their rounding explains, at every length",
    probe,
    (
        Plant("positions are cast with the weights", lambda: planted("positions in the weights' dtype")),
        Plant("a cast that halves the head", lambda: _wrong("bfloat16", "a halved head")),
        Plant("a cast that stretches the last norm", lambda: _wrong("float16", "a stretched norm")),
        Plant("float16 weights that overflow", lambda: _loud("float16")),
        Plant("sound", planted, False, Verdict.ROUNDING),
        Plant("sound, waves", lambda: planted(position="sinusoidal"), False, Verdict.ROUNDING),
        Plant("float32 weights that float16 cannot hold", lambda: _loud("float32"), False, Verdict.BY_DESIGN),
        Plant("sound, from bfloat16", lambda: planted(dtype="bfloat16"), False, Verdict.ROUNDING),
    ),
)
