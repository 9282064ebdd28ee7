"""The logit lens: what the head would say of the stream after each layer (nostalgebraist, 2020); tuned by an affine
map per layer where one is given (Belrose et al., arXiv:2303.08112)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scantling.errors import ScantlingInputError, nearest
from scantling.lens.arrays import read_arrays
from scantling.lens.attribution import head_of, vocabulary_head
from scantling.lens.hooks import ALL_REAL, Edit, capture
from scantling.lens.points import stack_of
from scantling.lens.residual import checked_positions
from scantling.passes import Given

if TYPE_CHECKING:
    from scantling.model import Model


@dataclass(frozen=True)
class Reading:
    """What the stream says after one layer.

    Attributes:
        point: its capture point: ``STACK.blocks.0:in`` is the embeddings.
        top: (P, K) ids of the likeliest tokens at P positions of one row.
        probabilities: (P, K) of them.
        target: (P) probabilities of the tokens that the model itself finds likeliest, or of those asked for.
        ranks: (P) of the same, 1 for the likeliest.
        entropy: (P) in nats.
        divergence: (P) KL(model's own distribution || this one), in nats.
    """

    point: str
    top: Tensor
    probabilities: Tensor
    target: Tensor
    ranks: Tensor
    entropy: Tensor
    divergence: Tensor


def lens_logits(
    lm: Model,
    ids: Any,
    given: Given = ALL_REAL,
    *,
    positions: Sequence[int] | None = None,
    tuned: Mapping[str, Tensor] | None = None,
    edits: Sequence[Edit] = (),
) -> Iterator[tuple[str, Tensor]]:
    """For each layer its capture point and the logits (B, P, V) that the head reads there.

    The final norm takes each layer's own size; in a post-norm stack there is none. Of all positions, the last layer's
    are the model's logits bit for bit.

    Args:
        tuned: ``PATH.weight`` (d, d) and ``PATH.bias`` (d) for each block's path: x W^T + b is read instead of x.

    Raises:
        ScantlingInputError: a head without a vocabulary, no such position, or maps that do not fit.
    """
    vocabulary_head(lm)
    where, stack = stack_of(lm)
    blocks = [f"{where}.blocks.{i}" for i in range(len(stack.blocks))]
    points = [f"{blocks[0]}:in", *blocks] if blocks else [f"{where}:in"]
    maps = {} if tuned is None else checked_maps(tuned, points[1:-1], lm.card.d_model)
    seen = capture(lm, ids, [*points, where], given, edits)
    at = checked_positions(seen[where].shape[1], positions)
    net: Any = getattr(lm.net, "_orig_mod", lm.net)
    head, norm = head_of(lm), getattr(net, where).final_norm if stack.final_norm is not None else None

    @torch.no_grad()
    def read(point: str) -> Tensor:
        if point == points[-1]:
            last: Tensor = head(seen[where] if positions is None else seen[where][:, at])
            return last
        stream = seen[point] if positions is None else seen[point][:, at]
        if point in maps:
            weight, bias = maps[point]
            stream = stream @ weight.to(stream).T + bias.to(stream)
        logits: Tensor = head(stream if norm is None else norm(stream))
        return logits

    # Gradients are off inside a layer's reading only: the caller may do other things between two of them.
    for point in points:
        yield point, read(point)


def logit_lens(
    lm: Model,
    ids: Any,
    given: Given = ALL_REAL,
    *,
    positions: Sequence[int] | None = None,
    tuned: Mapping[str, Tensor] | None = None,
    top: int = 5,
    targets: Sequence[int] | None = None,
) -> list[Reading]:
    """The likeliest tokens after each layer, from the embeddings to the model's own answer; of one row.

    Args:
        targets: a token per position whose probability and rank are followed; default the model's own likeliest.

    Raises:
        ScantlingInputError: as `lens_logits`, more than one row, or not a target per position.
    """
    vocabulary_head(lm)
    own = capture(lm, ids, [], given).out[0].log_softmax(-1)
    own = own[checked_positions(len(own), positions)]
    wanted = own.argmax(-1) if targets is None else torch.as_tensor(targets, device=own.device)
    if wanted.shape != own.shape[:1]:
        raise ScantlingInputError(f"{len(wanted)} targets for {own.shape[0]} positions: one each is needed")
    found = []
    for point, logits in lens_logits(lm, ids, given, positions=positions, tuned=tuned):
        logs = logits[0].log_softmax(-1)
        likeliest = logs.topk(min(top, logs.shape[-1]), -1)
        target = logs.gather(-1, wanted[:, None])[:, 0]
        found.append(
            Reading(
                point,
                likeliest.indices,
                likeliest.values.exp(),
                target.exp(),
                (logs > target[:, None]).sum(-1) + 1,
                -(logs.exp() * logs).sum(-1),
                (own.exp() * (own - logs)).sum(-1).clamp(min=0),
            )
        )
    return found


def read_tuned(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The affine maps of a tuned lens from a safetensors file: ``decoder.blocks.3.weight`` (d, d), ``.bias`` (d).

    Raises:
        ScantlingInputError: no such file, or no safetensors.
    """
    return read_arrays(path)


def checked_maps(tuned: Mapping[str, Tensor], points: Sequence[str], d: int) -> dict[str, tuple[Tensor, Tensor]]:
    """A map (weight, bias) for every point.

    Raises:
        ScantlingInputError: one is missing, of another shape, or of a block that does not exist.
    """
    wanted = {
        f"{point}.{kind}": (d, d) if kind == "weight" else (d,) for point in points for kind in ("weight", "bias")
    }
    for name, shape in wanted.items():
        if name not in tuned:
            raise ScantlingInputError(f"the tuned lens has no {name!r}; each block but the last one needs one")
        if tuple(tuned[name].shape) != shape:
            raise ScantlingInputError(
                f"the tuned lens: {name!r} has shape {list(tuned[name].shape)}, not {list(shape)}"
            )
    if unknown := sorted(set(tuned) - set(wanted)):
        raise ScantlingInputError(f"the tuned lens: unknown {unknown[0]!r}{nearest(unknown[0], wanted)}")
    return {point: (tuned[f"{point}.weight"], tuned[f"{point}.bias"]) for point in points}
