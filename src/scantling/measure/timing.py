"""Where the time of a pass goes, measured at the modules' borders, beside where FLOPs and bytes say that it goes."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from scantling.measure.asked import Asked, rows, run, workload
from scantling.measure.figure import Cell, Figure, Line, Plot
from scantling.measure.split import BLOCKS, HEADINGS, crossover, flops_by_heading, heading, seconds_by_heading, share
from scantling.model import Model
from scantling.numbers.flops import half_at
from scantling.numbers.hardware import Device, arithmetic
from scantling.study.calibrate import calibrate

SECONDS = 1.0
"""For measuring what this machine reaches."""


@dataclass
class Clock:
    """Gives every moment of a pass to the innermost module that runs, so that the headings add up to the whole."""

    synchronise: bool = False
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _open: list[str] = field(default_factory=list)
    _last: float = 0.0

    def enter(self, name: str) -> None:
        """A module of this heading begins."""
        self._turn()
        self._open.append(name)

    def leave(self) -> None:
        """The innermost one has ended."""
        self._turn()
        self._open.pop()

    def _turn(self) -> None:
        if self.synchronise:
            torch.accelerator.synchronize()
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._last
        self._last = now


def timing(lm: Model, asked: Asked) -> Figure:
    """Shares of a prefill's time at each length, beside those by FLOPs alone and by each row's roofline here."""
    device = this_device(lm)
    splits = {tokens: _split(lm, asked, tokens, device) for tokens in asked.lengths}
    table: tuple[tuple[Cell, ...], ...] = tuple(
        (tokens, name, 1e3 * s.measured.get(name, 0.0), *s.shares(name))
        for tokens, s in splits.items()
        for name in HEADINGS
        if name in s.measured or name in s.predicted
    )
    columns = ("T", "part", "ms", "share", "share of FLOPs", "share by roofline")
    found = _crossovers(lm, asked, splits, device)
    at = tuple(splits)
    curves = (
        ("measured", [s.measured for s in splits.values()]),
        ("by roofline", [s.predicted for s in splits.values()]),
    )
    lines = tuple(Line(label, at, tuple(map(share, by)), label != "measured") for label, by in curves)
    data = {
        "crossover": found,
        "device": device.source,
        "seconds": {t: sum(s.measured.values()) for t, s in splits.items()},
    }
    plot = Plot("T", "scores and mix, share of the blocks' time", lines, "x")
    return Figure(
        "time", "Where the time of a prefill goes", columns, table, _notes(lm, splits, found, device), (plot,), data
    )


@dataclass(frozen=True)
class Split:
    """Of one length, by heading.

    Attributes:
        measured, predicted: seconds.
        flops: of the fused kernel.
    """

    measured: dict[str, float]
    flops: dict[str, float]
    predicted: dict[str, float]

    def shares(self, name: str) -> tuple[float, ...]:
        """Of one heading: in the time, in the FLOPs, in the predicted time."""
        return tuple(by.get(name, 0.0) / sum(by.values()) for by in (self.measured, self.flops, self.predicted))


def this_device(lm: Model) -> Device:
    """The device that the model is on, with what products and reading are measured to reach there."""
    kind = arithmetic(str(lm.dtype).removeprefix("torch."))
    return calibrate(
        [kind], sum(p.numel() * p.element_size() for p in lm.net.parameters()), SECONDS, str(lm.device)
    ).device


def _split(lm: Model, asked: Asked, tokens: int, device: Device) -> Split:
    w = workload(lm, asked, tokens, "fused")
    return Split(measured(lm, asked, tokens), flops_by_heading(lm.parts, w), seconds_by_heading(lm.parts, w, device))


def measured(lm: Model, asked: Asked, tokens: int) -> dict[str, float]:
    """Seconds by heading, of each the least of all passes: what other programs take is not the model's."""
    ids, passes = rows(lm, asked, tokens), list[dict[str, float]]()
    run(lm, ids)
    for _ in range(asked.passes):
        clock = Clock(lm.device.type != "cpu")
        with clocked(lm, clock):
            run(lm, ids)
        passes.append(clock.seconds)
    return {name: min(seconds[name] for seconds in passes) for name in HEADINGS if name in passes[0]}


@contextmanager
def clocked(lm: Model, clock: Clock) -> Iterator[None]:
    """Every module tells the clock when it begins and ends."""
    roles = {path: role for path, _, role in lm.parts.walk()}
    hooks = []
    for path, module in lm.net.named_modules():
        if path not in roles:
            continue
        name = heading(path, roles[path], isinstance(module, nn.Linear))
        hooks.append(module.register_forward_pre_hook(lambda _, __, name=name: clock.enter(name)))
        hooks.append(module.register_forward_hook(lambda _, __, ___: clock.leave()))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def passing(lengths: Sequence[int], shares: Sequence[float]) -> float | None:
    """The length at which a share passes one half, between two measured ones on a scale of logarithms; None where it
    does not."""
    for (short, low), (long, high) in zip(
        zip(lengths, shares, strict=True), [*zip(lengths, shares, strict=True)][1:], strict=False
    ):
        if low < 0.5 <= high:
            return math.exp(math.log(short) + math.log(long / short) * (0.5 - low) / (high - low))
    return None


def _crossovers(lm: Model, asked: Asked, splits: dict[int, Split], device: Device) -> dict[str, float | None]:
    seen = [*splits], [share(s.measured) for s in splits.values()]
    first = seen[0][0] if seen[1][0] >= 0.5 else passing(*seen)
    halves = half_at(lm.parts)
    return {
        "measured": first,
        "by_roofline": crossover(lm.parts, workload(lm, asked, 1, "fused"), device),
        "by_flops_full": halves["full"],
        "by_flops_causal": halves["causal"],
        "by_flops_visible": halves["visible"],
    }


def _notes(lm: Model, splits: dict[int, Split], found: dict[str, float | None], device: Device) -> tuple[str, ...]:
    longest = max(splits)
    reached = share(splits[longest].measured)
    where = (
        f"at T {found['measured']:,.0f}"
        if found["measured"] is not None
        else f"beyond T {longest:,}, where they have {reached:.0%}"
    )
    said = {name.removeprefix("by_").replace("_", " "): value for name, value in found.items() if name != "measured"}
    texts = [f"{name} {'never' if value is None else f'{value:,.0f}'}" for name, value in said.items()]
    return (
        f"scores and mix pass half of the blocks' time ({', '.join(BLOCKS)}) {where}; predicted: {', '.join(texts)}",
        f"the roofline is of {device.about}: {device.source}",
    )
