"""What comes next, under temperatures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scantling.errors import ScantlingInputError
from scantling.lens.attribution import vocabulary_head
from scantling.lens.hooks import ALL_REAL, Edit, capture
from scantling.lens.residual import checked_positions, wide
from scantling.passes import Given

if TYPE_CHECKING:
    from scantling.model import Model


@dataclass(frozen=True)
class NextTokens:
    """The likeliest tokens at one position.

    Attributes:
        ids: (K), the likeliest first.
        logits: (K) of them.
        temperatures: (N).
        probabilities: (N, K): softmax(logits / temperature) over the whole vocabulary; temperature 0 is the likeliest
            alone.
        entropies: (N) of the whole distribution, in nats.
    """

    ids: Tensor
    logits: Tensor
    temperatures: tuple[float, ...]
    probabilities: Tensor
    entropies: Tensor


def next_tokens(
    lm: Model,
    ids: Any,
    given: Given = ALL_REAL,
    *,
    temperatures: Sequence[float] = (1.0,),
    position: int = -1,
    top: int = 10,
    edits: Sequence[Edit] = (),
) -> NextTokens:
    """The distribution at one position of one row, under each temperature; of an encoder that position's own.

    Raises:
        ScantlingInputError: a head without a vocabulary, a temperature below 0 or not finite, or no such position.
    """
    vocabulary_head(lm)
    for temperature in temperatures:
        if not 0 <= temperature < float("inf"):
            raise ScantlingInputError(f"temperature is {temperature}: a finite number of at least 0 is needed")
    out = capture(lm, ids, [], given, edits).out
    (at,) = checked_positions(out.shape[1], [position])
    logits = wide(out[0, at])
    chosen = logits.topk(min(top, len(logits)))
    whole = torch.stack([_softmax(logits, temperature) for temperature in temperatures])
    entropies = -torch.where(whole > 0, whole * whole.log(), 0.0).sum(-1)
    return NextTokens(chosen.indices, chosen.values, tuple(temperatures), whole[:, chosen.indices], entropies)


def _softmax(logits: Tensor, temperature: float) -> Tensor:
    if temperature:
        # Less the largest first, so that no temperature however low divides to infinity.
        return ((logits - logits.max()) / temperature).softmax(-1)
    return torch.nn.functional.one_hot(logits.argmax(), len(logits)).to(logits)
