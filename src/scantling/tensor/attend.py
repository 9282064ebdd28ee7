"""Attention kernels. `reference` is the oracle: plain matmul and softmax. `fused` never stores the T x S scores."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from scantling.errors import ScantlingInputError

Mark = Callable[[str, Tensor], Tensor]


def share(kv: Tensor, n_heads: int) -> Tensor:
    """Repeat KV heads for their query heads: (B, H_kv, S, D) -> (B, H, S, D), head i from floor(i * H_kv / H)."""
    return kv.repeat_interleave(n_heads // kv.shape[1], 1)


def reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, dropout: float, mark: Mark
) -> Tensor:
    """softmax(q k^T * scale) v, every intermediate named: q (B, H, T, D), k and v (B, H_kv, S, D) -> (B, H, T, D)."""
    heads = q.shape[1]
    if k.shape[1] != heads:
        k, v = mark("k_shared", share(k, heads)), mark("v_shared", share(v, heads))
    scores = mark("scores", q @ k.transpose(-1, -2) * scale)
    if causal:
        mask = scores.new_ones(scores.shape[-2:]).tril().bool()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = mark("weights", scores.float().softmax(-1).to(v.dtype))
    return F.dropout(weights, dropout) @ v if dropout else weights @ v


def fused(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, dropout: float, mark: Mark
) -> Tensor:
    """The same through torch's scaled_dot_product_attention, which picks flash or memory-efficient kernels."""
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=k.shape[1] != q.shape[1]
    )


KERNELS = {"reference": reference, "fused": fused}


def kernel(name: str) -> Callable[..., Tensor]:
    """The kernel of that name.

    Raises:
        ScantlingInputError: no such kernel.
    """
    if name not in KERNELS:
        raise ScantlingInputError(f"unknown attention kernel {name!r}: use one of {', '.join(KERNELS)}")
    return KERNELS[name]
