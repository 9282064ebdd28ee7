"""FLOPs by phase: reading the prompt, one decode step, one training step with what is computed again in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from scantling.numbers.flops import BACKWARD, MIX, added, costs, flops
from scantling.parts.part import FREE, Cost, Workload
from scantling.parts.transformer import Transformer

AGAIN = "forward again, {} recompute"
"""What a recompute policy does a second time."""


@dataclass(frozen=True)
class Phase:
    """One phase.

    Attributes:
        name: prefill, decode or training; of an encoder forward instead of prefill.
        work: the pass.
        forward: FLOPs of the forward by heading.
        passes: how often the model's own FLOPs contain the forward: 1, or 3 with a backward.
        again: what is computed a second time in the backward, by who does it; no part of the model's own FLOPs.
    """

    name: str
    work: Workload
    forward: Mapping[str, Cost]
    passes: int = 1
    again: Mapping[str, Cost] = field(default_factory=dict)

    @property
    def by_part(self) -> dict[str, Cost]:
        """The model's own FLOPs by heading."""
        return {role: cost.scaled(self.passes) for role, cost in self.forward.items()}

    @property
    def model(self) -> Cost:
        """The model's own FLOPs: what an MFU is made of (arXiv:2204.02311, appendix B)."""
        return added(self.by_part.values())

    @property
    def hardware(self) -> Cost:
        """The model's own and what is computed again: what an HFU is made of."""
        return added((self.model, *self.again.values()))

    @property
    def share(self) -> float:
        """Scores and mix over all of the model's own FLOPs, full square."""
        return self.by_part.get(MIX, FREE).full / self.model.full if self.model.full else 0.0


def decode_step(w: Workload) -> Workload:
    """The step that brings the last token of `w`, everything before it in the cache."""
    return replace(w, tokens=1, past=w.keys - 1, source=w.sources)


def phases(model: Transformer, w: Workload) -> list[Phase]:
    """The phases of rows of `w.tokens` new positions after `w.past`: the last of them is the one that is decoded.

    A training step is among them where nothing is cached; what `w.recompute` does a second time is in its `again`.
    """
    return list(_phases(model, w))


def _phases(model: Transformer, w: Workload) -> Iterator[Phase]:
    if w.past == 0 or w.tokens > 1:
        prefill = replace(w, last_only=model.decoder is not None, training=False)
        yield Phase("forward" if model.decoder is None else "prefill", prefill, flops(model, prefill).costs)
    if model.decoder is not None and w.keys > 1:
        step = decode_step(replace(w, training=False))
        yield Phase("decode", step, flops(model, step).costs)
    if w.past == 0:
        training = replace(w, training=True)
        steps = list(model.steps(training))
        again = {AGAIN.format(w.recompute): added(step.again.scaled(step.repeat) for step in steps)}
        if w.kernel == "fused":
            again["q k^T again, inside a fused kernel"] = _scores(model, training)
        done = {what: cost for what, cost in again.items() if any(cost)}
        yield Phase("training", training, costs(model, steps), 1 + BACKWARD, done)


def _scores(model: Transformer, w: Workload) -> Cost:
    """One product of queries and keys per layer: a fused kernel keeps no weights and makes them anew (arXiv:2205.14135,
    section 3.1), so that its backward has five products and not four."""
    reference = model.steps(replace(w, kernel="reference"))
    return added(step.cost.scaled(step.repeat) for step in reference if step.path.endswith(":scores"))
