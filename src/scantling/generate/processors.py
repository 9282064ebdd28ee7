"""What is done to the logits before a token is chosen, one documented function per setting.

`adjusted` runs what depends on the tokens before, `filtered` what depends on the distribution alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scantling.errors import ScantlingInputError

if TYPE_CHECKING:
    from scantling.generate.constrain import Constraint
    from scantling.generate.sampling import Sampling

NEVER = float("-inf")


@dataclass
class History:
    """The tokens before the next one, of one row.

    Attributes:
        prompt: what was read; of an encoder-decoder, what the target begins with.
        new: what was generated.
        constraint: says which tokens may come next, or None where all may.
    """

    prompt: Sequence[int]
    new: list[int] = field(default_factory=list)
    constraint: Constraint | None = None

    def add(self, token: int) -> None:
        """Take the token that was chosen."""
        self.new.append(token)
        if self.constraint is not None:
            self.constraint.take(token)


def adjusted(logits: Tensor, how: Sampling, histories: Sequence[History]) -> Tensor:
    """Logits (B, V) after the penalties of `how`, n-gram blocking, logit bias and constraint, in this order.

    Raises:
        ScantlingInputError: no token of a row is left.
    """
    wanted = how.looks_back or any(row.constraint is not None for row in histories)
    if not wanted:
        return logits
    rows = [_adjusted(row, how, history) for row, history in zip(logits.float(), histories, strict=True)]
    return torch.stack(rows)


def _adjusted(logits: Tensor, how: Sampling, history: History) -> Tensor:
    if how.repetition_penalty != 1.0:
        logits = repetition(logits, how.repetition_penalty, [*history.prompt, *history.new])
    if how.presence_penalty or how.frequency_penalty:
        logits = counted(logits, how.presence_penalty, how.frequency_penalty, history.new)
    if how.no_repeat_ngram:
        logits = no_repeat_ngram(logits, how.no_repeat_ngram, [*history.prompt, *history.new])
    if how.logit_bias:
        logits = biased(logits, dict(how.logit_bias))
    if history.constraint is not None:
        logits = logits.masked_fill(~history.constraint.allowed(logits.shape[-1]).to(logits.device), NEVER)
    if not bool(logits.isfinite().any()):
        raise ScantlingInputError(
            f"after {len(history.new)} new tokens no token is left to choose: n-gram blocking, logit bias and the "
            "constraint together forbid all of them"
        )
    return logits


def repetition(logits: Tensor, penalty: float, seen: Sequence[int]) -> Tensor:
    """Positive logits (V) of seen tokens divided by the penalty, negative ones multiplied (arXiv:1909.05858, 4.1).

    Each token once, however often it was seen; the prompt counts, as in transformers.
    """
    ids = torch.tensor(sorted(set(seen)), dtype=torch.int64, device=logits.device)
    ids = ids[ids < logits.shape[-1]]
    there = logits[ids]
    return logits.index_put((ids,), torch.where(there < 0, there * penalty, there / penalty))


def counted(logits: Tensor, presence: float, frequency: float, new: Sequence[int]) -> Tensor:
    """Logits (V) less `presence` for each token generated so far and `frequency` for each time it was.

    As in OpenAI's interface; the prompt does not count.
    """
    if not new:
        return logits
    counts = torch.bincount(torch.tensor(new), minlength=logits.shape[-1])[: logits.shape[-1]].to(logits)
    return logits - presence * (counts > 0).to(logits) - frequency * counts


def no_repeat_ngram(logits: Tensor, n: int, seen: Sequence[int]) -> Tensor:
    """Logits (V) with -inf at each token that would complete n tokens in a row which stand there already.

    (Paulus et al., arXiv:1705.04304, section 2.5, for n = 3.)
    """
    if len(seen) < n:
        return logits
    tail = list(seen[len(seen) - n + 1 :])
    banned = {seen[i + n - 1] for i in range(len(seen) - n + 1) if list(seen[i : i + n - 1]) == tail}
    banned = {token for token in banned if token < logits.shape[-1]}
    return logits.index_fill(-1, torch.tensor(sorted(banned), dtype=torch.int64, device=logits.device), NEVER)


def biased(logits: Tensor, bias: Mapping[int, float]) -> Tensor:
    """Logits (V) plus what each named token is given.

    Raises:
        ScantlingInputError: a token that does not exist.
    """
    if (largest := max(bias)) >= logits.shape[-1]:
        raise ScantlingInputError(f"logit_bias names token {largest}; the tokens are 0 to {logits.shape[-1] - 1}")
    ids = torch.tensor(list(bias), device=logits.device)
    return logits.index_put((ids,), torch.tensor(list(bias.values())).to(logits), accumulate=True)


def filtered(logits: Tensor, how: Sampling) -> Tensor:
    """Logits (B, V) with the temperature applied and every token that may not be drawn at -inf; temperature > 0.

    The order is temperature, top-k, top-p, min-p, typical, epsilon, eta.
    """
    logits = logits.float() / how.temperature
    if how.top_k:
        logits = top_k(logits, how.top_k)
    if how.top_p < 1.0:
        logits = top_p(logits, how.top_p)
    if how.min_p:
        logits = min_p(logits, how.min_p)
    if how.typical_p < 1.0:
        logits = typical(logits, how.typical_p)
    if how.epsilon_cutoff:
        logits = epsilon(logits, how.epsilon_cutoff)
    return eta(logits, how.eta_cutoff) if how.eta_cutoff else logits


def top_k(logits: Tensor, k: int) -> Tensor:
    """Keep the k likeliest tokens of each row (B, V), and ties with the last of them."""
    last = logits.topk(min(k, logits.shape[-1]), -1).values[..., -1:]
    return logits.masked_fill(logits < last, NEVER)


def top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the likeliest tokens of each row (B, V) up to and including the one that brings their mass to p.

    The mass before a token is compared, `>= p`, in the logits' own dtype: where a sum that is p in decimals rounds to
    just below it, one more token is kept.
    """
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    mass = ordered.softmax(-1).cumsum(-1)
    drop = torch.zeros_like(mass, dtype=torch.bool)
    drop[..., 1:] = mass[..., :-1] >= p
    return logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), NEVER)


def min_p(logits: Tensor, fraction: float) -> Tensor:
    """Keep the tokens of each row (B, V) at least `fraction` as likely as the likeliest (arXiv:2407.01082)."""
    probabilities = logits.softmax(-1)
    floor = fraction * probabilities.amax(-1, keepdim=True)
    return logits.masked_fill(probabilities < floor, NEVER)


def typical(logits: Tensor, mass: float) -> Tensor:
    """Keep the tokens of each row (B, V) whose surprise is nearest to the entropy, up to `mass`.

    (Meister et al., arXiv:2202.00666, section 4: locally typical sampling.)
    """
    logs = logits.log_softmax(-1)
    entropy = -(logs * logs.exp()).nansum(-1, keepdim=True)
    strange, order = (-logs - entropy).abs().sort(dim=-1, stable=True)
    reached = logits.gather(-1, order).softmax(-1).cumsum(-1)
    last = (reached < mass).sum(-1, keepdim=True).clamp(max=logits.shape[-1] - 1)
    drop = strange > strange.gather(-1, last)
    return logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), NEVER)


def epsilon(logits: Tensor, least: float) -> Tensor:
    """Keep the tokens of each row (B, V) at least that likely, and the likeliest (arXiv:2210.15191, section 3)."""
    return _kept_above(logits, torch.full_like(logits[..., :1], least))


def eta(logits: Tensor, least: float) -> Tensor:
    """The same with min(least, sqrt(least) e^-entropy) as the bound (arXiv:2210.15191, eq. 6)."""
    logs = logits.log_softmax(-1)
    entropy = -(logs * logs.exp()).nansum(-1, keepdim=True)
    return _kept_above(logits, (least**0.5 * (-entropy).exp()).clamp(max=least))


def _kept_above(logits: Tensor, bound: Tensor) -> Tensor:
    low = logits.softmax(-1) < bound
    return logits.masked_fill(low & (logits < logits.amax(-1, keepdim=True)), NEVER)
