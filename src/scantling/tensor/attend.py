"""Attention kernels: `reference` is the oracle, plain matmul and softmax; `fused` never stores the T x S scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from scantling.errors import ScantlingInputError
from scantling.tensor.mask import Paired, Real, Seen

Mark = Callable[[str, Tensor], Tensor]
BiasRows = Callable[[int, int], Tensor]

ROWS = 256
"""Queries per block where a plain causal or full kernel does not do."""


@dataclass(frozen=True)
class Terms:
    """How the scores of one layer are formed.

    Attributes:
        seen: which keys each query reads; None where it reads all, or where `causal` says it.
        causal: the plain triangle.
        scale: factor on q k^T.
        bias: gives the rows [start, end) of what is added to the scores, (1 or B, H, rows, S); or None.
        softcap: c in c * tanh(scores / c), or None.
        sinks: (H,) scores that take weight and give no value, or None.
        dropout: probability of dropping a weight.
    """

    seen: Seen | Real | Paired | None
    causal: bool
    scale: float
    bias: BiasRows | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout: float = 0.0


@dataclass(frozen=True)
class Rows:
    """Some queries of a layer with the keys that they can see: q (B, H, rows, D), k and v (B, H_kv, keys, D).

    Attributes:
        mask: (1 or B, 1, rows, keys) bool, or None.
        bias: (1 or B, H, rows, keys), or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    bias: Tensor | None


def share(kv: Tensor, n_heads: int) -> Tensor:
    """Repeat KV heads for their query heads: (B, H_kv, S, D) -> (B, H, S, D), head i from floor(i * H_kv / H)."""
    return kv.repeat_interleave(n_heads // kv.shape[1], 1)


def reference(q: Tensor, k: Tensor, v: Tensor, terms: Terms, mark: Mark) -> Tensor:
    """softmax(q k^T * scale) v, every intermediate named: q (B, H, T, D), k and v (B, H_kv, S, D) -> (B, H, T, D_v)."""
    heads, queries = q.shape[1], q.shape[2]
    if k.shape[1] != heads:
        k, v = mark("k_shared", share(k, heads)), mark("v_shared", share(v, heads))
    mask = q.new_ones(queries, queries).tril().bool() if terms.causal else None
    if terms.seen is not None:
        mask = terms.seen.rows(0, queries)
    bias = None if terms.bias is None else terms.bias(0, queries)
    return _plain(Rows(q, k, v, mask, bias), terms, mark)


def _plain(rows: Rows, terms: Terms, mark: Mark) -> Tensor:
    scores = rows.q @ rows.k.transpose(-1, -2) * terms.scale
    if terms.softcap:
        scores = (scores / terms.softcap).tanh() * terms.softcap
    if rows.bias is not None:
        scores = scores + rows.bias.to(scores.dtype)
    wide = mark("scores", scores).float()
    if rows.mask is not None:
        wide = wide.masked_fill(~rows.mask, float("-inf"))
    if terms.sinks is None:
        weights = wide.softmax(-1)
    else:
        sinks = terms.sinks.float()[None, :, None, None].expand(*wide.shape[:-1], 1)
        weights = torch.cat((wide, sinks), -1).softmax(-1)[..., :-1]
    weights = mark("weights", weights.to(rows.v.dtype))
    return F.dropout(weights, terms.dropout) @ rows.v if terms.dropout else weights @ rows.v


def in_torch(q: Tensor, v: Tensor, dropout: float) -> bool:
    """Whether torch's fused kernel takes these: that of the CPU drops nothing and wants values as wide as keys."""
    return q.device.type != "cpu" or (not dropout and q.shape[-1] == v.shape[-1])


def fused(q: Tensor, k: Tensor, v: Tensor, terms: Terms, mark: Mark) -> Tensor:
    """The same through torch's scaled_dot_product_attention, where it has a kernel for it that stores no scores.

    Where a mask, a bias, a cap, sinks or dropout are asked for, queries go in blocks that see only the keys in their
    reach, so that memory grows with T and not with T x S; in training the weights of a block are kept.
    """
    queries, heads = q.shape[2], q.shape[1]
    native = terms.softcap is None and terms.sinks is None and in_torch(q, v, terms.dropout)
    if native and q.device.type == "cpu":
        # The kernel lays its output out as the queries are; token by token, merging the heads copies nothing.
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    if native and terms.seen is None and terms.bias is None:
        return _torch_fused(Rows(q, k, v, None, None), terms)
    bias = None if terms.bias is None else terms.bias(0, min(ROWS, queries))
    # Torch's kernel of the CPU gives no gradient to a mask.
    native = native and (bias is None or not bias.requires_grad or q.device.type != "cpu")
    if not native:
        k, v = (share(x, heads) if x.shape[1] != heads else x.contiguous() for x in (k, v))
    pieces = []
    for start in range(0, queries, ROWS):
        rows = _rows(q, k, v, terms, start, min(start + ROWS, queries), bias if start == 0 else None)
        pieces.append(_torch_fused(rows, terms) if native else _plain(_apart(rows, q, k), terms, _unmarked))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)


def _rows(q: Tensor, k: Tensor, v: Tensor, terms: Terms, start: int, end: int, bias: Tensor | None) -> Rows:
    """The queries [start, end); where that is all of them, with all keys: the full square that is counted."""
    seen, whole = terms.seen, end - start == q.shape[2]
    first, last = (0, k.shape[2]) if seen is None or whole else seen.span(start, end)
    mask = None if seen is None else seen.rows(start, end, first, last)
    if bias is None and terms.bias is not None:
        bias = terms.bias(start, end)
    bias = None if bias is None else bias[..., first:last]
    return Rows(q[:, :, start:end], k[:, :, first:last], v[:, :, first:last], mask, bias)


def _apart(rows: Rows, q: Tensor, k: Tensor) -> Rows:
    """Cut pieces in storages of their own, as the products would copy most of them; a cut would be kept whole."""
    if not torch.is_grad_enabled():
        return rows
    own = replace(rows, q=_own(rows.q)) if rows.q.shape[2] != q.shape[2] else rows
    return replace(own, k=_own(rows.k), v=_own(rows.v)) if rows.k.shape[2] != k.shape[2] else own


def _own(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _torch_fused(rows: Rows, terms: Terms) -> Tensor:
    mask = rows.mask
    if rows.bias is not None:
        mask = rows.bias.to(rows.q.dtype)
        mask = mask if rows.mask is None else mask.masked_fill(~rows.mask, float("-inf"))
    return F.scaled_dot_product_attention(
        rows.q,
        rows.k,
        rows.v,
        attn_mask=mask,
        dropout_p=terms.dropout,
        is_causal=terms.causal,
        scale=terms.scale,
        enable_gqa=rows.k.shape[1] != rows.q.shape[1],
    )


def _unmarked(_: str, value: Tensor) -> Tensor:
    return value


KERNELS: dict[str, Callable[[Tensor, Tensor, Tensor, Terms, Mark], Tensor]] = {"reference": reference, "fused": fused}


def kernel(name: str) -> Callable[[Tensor, Tensor, Tensor, Terms, Mark], Tensor]:
    """The kernel of that name; ``flex`` is that of `tensor.flex`.

    Raises:
        ScantlingInputError: no such kernel.
    """
    if name == "flex":
        from scantling.tensor.flex import flex

        return flex
    if name not in KERNELS:
        raise ScantlingInputError(f"unknown attention kernel {name!r}: use one of {', '.join(KERNELS)}, flex")
    return KERNELS[name]
