"""Choosing the next token: the draw, and log-probabilities.

The filters are applied in the order temperature, top-k, top-p, min-p, typical, epsilon, eta, after the penalties.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scantling.generate.processors import History, adjusted, filtered
from scantling.generate.sampling import Sampling

__all__ = ["Logprob", "Sampling", "choose", "logprobs", "race"]


@dataclass(frozen=True)
class Logprob:
    """How likely a token was.

    Attributes:
        id: the token.
        logprob: natural logarithm of the model's own probability, before temperature, penalties and filters.
        top: the likeliest tokens at that place with theirs, the likeliest first.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def logprobs(logits: Tensor, chosen: Sequence[int], top: int) -> list[Logprob]:
    """Of the chosen token of each row of logits (B, V), and of the `top` likeliest."""
    logs = logits.float().log_softmax(-1)
    best = logs.topk(min(top, logs.shape[-1]), -1) if top else None
    found = []
    for row, token in enumerate(chosen):
        others = () if best is None else zip(best.indices[row].tolist(), best.values[row].tolist(), strict=True)
        found.append(Logprob(token, float(logs[row, token]), tuple(others)))
    return found


def race(probabilities: Tensor, generator: torch.Generator) -> int:
    """A token of (V) by an exponential race: argmax of p / e, e exponential, is drawn with probability p.

    It always takes V draws from the generator, whatever the probabilities: who runs the same race with other
    probabilities, such as a draft model, often draws the same token.
    """
    noise = torch.empty(probabilities.shape, dtype=torch.float32).exponential_(generator=generator)
    return int((probabilities / noise.clamp(min=torch.finfo(torch.float32).tiny)).argmax())


def choose(
    logits: Tensor, how: Sampling, generators: list[torch.Generator], histories: Sequence[History] = ()
) -> Tensor:
    """The next token of each row: logits (B, V) -> ids (B); row i draws from generator i after history i."""
    logits = adjusted(logits, how, histories) if histories else logits
    if how.greedy:
        return logits.argmax(-1)
    probabilities = filtered(logits, how).softmax(-1).cpu()
    rows = zip(probabilities, generators, strict=True)
    return torch.tensor([race(row, generator) for row, generator in rows]).to(logits.device)
