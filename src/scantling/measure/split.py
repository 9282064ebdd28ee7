"""Where the time of a pass should go: each row of the trace at the peak or at the bandwidth, whichever binds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from scantling.numbers.hardware import Device, arithmetic
from scantling.parts.dims import elements
from scantling.parts.leaf import Linear
from scantling.parts.part import Step, Workload
from scantling.parts.transformer import Transformer
from scantling.units import DTYPE_BYTES

PROJECTIONS, MIX, MLP, NORM, HEAD = "attention projections", "scores and mix", "mlp", "norm", "head"
EMBEDDING, OTHER = "embedding", "other"
HEADINGS = (EMBEDDING, PROJECTIONS, MIX, MLP, NORM, HEAD, OTHER)
BLOCKS = (PROJECTIONS, MIX, MLP, NORM, OTHER)
"""The headings of what grows with the number of layers."""
LONGEST = 2**24
"""Lengths beyond this are not looked at."""


def heading(path: str, role: str, product: bool) -> str:
    """The heading of a module, or of a row of the trace.

    Args:
        product: it is one of the matrices of attention, and not what stands between them.
    """
    if role in ("attention", "cross_attention"):
        return PROJECTIONS if product else MIX
    if role in (NORM, HEAD):
        return role
    if role in ("mlp", "experts", "router") or "mlp" in path.split("."):
        return MLP
    return OTHER if ".blocks." in path else EMBEDDING


def flops_by_heading(model: Transformer, w: Workload) -> dict[str, float]:
    """FLOPs that the kernel computes: of the reference kernel over the full square, of the fused over what is seen."""
    sums: defaultdict[str, float] = defaultdict(float)
    for name, step in _rows(model, w):
        sums[name] += _flops(step, w) * step.repeat
    return _ordered(sums)


def seconds_by_heading(model: Transformer, w: Workload, device: Device) -> dict[str, float]:
    """The roofline of each row, added up: FLOPs at the dense peak or bytes at the bandwidth, whichever takes longer.

    A row reads its factors and writes its output; one that is no product reads as much as it writes.
    Williams, Waterman, Patterson: Roofline (CACM 52/4, 2009).
    """
    rate, bandwidth = device.peak(arithmetic(w.dtype)), device.bandwidth
    sums: defaultdict[str, float] = defaultdict(float)
    for name, step in _rows(model, w):
        sums[name] += max(_flops(step, w) / rate, _bytes(step, w) / bandwidth) * step.repeat
    return _ordered(sums)


def crossover(model: Transformer, w: Workload, device: Device) -> int | None:
    """The shortest T from which scores and mix take half of the blocks' predicted time or more; None if no length up
    to `LONGEST` does."""

    def reached(tokens: int) -> bool:
        source = tokens if model.two_stacks else None
        return share(seconds_by_heading(model, replace(w, tokens=tokens, source=source), device)) >= 0.5

    if not reached(LONGEST):
        return None
    low, high = 0, LONGEST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def share(by_heading: dict[str, float]) -> float:
    """Scores and mix among all that is in the blocks."""
    blocks = sum(by_heading.get(name, 0.0) for name in BLOCKS)
    return by_heading.get(MIX, 0.0) / blocks if blocks else 0.0


def _rows(model: Transformer, w: Workload) -> Iterable[tuple[str, Step]]:
    parts = {path: (part, role) for path, part, role in model.walk()}
    for step in model.steps(w):
        path, _, point = step.path.partition(":")
        part, role = parts[path]
        if path or point.endswith("scaled"):
            yield heading(path, role, isinstance(part, Linear) and not point), step


def _flops(step: Step, w: Workload) -> int:
    return step.cost.full if w.kernel == "reference" else step.cost.visible


def _bytes(step: Step, w: Workload) -> int:
    if not step.stored:
        return 0
    size = DTYPE_BYTES[step.dtype or w.dtype]
    if not step.cost.full:
        return 2 * step.numel * size
    # What a kernel keeps to itself, as the fused one does the weights of attention, is not read from memory.
    read = sum(elements(factor.dims) for factor in step.factors if factor.stored)
    return (read + step.numel) * size


def _ordered(sums: dict[str, float]) -> dict[str, float]:
    return {name: sums[name] for name in HEADINGS if sums[name]}
