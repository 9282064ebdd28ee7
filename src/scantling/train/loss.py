"""Cross-entropy from the vectors before the head's matrix, so that no (B, T, V) tensor is ever held; see `pieces`."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from scantling.errors import ScantlingInputError
from scantling.train.pieces import Pieces
from scantling.train.scoring import BARE, IGNORED, Scoring, Terms

PIECE = 2**24
"""Logits in one piece unless the caller says how many rows it has."""


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
    terms: Terms = BARE,
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
    objective, nll = Pieces.apply(  # type: ignore[no-untyped-call]
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
