"""Attention through torch's FlexAttention: the mask is a function of positions, and hidden blocks are never computed.

Dong et al., Flex Attention: A Programming Model for Generating Optimized Attention Kernels (arXiv:2412.05496).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from scantling.errors import ScantlingInputError
from scantling.tensor.attend import Mark, Terms
from scantling.tensor.mask import Seen


def flex(q: Tensor, k: Tensor, v: Tensor, terms: Terms, _: Mark) -> Tensor:
    """softmax(softcap(q k^T * scale)) v: q (B, H, T, D), k and v (B, H_kv, S, D) -> (B, H, T, D_v).

    Compiled on a GPU, where it is one kernel. Elsewhere torch runs it step by step, which is right and slow.

    Raises:
        ScantlingInputError: a bias by position, sinks, or dropout of weights, which this kernel has not; or gradients
            on a CPU, where torch has none of it.
    """
    asked = {
        "bias by position": terms.bias is not None,
        "sinks": terms.sinks is not None,
        "dropout of attention weights": bool(terms.dropout),
    }
    if lacking := [name for name, wanted in asked.items() if wanted]:
        raise ScantlingInputError(f"the flex kernel has no {lacking[0]}; use the fused kernel")
    if q.device.type == "cpu" and torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise ScantlingInputError("the flex kernel has no gradients on a cpu; use the fused kernel")
    run: Any = _compiled() if q.device.type == "cuda" else flex_attention
    shared, cap = k.shape[1] != q.shape[1], terms.softcap
    with warnings.catch_warnings():
        # Without a compiler the scores are stored, as the docstring says.
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        out: Tensor = run(q, k, v, _capped(cap), _blocks(q, k, terms), scale=terms.scale, enable_gqa=shared)
    return out


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention)


def _capped(cap: float | None) -> Callable[..., Tensor] | None:
    if cap is None:
        return None
    return lambda score, row, head, query, key: (score / cap).tanh() * cap


def _blocks(q: Tensor, k: Tensor, terms: Terms) -> BlockMask | None:
    """Blocks of 128 x 128 pairs: hidden, seen, or looked at one by one. Layers that see alike share them."""
    seen, queries, keys, device = terms.seen, q.shape[2], k.shape[2], str(q.device)
    if seen is None and not terms.causal:
        return None
    if seen is None:
        return create_block_mask(lambda row, head, query, key: query >= key, None, None, queries, keys, device)
    if "blocks" not in seen.made:
        if isinstance(seen, Seen):
            at, rows = seen.at, None if seen.shared else q.shape[0]
        else:
            whole, rows = seen.rows(0, queries, 0, keys), q.shape[0]
            at = lambda row, query, key: whole[row, 0, query, key]  # noqa: E731
        seen.made["blocks"] = create_block_mask(
            lambda row, head, query, key: at(row, query, key), rows, None, queries, keys, device
        )
    found: BlockMask = seen.made["blocks"]
    return found
