"""The residual stream: its size by depth, what each block adds, and its outliers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scantling.measure.asked import Asked, rows, run
from scantling.measure.figure import Figure, Line, Plot
from scantling.model import Model

NORMAL_KURTOSIS = 3.0


@dataclass(frozen=True)
class Layer:
    """One block's pass over the rows.

    Attributes:
        path: of the block.
        rms_in, rms_out, rms_added: root mean squares of what it reads, what it gives, and the difference.
        peak: the largest size of an element that it gives, over `rms_out`.
        kurtosis: the mean of the fourth powers over the square of that of the squares; 3 of normal numbers.
        channel, token: where the largest element is.
        elements: of the stream.
    """

    path: str
    rms_in: float
    rms_out: float
    rms_added: float
    peak: float
    kurtosis: float
    channel: int
    token: int
    elements: int

    @property
    def normal_peak(self) -> float:
        """What the mean of `peak` stays below where all elements are normal numbers: sqrt(2 ln 2n)."""
        return math.sqrt(2 * math.log(2 * self.elements))


def stream(lm: Model, asked: Asked) -> list[Layer]:
    """Every block of every stack, in the order of execution."""
    found: list[Layer] = []
    hooks = []
    for name in lm.parts.stacks:
        stack: Any = getattr(lm.net, name)
        for i, block in enumerate(stack.blocks):
            path = f"{name}.blocks.{i}"
            hooks.append(
                block.register_forward_hook(
                    lambda _, given, out, path=path: found.append(layer(path, given[0].detach(), out.detach()))
                )
            )
    try:
        run(lm, rows(lm, asked, asked.length))
    finally:
        for hook in hooks:
            hook.remove()
    return found


def layer(path: str, x: Tensor, out: Tensor) -> Layer:
    """Of a block that reads x (B, T, d) and gives `out`."""
    x, out = x.double(), out.double()
    square = float((out**2).mean())
    at = int(out.abs().argmax())
    return Layer(
        path=path,
        rms_in=float((x**2).mean().sqrt()),
        rms_out=math.sqrt(square),
        rms_added=float(((out - x) ** 2).mean().sqrt()),
        peak=float(out.abs().max()) / max(math.sqrt(square), torch.finfo(torch.float64).tiny),
        kurtosis=float((out**4).mean()) / max(square**2, torch.finfo(torch.float64).tiny),
        channel=at % out.shape[-1],
        token=at // out.shape[-1] % out.shape[-2],
        elements=out.numel(),
    )


def residual(lm: Model, asked: Asked) -> Figure:
    """The stream's size after each block, beside what uncorrelated additions, or the norm on the output, make of it."""
    layers = stream(lm, asked)
    expected = _expected(lm, layers)
    table = tuple((x.path, x.rms_out, said, x.rms_added) for x, said in zip(layers, expected, strict=True))
    at = tuple(range(len(layers)))
    lines = (
        Line("measured", at, tuple(x.rms_out for x in layers)),
        Line("predicted", at, tuple(expected), True),
    )
    out = "out" in lm.card.norm.at
    how = (
        "the size of the output norm's gain"
        if out
        else "the squares of all that was added, summed: additions that have nothing to do with each other"
    )
    columns = ("block", "rms of the stream", "predicted", "rms added")
    plots = (Plot("block", "root mean square", lines, "y"),) if layers else ()
    return Figure("residual", "Size of the residual stream by depth", columns, table, (f"predicted: {how}",), plots)


def _expected(lm: Model, layers: list[Layer]) -> list[float]:
    modules: dict[str, Any] = dict(lm.net.named_modules())
    found: list[float] = []
    for i, x in enumerate(layers):
        first = x.path.endswith(".blocks.0")
        gains = [m for n, m in modules[x.path].named_children() if n.endswith("_out_norm")]
        if gains:
            gain = gains[-1].weight.detach().double()
            shift = getattr(gains[-1], "bias", None)
            square = float((gain**2).mean()) + (0.0 if shift is None else float((shift.detach().double() ** 2).mean()))
            found.append(math.sqrt(square))
        else:
            found.append(math.hypot(x.rms_in if first else found[i - 1], x.rms_added))
    return found


def outliers(lm: Model, asked: Asked) -> Figure:
    """How far the stream's largest element stands out after each block, beside normal numbers."""
    layers = stream(lm, asked)
    table = tuple((x.path, x.peak, x.normal_peak, x.kurtosis, NORMAL_KURTOSIS, x.channel, x.token) for x in layers)
    columns = ("block", "max / rms", "normal at most", "kurtosis", "normal", "channel", "token")
    at = tuple(range(len(layers)))
    lines = (
        Line("max / rms", at, tuple(x.peak for x in layers)),
        Line("normal numbers at most", at, tuple(x.normal_peak for x in layers), True),
    )
    far = [x for x in layers if x.peak > 2 * x.normal_peak]
    note = "no block's output has an element beyond twice what normal numbers reach"
    if far:
        most = max(far, key=lambda x: x.peak)
        note = (
            f"{len(far)} of {len(layers)} blocks have outliers beyond twice what normal numbers reach; the farthest: "
            f"channel {most.channel}, token {most.token} after {most.path}, {most.peak:,.1f} times the rms"
        )
    plots = (Plot("block", "largest element over rms", lines, "y"),) if layers else ()
    return Figure(
        "outliers",
        "Outliers of the residual stream",
        columns,
        table,
        (note,),
        plots,
        {"blocks_with_outliers": len(far)},
    )
