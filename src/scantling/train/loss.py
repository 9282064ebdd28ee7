"""Cross-entropy from the vectors before the head's matrix, in pieces, so that no (B, T, V) tensor is ever held.

A piece of rows is scored, judged, and turned into its gradients at once, in the forward pass: three products a piece,
as many as the plain loss needs, and the memory of one piece (Wijmans et al., arXiv:2411.09009, and Hsu et al.,
arXiv:2410.10989, section 3.2, do the same in one kernel).
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from scantling.errors import ScantlingInputError

IGNORED = -100
"""The label of a position that is not judged."""

PIECE = 2**24
"""Logits in one piece unless the caller says how many rows it has."""


@dataclass(frozen=True)
class Share:
    """One rank's tokens of a vocabulary that tensor ranks divide; they all judge the same vectors.

    Attributes:
        group: of torch.distributed.
        start: the first token of this rank.
        whole: tokens of all ranks.
    """

    group: Any
    start: int
    whole: int

    def sum(self, x: Tensor) -> Tensor:
        """x summed over the ranks, in place."""
        torch.distributed.all_reduce(x, group=self.group)
        return x

    def logsumexp(self, lse: Tensor) -> Tensor:
        """That over all tokens, of each rank's own (n,)."""
        parts = [torch.empty_like(lse) for _ in range(torch.distributed.get_world_size(self.group))]
        torch.distributed.all_gather(parts, lse.contiguous(), group=self.group)
        return torch.stack(parts).logsumexp(0)


@dataclass(frozen=True)
class Scoring:
    """What makes logits of vectors x (N, d): softcap(x W^T + b), the first `vocab_size` of them.

    Attributes:
        weight: (rows, d), at least `vocab_size` rows.
        bias: (rows,), or None.
        vocab_size: of this rank where several divide the vocabulary.
        softcap: c in c * tanh(logits / c), or None.
        share: what part of the vocabulary this is; None is all of it.
    """

    weight: Tensor
    bias: Tensor | None
    vocab_size: int
    softcap: float | None = None
    share: Share | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """(N, V), in the vectors' dtype."""
        logits = torch.nn.functional.linear(hidden, self.weight, self.bias)[..., : self.vocab_size]
        return logits if self.softcap is None else (logits / self.softcap).tanh() * self.softcap


@dataclass(frozen=True)
class Terms:
    """What the loss is made of.

    Attributes:
        label_smoothing: share of each target that is spread evenly over the vocabulary (arXiv:1512.00567, section 7).
        z_loss: factor on (log sum_j exp x_j)^2, which keeps logits from drifting (PaLM, arXiv:2204.02311, section 5).
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing <= 1:
            raise ScantlingInputError(f"label_smoothing is {self.label_smoothing}; a number from 0 to 1 is needed")
        if not 0 <= self.z_loss < float("inf"):
            raise ScantlingInputError(f"z_loss is {self.z_loss}; a finite number of at least 0 is needed")


@dataclass(frozen=True)
class Judged:
    """Sums over the judged tokens of one call.

    Attributes:
        objective: what is trained on, with smoothing and z-loss, over the given count; a scalar with a gradient.
        nll: negative log-probability of the labels alone, in nats: a sum, without a gradient.
    """

    objective: Tensor
    nll: Tensor


def judge(
    hidden: Tensor,
    labels: Tensor,
    scoring: Scoring,
    count: float | Tensor,
    terms: Terms = Terms(),
    rows: int | None = None,
    plain: bool = False,
) -> Judged:
    """The loss of vectors under their labels, divided by a count of tokens that the caller gives.

    Args:
        hidden: (..., d), what the head's matrix multiplies.
        labels: (...), not shifted again here; -100 is not judged.
        count: of judged tokens, of the whole step where several calls make one update.
        rows: of a piece; default as many as make `PIECE` logits.
        plain: hold all logits and let autograd go through them, for comparison.

    Raises:
        ScantlingInputError: labels of another shape, a count that is not above 0, or pieces without rows.
    """
    if hidden.shape[:-1] != labels.shape:
        raise ScantlingInputError(
            f"labels have shape {list(labels.shape)} and the vectors {list(hidden.shape)}: one label a vector is needed"
        )
    if not isinstance(count, Tensor) and not count > 0:
        raise ScantlingInputError(f"the loss is divided by {count}; at least one judged token is needed")
    if rows is not None and rows < 1:
        raise ScantlingInputError(f"a piece of {rows} rows; at least 1 is needed")
    hidden, labels = hidden.flatten(0, -2), labels.flatten()
    if plain:
        if scoring.share is not None:
            raise ScantlingInputError("the plain loss takes the whole vocabulary, and tensor ranks divide it")
        return _plain(hidden, labels, scoring, count, terms)
    hidden, scoring = _cast(hidden, scoring)
    if hidden.device.type == "cuda" and scoring.share is None and fused_kernel():
        return _fused(hidden, labels, scoring, count, terms)
    weight = scoring.weight[: scoring.vocab_size]
    bias = None if scoring.bias is None else scoring.bias[: scoring.vocab_size]
    size = rows or max(16, PIECE // scoring.vocab_size)
    objective, nll = _Pieces.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, labels, (scoring.softcap, scoring.share), terms, count, size, torch.is_grad_enabled()
    )
    return Judged(objective, nll)


def fused_kernel() -> bool:
    """Whether liger-kernel's fused loss is installed; it is what runs on CUDA then."""
    return importlib.util.find_spec("liger_kernel") is not None


def _cast(hidden: Tensor, scoring: Scoring) -> tuple[Tensor, Scoring]:
    """Under autocast, vectors and matrix in its dtype, as it would cast them before a product."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        bias = None if scoring.bias is None else scoring.bias.to(dtype)
        hidden = hidden.to(dtype)
        scoring = replace(scoring, weight=scoring.weight.to(dtype), bias=bias)
    return hidden, scoring


def _plain(hidden: Tensor, labels: Tensor, scoring: Scoring, count: float | Tensor, terms: Terms) -> Judged:
    logits = scoring.logits(hidden)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    each = torch.nn.functional.cross_entropy(wide, labels, reduction="none", label_smoothing=terms.label_smoothing)
    judged = labels != IGNORED
    objective = each.sum() + terms.z_loss * (wide.logsumexp(-1).square() * judged).sum()
    with torch.no_grad():
        each = torch.nn.functional.cross_entropy(wide, labels, reduction="none")
        nll = each.double().sum() if each.device.type != "mps" else each.sum()
    return Judged(objective / count, nll)


def _fused(hidden: Tensor, labels: Tensor, scoring: Scoring, count: float | Tensor, terms: Terms) -> Judged:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    weight = scoring.weight[: scoring.vocab_size]
    bias = None if scoring.bias is None else scoring.bias[: scoring.vocab_size]
    total = liger_fused_linear_cross_entropy(
        hidden,
        weight,
        labels,
        bias=bias,
        ignore_index=IGNORED,
        lse_square_scale=terms.z_loss,
        label_smoothing=terms.label_smoothing,
        reduction="sum",
        softcap=scoring.softcap,
    )
    # The kernel returns the objective alone; with extra terms the bare sum is judged again without gradients.
    nll = total.detach()
    if terms.z_loss or terms.label_smoothing:
        with torch.no_grad():
            nll = liger_fused_linear_cross_entropy(
                hidden, weight, labels, bias=bias, ignore_index=IGNORED, reduction="sum", softcap=scoring.softcap
            )
    return Judged(total / count, nll)


class _Pieces(torch.autograd.Function):
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
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, hidden.shape[0], size):
                x, y = hidden[start : start + size], labels[start : start + size]
                logits = torch.nn.functional.linear(x, weight, bias).to(wide)
                part, bare, slope = _piece(logits, y, scores, terms, any(needs))
                objective += part.sum(dtype=sums)
                nll += bare.sum(dtype=sums)
                if slope is None:
                    continue
                slope = slope.div_(count)
                if d_bias is not None:
                    d_bias += slope.sum(0)
                narrow = slope.to(hidden.dtype)
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


def _piece(
    logits: Tensor, labels: Tensor, scores: tuple[float | None, Share | None], terms: Terms, slope: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Each row's objective and bare loss, and d objective / d logits, of logits (n, V) before the cap (overwritten).

    With p the softmax, e the smoothing and z the factor on lse^2: (1 + 2 z lse) p - (1 - e) onehot - e / V, through
    the cap times 1 - (capped / c)^2. Where ranks divide the vocabulary each has its columns of the logits, and of the
    rows' sums (of exponentials, of the label's logit, of all logits) its part.
    """
    softcap, share = scores
    judged = labels != IGNORED
    own = judged if share is None else judged & (labels >= share.start) & (labels < share.start + logits.shape[-1])
    at = torch.where(own, labels - (0 if share is None else share.start), 0)[:, None]
    turned = None
    if softcap is not None:
        turned = logits.div_(softcap).tanh_()
        logits = turned * softcap
    lse, n = logits.logsumexp(-1), logits.shape[-1]
    picked = logits.gather(-1, at)[:, 0]
    if share is not None:
        lse, picked, n = share.logsumexp(lse), share.sum(picked * own), share.whole
    zero = lse.new_zeros(())
    bare = torch.where(judged, lse - picked, zero)
    e, each = terms.label_smoothing, bare
    if e:
        mean = logits.mean(-1) if share is None else share.sum(logits.sum(-1)) / n
        each = (1 - e) * bare + e * torch.where(judged, lse - mean, zero)
    if terms.z_loss:
        each = each + terms.z_loss * torch.where(judged, lse.square(), zero)
    if not slope:
        return each, bare, None
    out = logits.sub_(lse[:, None]).exp_()
    if terms.z_loss:
        out.mul_(1 + 2 * terms.z_loss * lse[:, None])
    if e:
        out.sub_(e / n)
    out.scatter_add_(-1, at, own[:, None].to(out.dtype).mul_(-(1 - e)))
    if turned is not None:
        out.mul_(1 - turned.square())
    return each, bare, out.masked_fill_(~judged[:, None], 0.0)
