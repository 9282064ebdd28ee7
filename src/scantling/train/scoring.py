"""What a loss needs beside vectors and labels: the matrix that scores, and the terms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scantling.errors import ScantlingInputError

IGNORED = -100
"""The label of a position that is not judged."""


@dataclass(frozen=True)
class Share:
    """One rank's tokens of a vocabulary that tensor ranks divide; they all judge the same vectors.

    Attributes:
        group: of torch.distributed.
        start: the first token of this rank.
        whole: tokens of all ranks.
    """

    group: Any
    start: int
    whole: int

    def sum(self, x: Tensor) -> Tensor:
        """x summed over the ranks, in place."""
        torch.distributed.all_reduce(x, group=self.group)
        return x

    def logsumexp(self, lse: Tensor) -> Tensor:
        """That over all tokens, of each rank's own (n,)."""
        parts = [torch.empty_like(lse) for _ in range(torch.distributed.get_world_size(self.group))]
        torch.distributed.all_gather(parts, lse.contiguous(), group=self.group)
        return torch.stack(parts).logsumexp(0)


@dataclass(frozen=True)
class Scoring:
    """What makes logits of vectors x (N, d): softcap(x W^T + b), the first `vocab_size` of them.

    Attributes:
        weight: (rows, d), at least `vocab_size` rows.
        bias: (rows,), or None.
        vocab_size: of this rank where several divide the vocabulary.
        softcap: c in c * tanh(logits / c), or None.
        share: what part of the vocabulary this is; None is all of it.
    """

    weight: Tensor
    bias: Tensor | None
    vocab_size: int
    softcap: float | None = None
    share: Share | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """(N, V), in the vectors' dtype."""
        logits = torch.nn.functional.linear(hidden, self.weight, self.bias)[..., : self.vocab_size]
        return logits if self.softcap is None else (logits / self.softcap).tanh() * self.softcap


@dataclass(frozen=True)
class Terms:
    """What the loss is made of.

    Attributes:
        label_smoothing: share of each target that is spread evenly over the vocabulary (arXiv:1512.00567, section 7).
        z_loss: factor on (log sum_j exp x_j)^2, which keeps logits from drifting (PaLM, arXiv:2204.02311, section 5).
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing <= 1:
            raise ScantlingInputError(f"label_smoothing is {self.label_smoothing}; a number from 0 to 1 is needed")
        if not 0 <= self.z_loss < float("inf"):
            raise ScantlingInputError(f"z_loss is {self.z_loss}; a finite number of at least 0 is needed")


BARE = Terms()
"""Nothing but the labels."""
