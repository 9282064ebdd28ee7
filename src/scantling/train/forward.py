"""One micro-batch through the net to its loss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from scantling.errors import ScantlingInputError
from scantling.parts.heads import Head
from scantling.parts.transformer import Transformer
from scantling.tensor import router_losses
from scantling.tensor.context import Context
from scantling.tensor.router_losses import Routing
from scantling.train.loss import judge
from scantling.train.scoring import IGNORED, Scoring, Share, Terms


class Rows(Protocol):
    """What a micro-batch brings, as `scantling.data.Batch` names it: numpy arrays (B, T)."""

    @property
    def ids(self) -> Any:
        """Tokens; of an encoder-decoder the source's."""

    @property
    def labels(self) -> Any:
        """At the places where they are judged; -100 is not judged."""

    @property
    def document_ids(self) -> Any:
        """Documents that do not see each other."""

    @property
    def position_ids(self) -> Any:
        """From 0 in each document."""

    @property
    def attention_mask(self) -> Any:
        """False at padding."""

    @property
    def prefix_lengths(self) -> Any:
        """(B,) or None."""

    @property
    def decoder_ids(self) -> Any:
        """The target, shifted right, of an encoder-decoder, or None."""


@dataclass(frozen=True)
class Inputs:
    """A micro-batch as tensors; what says nothing is None, so that the plainest kernel runs.

    Attributes:
        ids, labels: (B, T); labels stand where they are judged, -100 is not.
        judged: labels that are not -100.
        positions: (B, T), or None where the context counts them itself.
        documents: (B, T) numbers of documents that do not see each other, negative at padding, or None.
        padding: (B, T), True at real tokens, or None where nothing real could read padding.
        real: (B, T), True at real tokens, or None where all are; for counts over tokens.
        source, source_padding: (B, S) of an encoder-decoder.
        prefix_lengths: (B,), how much of each row is read both ways.
    """

    ids: Tensor
    labels: Tensor
    judged: int
    positions: Tensor | None = None
    documents: Tensor | None = None
    padding: Tensor | None = None
    real: Tensor | None = None
    source: Tensor | None = None
    source_padding: Tensor | None = None
    prefix_lengths: Tensor | None = None


def inputs(rows: Rows, parts: Transformer, device: torch.device) -> Inputs:
    """A micro-batch of arrays as tensors on a device."""

    def tensor(value: Any, kind: Any = np.int64) -> Any:
        if value is None:
            return None
        return torch.from_numpy(np.ascontiguousarray(value, dtype=kind)).to(device, non_blocking=True)

    labels, judged = tensor(rows.labels), int((rows.labels != IGNORED).sum())
    mask = None if np.all(rows.attention_mask) else rows.attention_mask
    if rows.decoder_ids is not None:
        return Inputs(
            tensor(rows.decoder_ids), labels, judged, source=tensor(rows.ids), source_padding=tensor(mask, np.bool_)
        )
    real = tensor(mask, np.bool_)
    if _several(rows.document_ids, rows.attention_mask):
        numbers = np.where(rows.attention_mask, rows.document_ids, -1)
        return Inputs(tensor(rows.ids), labels, judged, documents=tensor(numbers), real=real)
    places = np.broadcast_to(np.arange(rows.ids.shape[1]), rows.ids.shape)
    hidden = mask is not None and not (_causal(parts) and _behind(mask) and rows.prefix_lengths is None)
    return Inputs(
        tensor(rows.ids),
        labels,
        judged,
        positions=None if np.array_equal(rows.position_ids, places) else tensor(rows.position_ids),
        padding=real if hidden else None,
        real=real,
        prefix_lengths=tensor(rows.prefix_lengths),
    )


def _several(documents: Any, mask: Any) -> bool:
    """Whether a row holds more than one document; padding is of none."""
    return bool(((documents != documents[:, :1]) & mask).any())


def _behind(mask: Any) -> bool:
    """Whether padding stands behind everything real."""
    return not bool((mask[:, 1:] & ~mask[:, :-1]).any())


def _causal(parts: Transformer) -> bool:
    """Whether no token reads one behind it."""
    return all(part.visibility.causal for _, part, _ in parts.walk() if hasattr(part, "visibility"))


@dataclass(frozen=True)
class How:
    """How the loss is computed.

    Attributes:
        router_balance, router_z: factors on the losses of routers.
        recompute: which activations are made again in the backward pass.
        autocast: dtype that products run in while the weights are wider, or None.
        rows: of a piece of the loss; None is the default.
        plain: hold all logits.
        kernel: of attention.
    """

    terms: Terms = field(default_factory=Terms)
    router_balance: float = 0.0
    router_z: float = 0.0
    recompute: str = "none"
    autocast: torch.dtype | None = None
    rows: int | None = None
    plain: bool = False
    kernel: str = "fused"


@dataclass(frozen=True)
class Result:
    """Of one micro-batch.

    Attributes:
        objective: its share of the step's loss, with a gradient; the shares of all micro-batches add up.
        nll: summed over its judged tokens, in nats.
        routing: what routers did.
    """

    objective: Tensor
    nll: Tensor
    routing: dict[str, Routing]


def check_head(parts: Transformer) -> Head:
    """The head over the vocabulary.

    Raises:
        ScantlingInputError: the card has another head, which these losses do not train.
    """
    if not isinstance(parts.head, Head):
        raise ScantlingInputError(
            "training needs a head over the vocabulary (head.kind: lm); this card's gives labels, vectors or nothing"
        )
    return parts.head


def forward(net: nn.Module, parts: Transformer, batch: Inputs, count: float, how: How, training: bool = True) -> Result:
    """The loss of a micro-batch, divided by the judged tokens of the whole step.

    The losses of routers are no sums over tokens: each micro-batch's counts with its share of the judged tokens.

    Args:
        count: judged tokens of all micro-batches and processes of the step.
        training: dropout acts.

    Raises:
        ScantlingInputError: a head without a vocabulary, or documents in a row where the card cannot keep them apart.
    """
    head = check_head(parts)
    routed = training and bool(how.router_balance or how.router_z)
    with _autocast(batch.ids.device, how.autocast):
        ctx = context(batch, how, training)
        hidden = net(batch.ids, ctx) if batch.source is None else net(batch.ids, ctx, batch.source)
        scoring = _scoring(head, *head.matrix(net.head, _table(net, parts)))
        judged = judge(hidden, batch.labels, scoring, count, how.terms, how.rows, how.plain)
    objective = judged.objective
    if routed and ctx.routing:
        share = batch.judged / count
        if how.router_balance:
            found = router_losses.load_balancing_loss(ctx.routing.values(), batch.real)
            objective = objective + how.router_balance * share * found
        if how.router_z:
            objective = objective + how.router_z * share * router_losses.z_loss(ctx.routing.values(), batch.real)
    return Result(objective, judged.nll, dict(ctx.routing))


def context(batch: Inputs, how: How, training: bool) -> Context:
    """The context of a pass over a micro-batch, which stops before the scores."""
    said: dict[str, Any] = {
        "positions": batch.positions,
        "documents": batch.documents,
        "padding": batch.padding,
        "source_padding": batch.source_padding,
        "prefix_lengths": batch.prefix_lengths,
        "recompute": how.recompute if training and how.recompute != "none" else None,
        "kernel_name": how.kernel,
    }
    given = {name: value for name, value in said.items() if value is not None}
    return Context.of(batch.ids, training=training, before_scores=True, **given)


def _table(net: Any, parts: Transformer) -> Tensor:
    """The weight of the table that a tied head scores with."""
    table: Tensor = (net.target_embed if parts.target_embed else net.embed).weight
    return table


def _scoring(head: Head, weight: Any, bias: Any) -> Scoring:
    """How vectors are scored: by the whole vocabulary, or by this rank's rows of a matrix that is divided."""
    if not hasattr(weight, "device_mesh"):
        return Scoring(weight, bias, head.vocab_size, head.softcap)
    assert weight.device_mesh.mesh_dim_names == ("tensor",), "the matrix is a shard of data ranks, outside of a pass"
    rows = weight.to_local()
    start = weight.device_mesh.get_local_rank() * len(rows)
    if bias is not None:
        bias = bias.to_local() if hasattr(bias, "device_mesh") else bias[start : start + len(rows)]
    share = Share(weight.device_mesh.get_group(), start, head.vocab_size)
    return Scoring(rows, bias, min(len(rows), head.vocab_size - start), head.softcap, share)


def _autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


@contextmanager
def watched(net: nn.Module) -> Iterator[list[str]]:
    """The first module whose output is not finite, while the block runs: a list of one name, or empty."""
    found: list[str] = []

    def look(name: str, out: Any) -> None:
        if not found and isinstance(out, Tensor) and out.is_floating_point() and not bool(out.isfinite().all()):
            found.append(name)

    hooks = [
        module.register_forward_hook(lambda _, __, out, name=name: look(name, out))
        for name, module in net.named_modules()
        if name
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
