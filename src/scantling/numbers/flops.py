"""FLOPs: 2 per multiply-add, matrix products only; norms, softmax, activations and lookups are not counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from scantling.errors import ScantlingInputError
from scantling.parts.part import FREE, Cost, Step, Workload, total
from scantling.parts.transformer import Transformer

CONVENTIONS: Mapping[str, str] = {
    "full": "attention over the whole T x S square",
    "causal": "of causal layers the pairs whose key is not after the query, T (T + 1) / 2; windows ignored",
    "visible": "attention over exactly the pairs that the layers let be seen, windows included",
}
"""How the pairs of scores and mix are counted; all other products cost the same in each."""
BACKWARD = 2
"""The backward pass computes two products for each one forward: by the input and by the weight (or by q and by k)."""
MIX = "scores and mix"
HALF_SEARCHED = 2**40
"""Lengths beyond this are not looked at."""


@dataclass(frozen=True)
class Flops:
    """FLOPs of one pass.

    Attributes:
        costs: forward, in every convention, by heading: attention projections, scores and mix, mlp, experts, router,
            head.
        rule_2n: 2 N per token, N the active parameters, embedding and position tables included; of an encoder-decoder
            the encoder's own once per token of the source, the others once per token of the target.
    """

    costs: Mapping[str, Cost]
    rule_2n: int

    @property
    def cost(self) -> Cost:
        """Forward, all parts together."""
        return added(self.costs.values())

    @property
    def by_part(self) -> dict[str, int]:
        """Forward by heading, over the full square."""
        return {role: cost.full for role, cost in self.costs.items()}

    @property
    def forward(self) -> int:
        """Attention over the full T x S square, as a kernel without a causal shortcut computes it."""
        return self.cost.full

    @property
    def forward_causal(self) -> int:
        """Attention over the causal half."""
        return self.cost.causal

    @property
    def forward_visible(self) -> int:
        """Attention over the pairs that are seen: the least a kernel must do."""
        return self.cost.visible

    @property
    def training(self) -> int:
        """Forward and backward: three times the forward."""
        return self.forward * (1 + BACKWARD)

    @property
    def training_causal(self) -> int:
        """The same over the causal half."""
        return self.forward_causal * (1 + BACKWARD)

    @property
    def training_visible(self) -> int:
        """The same over the pairs that are seen."""
        return self.forward_visible * (1 + BACKWARD)

    @property
    def rule_6n(self) -> int:
        """6 N per token."""
        return 3 * self.rule_2n

    @property
    def attention_share(self) -> float:
        """Scores and mix over all of the blocks' FLOPs (full square, no head)."""
        return self.share("full")

    @property
    def attention_share_visible(self) -> float:
        """The same over the pairs that are seen."""
        return self.share("visible")

    @property
    def attention_share_of_total(self) -> float:
        """Scores and mix over all FLOPs (full square)."""
        return self.share("full", of_total=True)

    def share(self, convention: str, of_total: bool = False) -> float:
        """Scores and mix over the blocks' FLOPs, or over all."""
        counted = {role: getattr(cost, convention) for role, cost in self.costs.items()}
        whole = sum(counted.values()) - (0 if of_total else counted.get("head", 0))
        return counted.get(MIX, 0) / whole if whole else 0.0


def added(costs: Iterable[Cost]) -> Cost:
    """The sum of costs, each convention by itself."""
    return Cost(*(sum(column) for column in zip(FREE, *costs, strict=True)))


def flops(model: Transformer, w: Workload) -> Flops:
    """FLOPs of one pass over `w`."""
    return Flops(costs(model, model.steps(w)), _rule_2n(model, w))


def costs(model: Transformer, steps: Iterable[Step]) -> dict[str, Cost]:
    """FLOPs of rows by heading."""
    roles = {path: role for path, _, role in model.walk()}
    sums: dict[str, Cost] = {}
    for step in steps:
        path, _, point = step.path.partition(":")
        role = roles[path]
        if role in ("attention", "cross_attention"):
            role = MIX if point else "attention projections"
        if any(step.cost):
            sums[role] = added((sums.get(role, FREE), step.cost.scaled(step.repeat)))
    return sums


def _rule_2n(model: Transformer, w: Workload) -> int:
    reads = model.encoder.active_params if model.two_stacks and model.encoder is not None else 0
    source = w.sources if w.past == 0 else 0
    return 2 * w.batch * ((model.active_params - reads) * w.tokens + reads * source)


def half_at(model: Transformer, source: int | None = None) -> dict[str, int | None]:
    """For each convention the shortest T from which on scores and mix are half of the blocks' FLOPs or more.

    None where no length up to `HALF_SEARCHED` is: there are no blocks, or windows keep the pairs few.

    Args:
        source: length of an encoder-decoder's source; without one it grows with the target.
    """
    short = [flops(model, Workload(tokens=t, source=source)).costs for t in (1, 2, 3)]
    found = {name: _root(*(_ahead(costs, name) for costs in short)) for name in ("full", "causal")}
    return found | {"visible": _visible_half(model, source, found["causal"])}


def _ahead(costs: Mapping[str, Cost], name: str) -> int:
    """By how much scores and mix are more than the rest of the blocks."""
    rest = sum(cost.full for role, cost in costs.items() if role not in (MIX, "head"))
    return int(getattr(costs.get(MIX, FREE), name)) - rest


def _root(one: int, two: int, three: int) -> int | None:
    """The least T from which on a quadratic in T, given at 1, 2 and 3, is not negative; None where it is a line."""
    slope, bend = two - one, three - 2 * two + one

    def value(t: int) -> int:
        return one + (t - 1) * slope + (t - 1) * (t - 2) // 2 * bend

    if bend <= 0:
        return None
    # Its least value is there, and behind it grows.
    low = max(1, 1 - slope // bend)
    if value(low) >= 0:
        return 1
    high = 2 * low
    while value(high) < 0:
        low, high = high, 2 * high
    return _first(lambda t: value(t) >= 0, low, high)


def _visible_half(model: Transformer, source: int | None, causal: int | None) -> int | None:
    """The length from which the pairs that are seen cost half: never shorter than that of the causal half."""

    def reached(tokens: int) -> bool:
        return flops(model, Workload(tokens=tokens, source=source)).share("visible") >= 0.5

    if causal is None or not reached(HALF_SEARCHED):
        return None
    low, high = causal - 1, causal
    while not reached(high):
        low, high = high, 2 * high
    return _first(reached, low, high)


def _first(reached: Callable[[int], bool], low: int, high: int) -> int:
    """The least number that reaches it, where `low` does not and `high` does."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


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
