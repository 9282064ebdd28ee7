"""What the updates of a process cost, in time, arithmetic and memory, beside what was predicted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from scantling.data import Batch
from scantling.parts.transformer import Transformer
from scantling.train.forward import Inputs
from scantling.train.ranks import Ranks
from scantling.train.speed import (
    CONVENTION,
    MEMORY_CONVENTION,
    MFU_CONVENTION,
    DocumentFlops,
    Peak,
    memory_bytes,
    training_flops,
)


@dataclass
class Meter:
    """Sums over the updates of this process, the first of several left out: it also pays for caches and compiling.

    Attributes:
        peak: of the device of one rank.
        net_bytes: of weights and buffers.
        predicted_memory: the highest that an update should stand, in bytes; None where nobody predicts it.
        base_memory: in use before the first update; None where the system does not tell.
        most_memory: the most that updates held so far, the net included.
        updates: all of them, the first included.
        tokens, seconds, flops: of all ranks.
    """

    parts: Transformer
    device: torch.device
    ranks: Ranks
    peak: Peak
    net_bytes: int
    predicted_memory: int | None = None
    base_memory: int | None = None
    most_memory: int | None = None
    updates: int = 0
    tokens: int = 0
    seconds: float = 0.0
    flops: int = 0
    _of_documents: DocumentFlops = field(init=False)

    def __post_init__(self) -> None:
        self._of_documents = DocumentFlops(self.parts)

    def count(self, batch: Batch, seconds: float, only: bool) -> int:
        """Add an update; returns its tokens, of all ranks.

        Args:
            only: it is the only one of the run, so that it is not left out.
        """
        work = [float(batch.tokens), float(self._of_documents.of(batch))]
        tokens, flops = (int(value) for value in self.ranks.sums(work, self.device))
        self.updates += 1
        if self.updates > 1 or only:
            self.tokens += tokens
            self.seconds += seconds
            self.flops += flops
        return tokens

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def mfu(self) -> float:
        """Share of the dense peak of all ranks, by `speed.MFU_CONVENTION`."""
        return self.flops / self.seconds / (self.ranks.size * self.peak.flops) if self.seconds else 0.0

    @property
    def seconds_of_one(self) -> float | None:
        """The mean time of an update; None before one is measured."""
        return self.seconds / max(self.updates - 1, 1) if self.seconds else None

    def marked_memory(self) -> int | None:
        """The most that updates held so far, the net included; None where the system does not tell.

        Looks at held-out text and checkpoints are not counted: they let the mark begin anew.
        """
        used = memory_bytes(self.device)
        if used is not None and self.base_memory is not None:
            self.most_memory = max(self.most_memory or 0, used - self.base_memory + self.net_bytes)
        return self.most_memory

    def account(self, batch: Inputs, counted: int | None) -> dict[str, Any]:
        """What was predicted beside what was measured.

        Args:
            batch: a micro-batch.
            counted: FLOPs that torch counted in a pass over it; None where it cannot.
        """
        return {
            "flops_predicted": training_flops(self.parts, batch),
            "flops_counted": counted,
            "convention": CONVENTION,
            "flops_of_updates": self.flops,
            "mfu_convention": MFU_CONVENTION,
            "seconds": self.seconds,
            "seconds_at_peak": self.flops / (self.ranks.size * self.peak.flops),
            "peak": self.peak.flops,
            "peak_source": self.peak.source,
            "mfu": self.mfu,
            "memory_predicted": self.predicted_memory,
            "memory_measured": self.most_memory,
            "memory_convention": MEMORY_CONVENTION,
        }
