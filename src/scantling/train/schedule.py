"""Learning rates by step: a factor on the peak rate, in warm-up and after it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scantling.errors import ScantlingInputError

KINDS = ("constant", "cosine", "linear", "wsd", "inverse_sqrt")


@dataclass(frozen=True)
class Schedule:
    """The factor on the peak rate at each update.

    Attributes:
        kind: ``constant``; ``cosine`` and ``linear`` fall from 1 to `final` between warm-up and the end; ``wsd`` stays
            at 1 and falls linearly over the last `decay` updates (warm-up, stable, decay: arXiv:2404.06395, section 4);
            ``inverse_sqrt`` is sqrt(warmup / step) (Noam: arXiv:1706.03762, eq. 3, whose peak is
            (d_model * warmup)^-0.5).
        steps: updates in all.
        warmup: updates over which the factor rises linearly from 0: update n of the warm-up, from 0, has
            (n + 1) / warmup, so the first one already moves the weights.
        final: the factor that cosine, linear and wsd end at.
        decay: updates of the last stage of wsd.
    """

    kind: str
    steps: int
    warmup: int = 0
    final: float = 0.0
    decay: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ScantlingInputError(f"no schedule {self.kind!r}: use one of {', '.join(KINDS)}")
        if self.steps < 1 or self.warmup < 0 or self.decay < 0 or not 0 <= self.final <= 1:
            raise ScantlingInputError(
                f"a schedule of {self.steps} steps, {self.warmup} of warm-up, {self.decay} of decay to {self.final} of "
                "the peak: at least 1 step, none negative, and a final factor from 0 to 1 are needed"
            )
        if self.warmup + self.decay > self.steps:
            raise ScantlingInputError(
                f"warm-up ({self.warmup}) and decay ({self.decay}) take more updates than the {self.steps} of the run"
            )

    def factor(self, step: int) -> float:
        """At update `step`, counted from 0; past the end, the last one's."""
        n = step + 1
        if n < self.warmup:
            return n / self.warmup
        n = min(n, self.steps)
        if self.kind == "constant":
            return 1.0
        if self.kind == "inverse_sqrt":
            return math.sqrt(max(self.warmup, 1) / max(n, self.warmup, 1))
        start = self.steps - self.decay if self.kind == "wsd" else self.warmup
        if n <= start or self.steps == start:
            return 1.0
        done = (n - start) / (self.steps - start)
        falling = 0.5 * (1 + math.cos(math.pi * done)) if self.kind == "cosine" else 1 - done
        return self.final + (1 - self.final) * falling
