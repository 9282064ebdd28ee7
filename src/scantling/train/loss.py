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

BLOCK = 2**18
"""Of them, as many as a cache of a core holds in float32."""


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
