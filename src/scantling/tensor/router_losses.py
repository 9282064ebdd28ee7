"""What routers chose in one pass: the losses that keep experts busy and logits small, and a report on both."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from scantling.errors import ScantlingInputError


@dataclass(frozen=True)
class Routing:
    """One router's pass.

    Attributes:
        logits: (B, T, E) in float32, before any bias that only selects.
        experts: (B, T, top_k) ids of the chosen.
        scores: what the router makes of the logits: ``softmax``, ``top_softmax`` or ``sigmoid``.
    """

    logits: Tensor
    experts: Tensor
    scores: str = "softmax"

    @property
    def probabilities(self) -> Tensor:
        """(B, T, E), each token's adding up to 1: a softmax over all experts, or sigmoids divided by their sum.

        The second is DeepSeek V3's (arXiv:2412.19437, eq. 19).
        """
        if self.scores == "sigmoid":
            # Normalised in logs: sigmoids can all be 0.
            return F.logsigmoid(self.logits).softmax(-1)
        return self.logits.softmax(-1)


@dataclass(frozen=True)
class Load:
    """How one router spreads its tokens.

    Attributes:
        shares: of each expert in all choices, adding up to 1.
        entropy: of a token's probabilities, mean over tokens, in nats; ln E where the router prefers nobody.
        dead: experts that no token chose.
    """

    shares: tuple[float, ...]
    entropy: float
    dead: tuple[int, ...]


def load_balancing_loss(routings: Iterable[Routing], real: Tensor | None = None) -> Tensor:
    """E * sum over experts of f_i P_i: lowest, at top_k, where every expert gets the same share.

    f_i is the number of tokens that chose expert i, per token (no gradient goes through it), and P_i its mean
    probability: Switch Transformer, arXiv:2101.03961, eq. 4-6, with every one of a token's top_k choices counted. All
    tokens of all routings go into one mean, as in Mixtral; give one routing for the loss of one layer, as in Switch.

    Args:
        routings: of one pass; all over the same number of experts.
        real: (B, T) bool, False at padding, which is not counted; None where all tokens are real.

    Returns:
        A scalar in float32.

    Raises:
        ScantlingInputError: no routing, no real token, or `real` of another shape.
    """
    chosen: Tensor | float = 0.0
    probability: Tensor | float = 0.0
    tokens: Tensor | float = 0.0
    n_experts = 0
    for routing in routings:
        weight = _weight(routing, real)
        n_experts = routing.logits.shape[-1]
        chosen = chosen + _counts(routing, weight)
        probability = probability + (routing.probabilities * weight[..., None]).flatten(0, -2).sum(0)
        tokens = tokens + weight.sum()
    if not isinstance(chosen, Tensor):
        raise ScantlingInputError("no router ran in this pass: a loss on routers needs a card with mlp.kind moe")
    return n_experts * (chosen / tokens * (probability / tokens)).sum()


def z_loss(routings: Iterable[Routing], real: Tensor | None = None) -> Tensor:
    """Mean over tokens of (log sum_j exp x_j)^2, x the router's logits (ST-MoE, arXiv:2202.08906, eq. 5).

    Args, Returns, Raises: as `load_balancing_loss`.
    """
    total: Tensor | float = 0.0
    tokens: Tensor | float = 0.0
    for routing in routings:
        weight = _weight(routing, real)
        total = total + (routing.logits.logsumexp(-1).square() * weight).sum()
        tokens = tokens + weight.sum()
    if not isinstance(total, Tensor):
        raise ScantlingInputError("no router ran in this pass: a loss on routers needs a card with mlp.kind moe")
    return total / tokens


def load(routing: Routing, real: Tensor | None = None) -> Load:
    """The report on one routing.

    Args:
        real: (B, T) bool, False at padding, which is not counted; None where all tokens are real.

    Raises:
        ScantlingInputError: no real token, or `real` of another shape.
    """
    with torch.no_grad():
        weight = _weight(routing, real)
        counts = _counts(routing, weight)
        probabilities = routing.probabilities
        entropy = -(torch.xlogy(probabilities, probabilities).sum(-1) * weight).sum() / weight.sum()
        shares = (counts / counts.sum()).tolist()
    return Load(tuple(shares), float(entropy), tuple(i for i, share in enumerate(shares) if share == 0))


def _weight(routing: Routing, real: Tensor | None) -> Tensor:
    """1 at the tokens that count and 0 elsewhere: (B, T) in float32."""
    shape = routing.logits.shape[:-1]
    if real is None:
        return routing.logits.new_ones(shape)
    if real.shape != shape:
        raise ScantlingInputError(f"the mask has shape {list(real.shape)} and the routers saw {list(shape)} tokens")
    if not bool(real.any()):
        raise ScantlingInputError("every token is padding, so no router has a load")
    return real.to(routing.logits.dtype)


def _counts(routing: Routing, weight: Tensor) -> Tensor:
    """How many tokens chose each expert: (E,)."""
    each = weight[..., None].expand(routing.experts.shape).flatten()
    return each.new_zeros(routing.logits.shape[-1]).scatter_add(0, routing.experts.flatten(), each)
