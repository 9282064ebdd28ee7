"""One update: micro-batches to gradients, gradients judged, and only then the weights moved."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from scantling.data.mixing import mix
from scantling.model import Model
from scantling.tensor.router_losses import Routing
from scantling.train.balance import Balance
from scantling.train.division import Division
from scantling.train.forward import How, Inputs, forward, watched
from scantling.train.optim import Optimizers, clip, total_norm
from scantling.train.ranks import ALONE, Ranks

WINDOW = 50
"""Updates whose mean norm a spike is compared with."""


@dataclass(frozen=True)
class Outcome:
    """Of one update that was made or not.

    Attributes:
        loss: mean negative log-probability of the judged tokens of all micro-batches and ranks, in nats.
        objective: what was minimised: with smoothing, z-loss and the losses of routers.
        tokens: judged.
        norm: of the gradient before clipping.
        norms: of each block.
        fault: why the update was not made; None where it was.
        routing: of the last micro-batch.
    """

    loss: float
    objective: float
    tokens: int
    norm: float
    norms: dict[str, float]
    fault: str | None
    routing: dict[str, Routing]


@dataclass
class Guard:
    """Judges a gradient before it is used.

    Attributes:
        spike: a norm above this factor times the mean of the last ones is refused; None for never.
        past: those norms.
    """

    spike: float | None = None
    past: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def fault(self, norm: float) -> str | None:
        """Why a gradient of this norm must not be used, or None; a good one is remembered."""
        if self.spike is not None and len(self.past) == WINDOW and norm > self.spike * sum(self.past) / WINDOW:
            return f"the gradient's norm is {norm:.4g}, {norm * WINDOW / sum(self.past):.1f} times its mean"
        self.past.append(norm)
        return None


@dataclass
class Stepper:
    """What stays the same from update to update.

    Attributes:
        division: what this process has of the weights; None where it is alone.
        compiled: the net as torch.compile runs it, in updates only; None runs it as it is.
        balance: of experts whose choice has a stored shift; None leaves the shifts as they are.
    """

    lm: Model
    optimizers: Optimizers
    how: How
    limit: float | None
    seed: int
    division: Division | None = None
    guard: Guard = field(default_factory=Guard)
    compiled: Any = None
    balance: Balance | None = None

    def __post_init__(self) -> None:
        self._own = self.division or Division(self.lm, self.optimizers.weights, ALONE)

    @property
    def ranks(self) -> Ranks:
        """The processes of the run."""
        return self._own.ranks

    def update(self, step: int, batches: Sequence[Inputs], factor: float) -> Outcome:
        """Accumulate over micro-batches, judge the gradient, and update with `factor` times the peak rate.

        Every judged token of the step counts alike, whichever micro-batch or rank it is in. Dropout depends on the
        seed, the step, the rows' rank and the micro-batch alone. All ranks get the same outcome.
        """
        device = self.lm.device
        mine = sum(batch.judged for batch in batches)
        count = self.ranks.sums([float(mine)], device)[0]
        if not count:
            return Outcome(math.nan, math.nan, 0, 0.0, {}, "no token of the step has a label", {})
        nll, objective = 0.0, 0.0
        routing: dict[str, Routing] = {}
        for i, batch in enumerate(batches):
            torch.manual_seed(dropout_seed(self.seed, step, self.ranks.data_rank, i))
            # A compiled module has no truth value of its own.
            net = self.lm.net if self.compiled is None else self.compiled
            result = forward(net, self.lm.parts, batch, count, self.how)
            result.objective.backward()  # type: ignore[no-untyped-call]
            self._own.collect()
            self.optimizers.gather()
            nll, objective = nll + float(result.nll), objective + float(result.objective.detach())
            routing = result.routing
            if self.balance is not None:
                self.balance.count(routing, batch.real)
        nll, objective = self.ranks.sums([nll, objective], device)
        given = dict(self.optimizers.gradients())
        # In the order of execution, which the search for the first fault relies on.
        gradients = {name: given[name] for name, _ in self.lm.net.named_parameters() if name in given}
        self._own.settle(gradients)
        norms = self._own.norms(gradients)
        norm = total_norm(norms)
        fault = self._fault(step, batches, count, nll, norms)
        if fault is None:
            if self.limit is not None:
                clip(gradients, norm, self.limit)
            self.optimizers.step(factor)
            if self.balance is not None:
                self.balance.update(self.ranks)
        else:
            self.optimizers.clear()
            if self.balance is not None:
                self.balance.forget()
        return Outcome(nll / count, objective, int(count), norm, norms, fault, routing)

    def _fault(
        self, step: int, batches: Sequence[Inputs], count: float, nll: float, norms: dict[str, float]
    ) -> str | None:
        """Why the update must not be made, naming the place where it went wrong first."""
        norm = total_norm(norms)
        if not math.isfinite(nll):
            return f"the loss is {nll}: {self._origin(step, batches, count)}"
        if not math.isfinite(norm):
            # Backward runs from the last block to the first: the last one that is not finite went first.
            first = [block for block, value in norms.items() if not math.isfinite(value)][-1]
            return f"the gradient of {first} is not finite, and it went first; the loss is finite"
        if (bad := self._first(self.optimizers.not_finite())) is not None:
            return f"the optimizer's {bad} is not finite"
        return self.guard.fault(norm)

    def _first(self, found: str | None) -> str | None:
        """What the first rank found that found something; all ranks get it."""
        if not self.ranks.totals([float(found is not None)], self.lm.device)[0]:
            return None
        return self.ranks.first(found)

    def _origin(self, step: int, batches: Sequence[Inputs], count: float) -> str:
        """Where the first value that is not finite appears, found by going through the step once more."""
        bad = (n for n, w in self.optimizers.weights.items() if not bool(w.detach().isfinite().all()))
        if (name := self._first(next(bad, None))) is not None:
            return f"the weight {name} holds a value that is not finite"
        seen: str | None = None
        with torch.no_grad():
            for i, batch in enumerate(batches):
                torch.manual_seed(dropout_seed(self.seed, step, self.ranks.data_rank, i))
                with watched(self.lm.net) as found:
                    forward(self.lm.net, self.lm.parts, batch, count, self.how)
                seen = seen or next(iter(found), None)
        self._own.rest()
        if (seen := self._first(seen)) is not None:
            narrow = " (float16 ends at 65504; bfloat16 does not)" if self.lm.dtype == torch.float16 else ""
            return f"{seen} gives the first value that is not finite{narrow}"
        return "no module's output shows it, so it arises in the loss"


def dropout_seed(seed: int, step: int, rank: int, micro_batch: int) -> int:
    """63 bits for the random numbers of one micro-batch: no state is carried from one to the next.

    Args:
        rank: of the rows; ranks that share matrices draw the same.
    """
    return mix(seed, 3, step, rank, micro_batch) >> 1
