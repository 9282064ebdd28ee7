"""A running mean of the weights, in float32, to evaluate and save beside them (Polyak and Juditsky, 1992)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


class Ema:
    """mean <- decay * mean + (1 - decay) * weight, after each update."""

    def __init__(self, weights: Mapping[str, Tensor], decay: float) -> None:
        self.decay, self._weights = decay, weights
        self.means = {name: weight.detach().float().clone() for name, weight in weights.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights as they are now into the mean."""
        for name, weight in self._weights.items():
            self.means[name].lerp_(weight.float(), 1 - self.decay)

    @torch.no_grad()
    def restore(self, means: Mapping[str, Tensor]) -> None:
        """Put means back."""
        for name, mean in means.items():
            self.means[name].copy_(mean)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The means in place of the weights, while the block runs."""
        kept = {name: weight.detach().clone() for name, weight in self._weights.items()}
        try:
            with torch.no_grad():
                for name, weight in self._weights.items():
                    weight.copy_(self.means[name])
            yield
        finally:
            with torch.no_grad():
                for name, weight in self._weights.items():
                    weight.copy_(kept[name])
