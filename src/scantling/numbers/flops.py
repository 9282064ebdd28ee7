"""FLOPs: 2 per multiply-add, matrix products only; norms, softmax, activations and lookups are not counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from scantling.errors import ScantlingInputError
from scantling.parts.part import Step, Workload, total
from scantling.parts.transformer import Transformer

BACKWARD = 2
"""The backward pass computes two products for each one forward: by the input and by the weight (or by q and by k)."""


@dataclass(frozen=True)
class Flops:
    """FLOPs of one pass.

    Attributes:
        forward: attention over the full T x S square, as a kernel without a causal shortcut computes it.
        forward_visible: attention over the pairs that are seen (causal, window): the least a kernel must do.
        by_part: forward, by heading: attention projections, attention scores and mix, mlp, experts, router, head.
        attention_share: scores and mix over all of the blocks' FLOPs (full square, no head).
        attention_share_of_total: scores and mix over all FLOPs.
        attention_share_visible: scores and mix of the pairs that are seen, over the blocks' FLOPs with only those.
        rule_2n: 2 N per token, N the active parameters, embedding and position tables included; of an encoder-decoder
            the encoder's own once per token of the source, the others once per token of the target.
        scores_visible: the products of queries and keys over the pairs that are seen, which a fused kernel computes
            again in its backward instead of reading them back (FlashAttention, arXiv:2205.14135, section 3.1).
        crossover: length T at which scores and mix pass half of the blocks' FLOPs, None without blocks.
    """

    forward: int
    forward_visible: int
    by_part: dict[str, int]
    attention_share: float
    attention_share_of_total: float
    attention_share_visible: float
    rule_2n: int
    scores_visible: int
    crossover: int | None

    @property
    def training(self) -> int:
        """Forward and backward: three times the forward."""
        return self.forward * (1 + BACKWARD)

    @property
    def training_visible(self) -> int:
        """The same over the pairs that are seen."""
        return self.forward_visible * (1 + BACKWARD)

    @property
    def training_kernel(self) -> int:
        """Training over the pairs that are seen, with the scores once more: 7 products of attention instead of 6."""
        return self.training_visible + self.scores_visible

    @property
    def rule_6n(self) -> int:
        """6 N per token."""
        return 3 * self.rule_2n


def flops(model: Transformer, w: Workload) -> Flops:
    """FLOPs of one pass over `w`."""
    steps = list(model.steps(w))
    by_part = _by_part(model, steps)
    forward = total(steps, "flops")
    mix = by_part.get("scores and mix", 0)
    blocks = forward - by_part.get("head", 0)
    visible = total(steps, "flops_visible")
    hidden = forward - visible
    return Flops(
        forward=forward,
        forward_visible=visible,
        by_part=by_part,
        attention_share=mix / blocks if blocks else 0.0,
        attention_share_of_total=mix / forward if forward else 0.0,
        attention_share_visible=(mix - hidden) / (blocks - hidden) if blocks - hidden else 0.0,
        rule_2n=_rule_2n(model, w),
        scores_visible=sum(
            step.flops_visible * step.repeat
            for step in model.steps(replace(w, kernel="reference"))
            if step.path.endswith(":scores")
        ),
        crossover=_crossover(model),
    )


def _rule_2n(model: Transformer, w: Workload) -> int:
    reads = model.encoder.active_params if model.two_stacks and model.encoder is not None else 0
    source = w.sources if w.past == 0 else 0
    return 2 * w.batch * ((model.active_params - reads) * w.tokens + reads * source)


def _by_part(model: Transformer, steps: list[Step]) -> dict[str, int]:
    roles = {path: role for path, _, role in model.walk()}
    sums: Counter[str] = Counter()
    for step in steps:
        path, _, point = step.path.partition(":")
        role = roles[path]
        if role in ("attention", "cross_attention"):
            role = "scores and mix" if point else "attention projections"
        sums[role] += step.flops * step.repeat
    return {role: n for role, n in sums.items() if n}


def _crossover(model: Transformer) -> int | None:
    """Per token, scores and mix grow linearly with T and the rest of the blocks is constant: the T where they meet."""
    one = list(model.steps(Workload(batch=1, tokens=1)))
    by_part = _by_part(model, one)
    mix = by_part.get("scores and mix", 0)
    rest = sum(n for role, n in by_part.items() if role not in ("scores and mix", "head"))
    return -(-rest // mix) if mix else None


def recomputed(model: Transformer, w: Workload) -> int:
    """FLOPs of the part of the forward that a training step over `w` does a second time, by its recompute policy.

    With them a step costs the hardware three forwards and these; its model FLOPs are the three forwards alone
    (Korthikanti et al., arXiv:2205.05198, section 6). What torch's fused attention computes again inside its own
    backward is in neither.
    """
    return total(model.steps(w), "flops_again")


def decode(model: Transformer, past: int, tokens: int, source: int | None = None) -> int:
    """FLOPs of `tokens` decode steps, the first of which reads `past` cached positions and itself.

    Args:
        source: length of an encoder-decoder's source; without one it grows with the target.
    """
    if model.decoder is None:
        raise ScantlingInputError("an encoder has no decode steps")
    first, last = (total(model.steps(Workload(past=p, source=source)), "flops") for p in (past, past + tokens - 1))
    # Every position more costs each step the same, so the steps form an arithmetic series.
    return (first + last) * tokens // 2
