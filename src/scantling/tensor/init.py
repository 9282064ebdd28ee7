"""Initial weights."""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def initialise(net: nn.Module, seed: int, std: float = 0.02) -> None:
    """Matrices and tables from N(0, std^2), shifts 0, gains 1: the initializer_range of GPT-2's published code.

    A part may fix a weight's first value by `initial`. The draw depends on the seed and the order of the parameters
    alone, not on the device.
    """
    generator = torch.Generator().manual_seed(seed)
    fixed = {
        f"{path}.{name}" if path else name: value
        for path, module in net.named_modules()
        for name, value in getattr(getattr(module, "part", None), "initial", {}).items()
    }
    for name, weight in (*net.named_parameters(), *net.named_buffers()):
        if name in fixed:
            weight.fill_(fixed[name])
        elif name.endswith("bias"):
            weight.zero_()
        elif weight.dim() == 1:
            weight.fill_(1.0)
        else:
            weight.copy_(torch.empty(weight.shape).normal_(0.0, std, generator=generator))
