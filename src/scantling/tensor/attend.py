"""Attention kernels: `reference` is the oracle, plain matmul and softmax; `fused` never stores the T x S scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from scantling.errors import ScantlingInputError

Mark = Callable[[str, Tensor], Tensor]
BiasRows = Callable[[int, int], Tensor]

ROWS = 256
"""Queries per block where torch has no fused kernel for what an attention layer asks."""


@dataclass(frozen=True)
class Terms:
    """How the scores of one layer are formed.

    Attributes:
        mask: (1 or B, 1, T, S) bool, True where a key is read; None where all are, or where `causal` says it.
        causal: the plain triangle.
        scale: factor on q k^T.
        bias: gives the rows [start, end) of what is added to the scores, (1 or B, H, rows, S); or None.
        softcap: c in c * tanh(scores / c), or None.
        sinks: (H,) scores that take weight and give no value, or None.
        dropout: probability of dropping a weight.
    """

    mask: Tensor | None
    causal: bool
    scale: float
    bias: BiasRows | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout: float = 0.0

    def rows(self, start: int, end: int) -> Terms:
        """The terms of the queries [start, end); the mask must be explicit."""
        mask = None if self.mask is None else self.mask[:, :, start:end]
        bias = self.bias
        return replace(self, mask=mask, bias=None if bias is None else lambda a, b: bias(start + a, start + b))


def share(kv: Tensor, n_heads: int) -> Tensor:
    """Repeat KV heads for their query heads: (B, H_kv, S, D) -> (B, H, S, D), head i from floor(i * H_kv / H)."""
    return kv.repeat_interleave(n_heads // kv.shape[1], 1)


def reference(q: Tensor, k: Tensor, v: Tensor, terms: Terms, mark: Mark) -> Tensor:
    """softmax(q k^T * scale) v, every intermediate named: q (B, H, T, D), k and v (B, H_kv, S, D) -> (B, H, T, D_v)."""
    heads, queries = q.shape[1], q.shape[2]
    if k.shape[1] != heads:
        k, v = mark("k_shared", share(k, heads)), mark("v_shared", share(v, heads))
    scores = q @ k.transpose(-1, -2) * terms.scale
    if terms.softcap:
        scores = (scores / terms.softcap).tanh() * terms.softcap
    if terms.bias is not None:
        scores = scores + terms.bias(0, queries).to(scores.dtype)
    scores = mark("scores", scores)
    mask = scores.new_ones(scores.shape[-2:]).tril().bool() if terms.causal else terms.mask
    wide = scores.float()
    if mask is not None:
        wide = wide.masked_fill(~mask, float("-inf"))
    if terms.sinks is None:
        weights = wide.softmax(-1)
    else:
        sinks = terms.sinks.float()[None, :, None, None].expand(*wide.shape[:-1], 1)
        weights = torch.cat((wide, sinks), -1).softmax(-1)[..., :-1]
    weights = mark("weights", weights.to(v.dtype))
    return F.dropout(weights, terms.dropout) @ v if terms.dropout else weights @ v


def fused(q: Tensor, k: Tensor, v: Tensor, terms: Terms, mark: Mark) -> Tensor:
    """The same through torch's scaled_dot_product_attention, or by blocks of queries where that lacks a term."""
    if terms.softcap or terms.sinks is not None:
        return _by_rows(q, k, v, terms, lambda rows, part: reference(rows, k, v, part, lambda _, value: value))
    if terms.bias is not None:
        return _by_rows(q, k, v, terms, lambda rows, part: _biased(rows, k, v, part))
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=terms.mask,
        dropout_p=terms.dropout,
        is_causal=terms.causal,
        scale=terms.scale,
        enable_gqa=k.shape[1] != q.shape[1],
    )


def _biased(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> Tensor:
    assert terms.bias is not None
    added = terms.bias(0, q.shape[2]).to(q.dtype)
    if terms.mask is not None:
        added = added.masked_fill(~terms.mask, float("-inf"))
    gqa = k.shape[1] != q.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=added, dropout_p=terms.dropout, scale=terms.scale, enable_gqa=gqa
    )


def _by_rows(q: Tensor, k: Tensor, v: Tensor, terms: Terms, run: Callable[[Tensor, Terms], Tensor]) -> Tensor:
    queries = q.shape[2]
    if queries <= ROWS:
        return run(q, terms)
    pieces = [run(q[:, :, i : i + ROWS], terms.rows(i, min(i + ROWS, queries))) for i in range(0, queries, ROWS)]
    return torch.cat(pieces, 2)


KERNELS: dict[str, Callable[[Tensor, Tensor, Tensor, Terms, Mark], Tensor]] = {"reference": reference, "fused": fused}


def kernel(name: str) -> Callable[[Tensor, Tensor, Tensor, Terms, Mark], Tensor]:
    """The kernel of that name.

    Raises:
        ScantlingInputError: no such kernel.
    """
    if name not in KERNELS:
        raise ScantlingInputError(f"unknown attention kernel {name!r}: use one of {', '.join(KERNELS)}")
    return KERNELS[name]
