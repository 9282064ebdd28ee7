"""How a training budget is best spent on parameters and tokens, by the published fits; C = 6 N D throughout."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from scantling.errors import ScantlingInputError, nearest

FLOPS_PER_PARAMETER = 6
"""Of training, per token: 2 forward and 4 backward (Kaplan et al., arXiv:2001.08361, section 2.1)."""
SMALLEST, LARGEST = 1e9, 1e36
"""FLOPs of a budget; the fits know nothing of what is far outside of 1e18 to 1e25."""


@dataclass(frozen=True)
class Law:
    """A published fit.

    Attributes:
        params: FLOPs -> the best number of parameters.
        loss: parameters, tokens -> loss in nats per token, where the fit has one.
    """

    name: str
    source: str
    params: Callable[[float], float]
    loss: Callable[[float, float], float] | None = None


@dataclass(frozen=True)
class Split:
    """A budget, spent.

    Attributes:
        params: N, all parameters, as the fits count them.
        tokens: D = C / (6 N).
        loss: nats per token, None where the fit has none.
    """

    law: str
    source: str
    params: float
    tokens: float
    loss: float | None


def split(budget: float, law: Law) -> Split:
    """The best N and D for `budget` FLOPs.

    Raises:
        ScantlingInputError: the budget is none.
    """
    if not SMALLEST <= budget <= LARGEST:
        raise ScantlingInputError(f"a budget of {budget:g} FLOPs: {SMALLEST:g} to {LARGEST:g} can be spent")
    params = law.params(budget)
    tokens = budget / (FLOPS_PER_PARAMETER * params)
    return Split(law.name, law.source, params, tokens, None if law.loss is None else law.loss(params, tokens))


def law(name: str) -> Law:
    """The fit of that name.

    Raises:
        ScantlingInputError: there is none.
    """
    if name not in LAWS:
        raise ScantlingInputError(f"no scaling law {name!r}{nearest(name, LAWS)}; known: {', '.join(LAWS)}")
    return LAWS[name]


def _along(table: dict[float, float], budget: float) -> float:
    """Parameters for a budget, on straight lines in log-log between the rows (FLOPs: parameters) of a table."""
    rows = sorted((math.log(c), math.log(n)) for c, n in table.items())
    low = max(i for i, (c, _) in enumerate(rows[:-1]) if i == 0 or c <= math.log(budget))
    (c0, n0), (c1, n1) = rows[low : low + 2]
    return math.exp(n0 + (n1 - n0) * (math.log(budget) - c0) / (c1 - c0))


def _parametric(a: float, b: float, alpha: float, beta: float, budget: float) -> float:
    """The N that minimises A / N^alpha + B / D^beta with 6 N D = C (arXiv:2203.15556, eq. 4)."""
    g = (alpha * a / (beta * b)) ** (1 / (alpha + beta))
    return float(g * (budget / FLOPS_PER_PARAMETER) ** (beta / (alpha + beta)))


def _loss(e: float, a: float, b: float, alpha: float, beta: float, params: float, tokens: float) -> float:
    """E + A / N^alpha + B / D^beta (arXiv:2203.15556, eq. 2)."""
    return float(e + a / params**alpha + b / tokens**beta)


_TABLE_3 = {1.92e19: 4e8, 1.21e20: 1e9, 1.23e22: 1e10, 5.76e23: 6.7e10, 3.85e24: 1.75e11, 9.90e24: 2.8e11}
_TABLE_3 |= {3.43e25: 5.2e11, 1.27e26: 1e12, 1.30e28: 1e13}
_TABLE_A3 = {1.84e19: 4e8, 1.20e20: 1e9, 1.32e22: 1e10, 6.88e23: 6.7e10, 4.54e24: 1.75e11, 1.18e25: 2.8e11}
_TABLE_A3 |= {4.19e25: 5.2e11, 1.59e26: 1e12, 1.75e28: 1e13}
_THIRD = (406.4, 410.7, 0.3392, 0.2849)
_EPOCH = (482.01, 2085.43, 0.3478, 0.3658)
_HOFFMANN = "Hoffmann et al. (Chinchilla), arXiv:2203.15556"

LAWS: dict[str, Law] = {
    law.name: law
    for law in (
        Law("chinchilla-1", f"{_HOFFMANN}, approach 1 (training curves), table 3", partial(_along, _TABLE_3)),
        Law("chinchilla-2", f"{_HOFFMANN}, approach 2 (IsoFLOP profiles), table A3", partial(_along, _TABLE_A3)),
        Law(
            "chinchilla-3",
            f"{_HOFFMANN}, approach 3 (parametric loss), eq. 4; exponents unrounded, as arXiv:2404.10102 quotes them",
            partial(_parametric, *_THIRD),
            partial(_loss, 1.6934, *_THIRD),
        ),
        Law(
            "epoch",
            "Besiroglu et al. (Epoch AI), arXiv:2404.10102, approach 3 fitted again",
            partial(_parametric, *_EPOCH),
            partial(_loss, 1.8172, *_EPOCH),
        ),
        Law("20-tokens", f"20 tokens per parameter, as Chinchilla 70B had ({_HOFFMANN})", lambda c: math.sqrt(c / 120)),
    )
}
"""The fits by name; tables are read along straight lines in log-log between their rows."""
