"""Visibility and padding as the boolean masks that kernels take, and the cases where a kernel needs none."""

from __future__ import annotations

import torch
from torch import Tensor

from scantling.visibility import Visibility


def build(
    visibility: Visibility,
    tokens: int,
    past: int,
    padding: Tensor | None,
    device: torch.device,
    explicit: bool = False,
) -> tuple[Tensor | None, bool]:
    """The mask for `tokens` queries after `past` keys.

    Args:
        padding: (B, past + tokens) bool, True where a key is a real token; None where all are.
        explicit: write the triangle out, for kernels that cannot be told of it.

    Returns:
        (mask, is_causal): a bool tensor (1 or B, 1, T, S) that is True where a key is read, or None with
        `is_causal` telling the kernel the plain causal triangle, or (None, False) where everything is seen.
    """
    keys = past + tokens
    if padding is None and not visibility.narrows(keys):
        if not visibility.causal or tokens == 1:
            return None, False
        if past == 0 and not explicit:
            return None, True
    query = torch.arange(past, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)[None, :]
    seen: Tensor = visibility.sees(query, key)[None, None]
    if padding is not None:
        # A padded query keeps itself, so that no row is empty and no softmax gives NaN.
        seen = (seen & padding[:, None, None, :]) | (query == key)
    return seen, False
