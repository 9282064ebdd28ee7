"""Experts kept busy without a loss: a stored shift of each expert's score is moved by counting who was chosen."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from scantling.parts.moe import Router
from scantling.parts.part import Part
from scantling.tensor.router_losses import Routing
from scantling.train.ranks import Ranks


class Balance:
    """After an update each expert's shift goes up by `rate` where it got fewer choices than the mean, down where more.

    b_i <- b_i + u sign(mean c - c_i), c_i the choices of the whole update (arXiv:2408.15664, algorithm 1;
    arXiv:2412.19437, section 2.1.2). The shifts are held in float32, whatever the net's dtype is.
    """

    def __init__(self, net: nn.Module, parts: Part, rate: float) -> None:
        self.rate = rate
        paths = [path for path, part, _ in parts.walk() if isinstance(part, Router) and part.selection_bias]
        self._buffers = {path: net.get_buffer(f"{path}.selection_bias") for path in paths}
        self.shifts = {path: buffer.detach().float().clone() for path, buffer in self._buffers.items()}
        self._counts = {path: torch.zeros_like(shift) for path, shift in self.shifts.items()}

    def count(self, routing: Mapping[str, Routing], real: Tensor | None) -> None:
        """Take in what the routers chose in one micro-batch; `real` (B, T) is False at padding."""
        for path, counts in self._counts.items():
            experts = routing[path].experts
            chosen = experts if real is None else experts[real]
            counts += torch.bincount(chosen.flatten(), minlength=len(counts))

    def update(self, ranks: Ranks) -> None:
        """Move every shift by what was counted on all ranks since the last time."""
        for path, counts in self._counts.items():
            every = torch.tensor(ranks.sums(counts.tolist(), counts.device), device=counts.device)
            self.shifts[path] += self.rate * torch.sign(every.mean() - every)
            self._buffers[path].copy_(self.shifts[path])
        self.forget()

    def forget(self) -> None:
        """Leave out what was counted, as the update is not made."""
        for counts in self._counts.values():
            counts.zero_()

    def restore(self, shifts: Mapping[str, Tensor]) -> None:
        """Put shifts back."""
        for path, shift in shifts.items():
            self.shifts[path].copy_(shift)
            self._buffers[path].copy_(shift)
