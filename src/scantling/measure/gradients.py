"""The norm of the gradient of each block: with the weights as they are, and after some updates."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from scantling.errors import ScantlingInputError
from scantling.measure.asked import Asked, judged, rows
from scantling.measure.figure import Figure, Line, Plot
from scantling.measure.stream import stream
from scantling.model import Model
from scantling.parts.transformer import Transformer
from scantling.train.forward import How, Inputs, forward
from scantling.train.optim import norms_by_block
from scantling.train.scoring import IGNORED

XIONG = "Xiong et al., On Layer Normalization in the Transformer Architecture, arXiv:2002.04745"


def gradients(lm: Model, asked: Asked) -> Figure:
    """Gradient norms of one batch, before and after `steps` updates of AdamW on it, and their predicted profile.

    Raises:
        ScantlingInputError: the head does not score a vocabulary, so there is no loss.
    """
    if not judged(lm):
        raise ScantlingInputError(f"gradients need a loss over a vocabulary; this card's head is {lm.card.head.kind}")
    batch, net = batch_of(lm, asked), copy.deepcopy(lm.net).requires_grad_(True)
    first, loss = norms(net, lm.parts, batch)
    losses = [loss, *updates(net, lm.parts, batch, asked)]
    last, loss = norms(net, lm.parts, batch)
    names = [name for name in first if ".blocks." in name]
    profile = predicted(lm, asked, first, names)
    table = tuple((name, first[name], profile.get(name), last[name]) for name in first)
    columns = ("block", "as it is", "predicted", f"after {asked.steps} updates")
    at = tuple(range(len(names)))
    curves = {"as it is": first, f"after {asked.steps} updates": last, "predicted": profile}
    lines = tuple(Line(k, at, tuple(v[n] for n in names), k == "predicted") for k, v in curves.items() if v)
    data = {
        "losses": [*losses, loss],
        "last_over_first": ratio(first, names),
        "last_over_first_after": ratio(last, names),
    }
    plots = (Plot("block", "norm of the gradient", lines, "y"),) if names else ()
    return Figure("gradients", "Gradient norm per block", columns, table, _notes(lm, data, bool(profile)), plots, data)


def batch_of(lm: Model, asked: Asked) -> Inputs:
    """Rows with their labels: the next token of a decoder, the token itself of others."""
    ids = rows(lm, asked, asked.length)
    if lm.parts.two_stacks:
        start = torch.cat([ids[:, :1], ids[:, :-1]], 1)
        return Inputs(start, ids, ids.numel(), source=ids)
    labels = ids
    if lm.card.family == "decoder":
        labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], IGNORED)], 1)
    return Inputs(ids, labels, int((labels != IGNORED).sum()))


def norms(net: nn.Module, parts: Transformer, batch: Inputs) -> tuple[dict[str, float], float]:
    """The norm of the gradient of each block and of what is outside, and the loss in nats per token."""
    net.zero_grad(set_to_none=True)
    result = forward(net, parts, batch, batch.judged, How(), training=False)
    result.objective.backward()  # type: ignore[no-untyped-call]
    found: dict[str, Tensor] = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    return norms_by_block(found), float(result.nll) / batch.judged


def updates(net: nn.Module, parts: Transformer, batch: Inputs, asked: Asked) -> Iterable[float]:
    """Make the updates and give the loss before each but the first."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=asked.lr)
    for step in range(asked.steps):
        _, loss = norms(net, parts, batch)
        optimizer.step()
        if step:
            yield loss


def ratio(by_block: dict[str, float], names: list[str]) -> float | None:
    """The last block's norm over the first one's, of the last stack."""
    if not names:
        return None
    stack = names[-1].partition(".")[0]
    own = [name for name in names if name.startswith(f"{stack}.")]
    return by_block[own[-1]] / by_block[own[0]]


def predicted(lm: Model, asked: Asked, found: dict[str, float], names: list[str]) -> dict[str, float]:
    """The profile of a pre-norm stack: the gradient of the stream reaches all blocks about alike, and the norm in
    front of a block divides it by the size of what that block reads. Only the mean is taken from the measurement."""
    if not names or not lm.parts.stacks or any(place != "in" for place in lm.card.norm.at):
        return {}
    sizes = {name: stream_in for name, stream_in in _read(lm, asked).items() if name in names}
    if len(sizes) < len(names):
        return {}
    whole: dict[str, float] = {}
    for stack in lm.parts.stacks:
        own = [name for name in names if name.startswith(f"{stack}.")]
        mean = math.exp(math.fsum(math.log(found[name] * sizes[name]) for name in own) / len(own))
        whole |= {name: mean / sizes[name] for name in own}
    return whole


def _read(lm: Model, asked: Asked) -> dict[str, float]:
    """The root mean square of what each block reads."""
    return {layer.path: layer.rms_in for layer in stream(lm, asked)}


def _notes(lm: Model, data: Mapping[str, Any], profiled: bool) -> tuple[str, ...]:
    notes = []
    if data["last_over_first"] is not None:
        before, after = data["last_over_first"], data["last_over_first_after"]
        notes.append(f"the last block's norm over the first one's: {before:.3g}, after the updates {after:.3g}")
    if profiled:
        notes.append(
            "predicted: as 1 over the size of the stream that a block reads, which its norm divides by; scaled to the "
            "measured mean"
        )
    elif "out" in lm.card.norm.at:
        notes.append(f"predicted for post-norm: the largest near the output at initialisation ({XIONG})")
    return tuple(notes)
