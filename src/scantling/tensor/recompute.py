"""Computing again in the backward instead of keeping: torch's checkpoint around blocks, or inside attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from scantling.errors import ScantlingInputError

POLICIES = ("none", "selective", "block")


def policy(name: str) -> str:
    """The policy of that name.

    Raises:
        ScantlingInputError: no such policy.
    """
    if name not in POLICIES:
        raise ScantlingInputError(f"unknown recompute policy {name!r}: use one of {', '.join(POLICIES)}")
    return name


def again(run: Callable[..., Tensor], *kept: Tensor | None) -> Tensor:
    """run(*kept), of which autograd keeps `kept` alone and calls `run` a second time in the backward.

    Random numbers are the same in both calls. Where no gradient is wanted, `run` is just called.
    """
    if not torch.is_grad_enabled():
        return run(*kept)
    return cast(Tensor, checkpoint(run, *kept, use_reentrant=False))
