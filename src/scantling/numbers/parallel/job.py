"""What is trained on what, and what a layout of it is predicted to do."""

from __future__ import annotations

from dataclasses import dataclass

from scantling.numbers.parallel.communication import Fabric
from scantling.numbers.parallel.layouts import Layout
from scantling.numbers.parallel.memory import Memory, Precision
from scantling.numbers.parallel.work import Speed
from scantling.parts.transformer import Transformer

OVERLAPS = ("tensor", "data", "pipeline")
"""What can hide behind arithmetic: tensor-parallel exchange in the backward, gradients and weights, sends."""


@dataclass(frozen=True)
class Job:
    """What is trained on what.

    Attributes:
        devices: how many.
        tokens: positions of a row.
        sequences: rows of a step.
        memory: bytes of a device.
        kernel: of the attention, fused or reference.
        overlap: of `OVERLAPS`.
    """

    model: Transformer
    devices: int
    tokens: int
    sequences: int
    speed: Speed
    fabric: Fabric
    memory: int
    precision: Precision
    kernel: str = "fused"
    overlap: frozenset[str] = frozenset(OVERLAPS)

    @property
    def step_tokens(self) -> int:
        """Tokens of a step."""
        return self.tokens * self.sequences


@dataclass(frozen=True)
class Times:
    """Seconds of a step on its critical path.

    Attributes:
        compute: forward and backward of every micro-batch on the slowest rank.
        recompute: what the backward computes again.
        tensor, context, experts, pipeline, data: exchange that is waited for.
        bubble: while pipeline ranks fill and drain.
        optimizer: the update.
    """

    compute: float
    recompute: float
    tensor: float
    context: float
    experts: float
    pipeline: float
    data: float
    bubble: float
    optimizer: float

    @property
    def total(self) -> float:
        """The step."""
        return float(sum(vars(self).values()))

    @property
    def exchange(self) -> float:
        """Everything that waits for a link."""
        return self.tensor + self.context + self.experts + self.pipeline + self.data


@dataclass(frozen=True)
class Estimate:
    """What a layout is predicted to do.

    Attributes:
        micro_batches: passes per step of each replica.
        memory: of the fullest rank.
    """

    layout: Layout
    micro_batches: int
    memory: Memory
    times: Times
