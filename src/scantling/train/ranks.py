"""What several processes have in common: sums over all of them. Alone, a sum is itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed


@dataclass(frozen=True)
class Ranks:
    """The processes of a run.

    Attributes:
        size: how many there are.
        rank: which of them this one is.
    """

    size: int = 1
    rank: int = 0

    @classmethod
    def here(cls) -> Ranks:
        """Those of torch.distributed where it has been initialised, else one."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return cls()
        return cls(torch.distributed.get_world_size(), torch.distributed.get_rank())

    def sums(self, values: list[float], device: torch.device) -> list[float]:
        """Each value summed over all processes, in float64 (float32 on mps)."""
        if self.size == 1:
            return values
        kind = torch.float32 if device.type == "mps" else torch.float64
        held = torch.tensor(values, dtype=kind, device=device)
        torch.distributed.all_reduce(held)
        return [float(value) for value in held]
