"""How the memory of a pass grows with the length, and whether a T x T matrix is stored."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from scantling.measure.asked import KERNELS, Asked, rows, run, workload
from scantling.measure.figure import Figure, Line, Plot
from scantling.measure.slope import Slope, slope
from scantling.model import Model
from scantling.numbers.memory import largest_scores
from scantling.numbers.workspace import working_space
from scantling.units import DTYPE_BYTES


@dataclass(frozen=True)
class Peak:
    """What a pass held beside what was there before it began.

    Attributes:
        bytes: at its highest.
        largest: of its largest single allocation.
    """

    bytes: int
    largest: int


@dataclass(frozen=True)
class Growth:
    """The passes of one kernel over all lengths.

    Attributes:
        scores: bytes of the largest layer's score matrix at each length, if it were stored.
    """

    kernel: str
    lengths: tuple[int, ...]
    peaks: tuple[Peak, ...]
    predicted: tuple[int, ...]
    scores: tuple[int, ...]

    @property
    def measured(self) -> Slope:
        """The exponent of the peak."""
        return slope(self.lengths, [peak.bytes for peak in self.peaks])

    @property
    def expected(self) -> Slope:
        """The exponent of the predicted peak."""
        return slope(self.lengths, self.predicted)

    @property
    def materialised(self) -> bool:
        """Whether T x T is stored: from the second longest row to the longest the peak grows by more than half a score
        matrix more than in proportion to the length."""
        (short, long), (before, after) = self.lengths[-2:], (peak.bytes for peak in self.peaks[-2:])
        bend = after - before * long / short
        square = self.scores[-1] - self.scores[-2] * long / short
        return square > 0 and bend > square / 2


def memory(lm: Model, asked: Asked) -> Figure:
    """Peak of a pass at each length with each kernel; the head reads the last position, so that no logits of all
    positions are among it."""
    grown = [growth(lm, asked, kernel) for kernel in KERNELS]
    table = tuple(
        (g.kernel, tokens, peak.bytes, said, peak.bytes / said, peak.largest, scores)
        for g in grown
        for tokens, peak, said, scores in zip(g.lengths, g.peaks, g.predicted, g.scores, strict=True)
    )
    columns = ("kernel", "T", "peak bytes", "predicted", "ratio", "largest allocation", "one score matrix")
    lines = [
        Line(
            f"{g.kernel}{', predicted' if said else ''}",
            g.lengths,
            g.predicted if said else tuple(p.bytes for p in g.peaks),
            said,
        )
        for g in grown
        for said in (False, True)
    ]
    plot = Plot("T", "bytes", tuple(lines), "xy")
    data = {"kernels": {g.kernel: _data(g) for g in grown}}
    return Figure("memory", "Peak memory of a pass against T", columns, table, tuple(map(_note, grown)), (plot,), data)


def growth(lm: Model, asked: Asked, kernel: str) -> Growth:
    """One kernel at every length."""
    peaks, predicted, scores = [], [], []
    run(lm, rows(lm, asked, min(asked.lengths)), kernel, last_only=True)
    for tokens in asked.lengths:
        ids, w = rows(lm, asked, tokens), replace(workload(lm, asked, tokens, kernel), last_only=True)
        peaks.append(peak(lambda ids=ids: run(lm, ids, kernel, last_only=True), lm.device))  # type: ignore[misc]
        predicted.append(working_space(lm.parts, w, w.dtype))
        scores.append(largest_scores(lm.parts, w) * DTYPE_BYTES[w.dtype])
    return Growth(kernel, asked.lengths, tuple(peaks), tuple(predicted), tuple(scores))


def peak(work: Callable[[], Any], device: torch.device) -> Peak:
    """What `work` allocates at its highest, by torch's own allocator: every byte, inside kernels too."""
    from torch.profiler import ProfilerActivity, profile

    # The profiler's own lines on standard error would stand among ours.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=kinds, profile_memory=True, acc_events=True) as seen:
        work()
    held = highest = largest = 0
    profiler: Any = seen.profiler
    for event in profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            highest, largest = max(highest, held), max(largest, event.nbytes())
    return Peak(highest, largest)


def _data(g: Growth) -> dict[str, Any]:
    return {
        "exponent": g.measured.exponent,
        "interval": [g.measured.low, g.measured.high],
        "predicted_exponent": g.expected.exponent,
        "t_by_t_materialised": g.materialised,
    }


def _note(g: Growth) -> str:
    verdict = "a T x T matrix IS stored" if g.materialised else "no T x T matrix is stored"
    return f"{g.kernel}: peak ~ T^{g.measured}, predicted T^{g.expected.exponent:.2f}: {verdict}"
