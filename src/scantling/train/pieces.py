"""Cross-entropy piece by piece: rows are scored, judged, and turned into their gradients at once.

Three products a piece, as many as the plain loss needs, and the memory of one piece (Wijmans et al., arXiv:2411.09009,
and Hsu et al., arXiv:2410.10989, section 3.2, do the same in one kernel).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scantling.train.scoring import IGNORED, Share, Terms

BLOCK = 2**18
"""Logits of a piece that are gone over at a time: as many as a cache of a core holds in float32."""


class Pieces(torch.autograd.Function):
    """Loss and gradients, piece by piece; `backward` only scales what `forward` has made."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        scores: tuple[float | None, Share | None],
        terms: Terms,
        count: float | Tensor,
        size: int,
        wanted: bool,
    ) -> tuple[Tensor, Tensor]:
        needs = [wanted and need for need in ctx.needs_input_grad[:3]]
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        d_hidden = torch.empty_like(hidden) if needs[0] else None
        d_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if needs[1] else None
        d_bias = torch.zeros(weight.shape[0], dtype=wide, device=weight.device) if needs[2] else None
        # Sums over many tokens lose digits in float32; mps has nothing wider.
        sums = torch.float32 if hidden.device.type == "mps" else torch.float64
        objective, nll = torch.zeros(2, dtype=sums, device=hidden.device)
        held = torch.empty(min(size, hidden.shape[0]), weight.shape[0], dtype=wide, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, hidden.shape[0], size):
                x, y = hidden[start : start + size], labels[start : start + size]
                logits = _scores(x, weight, bias, held[: x.shape[0]])
                part, bare = _piece(logits, y, scores, terms, count if any(needs) else None)
                objective += part.sum(dtype=sums)
                nll += bare.sum(dtype=sums)
                if not any(needs):
                    continue
                if d_bias is not None:
                    d_bias += logits.sum(0)
                narrow = logits.to(hidden.dtype)
                if d_hidden is not None:
                    torch.mm(narrow, weight, out=d_hidden[start : start + size])
                if d_weight is not None and d_weight.dtype == narrow.dtype:
                    d_weight.addmm_(narrow.T, x)
                elif d_weight is not None:
                    d_weight += narrow.T @ x
        if d_hidden is not None and scores[1] is not None:
            scores[1].sum(d_hidden)
        ctx.gradients = (
            d_hidden,
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None or bias is None else d_bias.to(bias.dtype),
        )
        ctx.mark_non_differentiable(nll)
        return (objective / count).to(wide), nll

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        scale = slopes[0]
        # On a CPU a look at the scalar is free, and it is 1 but for a scaled or a summed loss.
        same = scale.device.type == "cpu" and float(scale) == 1.0
        scaled = [g if g is None or same else g * scale.to(g.dtype) for g in ctx.gradients]
        return (*scaled, None, None, None, None, None, None)


def _scores(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """x W^T + b (n, V) in the memory of `out`, rounded to the vectors' dtype first where that is narrower."""
    if out.dtype != x.dtype:
        return out.copy_(torch.nn.functional.linear(x, weight, bias))
    if bias is None:
        return torch.mm(x, weight.T, out=out)
    return torch.addmm(bias, x, weight.T, out=out)


def _piece(
    logits: Tensor,
    labels: Tensor,
    scores: tuple[float | None, Share | None],
    terms: Terms,
    count: float | Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Each row's objective and bare loss (n,), of logits (n, V) before the cap.

    They are overwritten by d objective / d logits over `count`; None wants no slope, and leaves no meaning in them.
    A few rows at a time, so that all passes over them find them in a cache; ranks that ask each other do it once.
    """
    whole = logits.device.type != "cpu" or scores[1] is not None
    size = logits.shape[0] if whole else max(1, BLOCK // logits.shape[1])
    found = [
        _rows(logits[i : i + size], labels[i : i + size], scores, terms, count) for i in range(0, logits.shape[0], size)
    ]
    return torch.cat([each for each, _ in found]), torch.cat([bare for _, bare in found])


def _rows(
    x: Tensor, labels: Tensor, scores: tuple[float | None, Share | None], terms: Terms, count: float | Tensor | None
) -> tuple[Tensor, Tensor]:
    """`_piece` of rows x (n, V), which are overwritten.

    With p the softmax, e the smoothing and z the factor on lse^2, the slope is (1 + 2 z lse) p - (1 - e) onehot
    - e / V, through the cap times 1 - (capped / c)^2. Where ranks divide the vocabulary each has its columns of the
    logits, and of the rows' sums (of exponentials, of the label's logit, of all logits) its part.
    """
    softcap, share = scores
    judged = labels != IGNORED
    own = judged if share is None else judged & (labels >= share.start) & (labels < share.start + x.shape[-1])
    at = torch.where(own, labels - (0 if share is None else share.start), 0)[:, None]
    turned = None
    if softcap is not None:
        x.div_(softcap).tanh_()
        turned = None if count is None else x.clone()
        x.mul_(softcap)
    e, z, zero, n = terms.label_smoothing, terms.z_loss, x.new_zeros(()), x.shape[-1]
    picked = x.gather(-1, at)[:, 0]
    total = x.sum(-1) if e else zero
    most = x.amax(-1, keepdim=True)
    exponentials = x.sub_(most).exp_().sum(-1, keepdim=True)
    lse = (exponentials.log() + most)[:, 0]
    if share is not None:
        lse, picked, n = share.logsumexp(lse), share.sum(picked * own), share.whole
        total = share.sum(total) if e else zero
        exponentials = (lse[:, None] - most).exp()
    bare = torch.where(judged, lse - picked, zero)
    each = (1 - e) * bare + e * torch.where(judged, lse - total / n, zero) if e else bare
    if z:
        each = each + z * torch.where(judged, lse.square(), zero)
    if count is None:
        return each, bare
    counts = judged.to(x.dtype)[:, None] / count
    x.mul_(counts * (1 + 2 * z * lse[:, None]) / exponentials if z else counts / exponentials)
    if e:
        x.sub_(counts * (e / n))
    x.scatter_add_(-1, at, (own[:, None] * counts * -(1 - e)).to(x.dtype))
    if turned is not None:
        x.mul_(1 - turned.square())
    # What is not judged says nothing, also where it is not finite.
    x[~judged] = 0.0
    return each, bare
