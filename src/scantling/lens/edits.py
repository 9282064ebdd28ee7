"""Edits: what can be put in place of what passes a point. `edited` applies them, `capture` takes them along."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scantling.errors import ScantlingInputError
from scantling.lens.hooks import ALL_REAL, Edit, capture
from scantling.passes import Given

if TYPE_CHECKING:
    from scantling.model import Model

BY_HEAD = ("mixed", "q_heads", "k_heads", "v_heads", "q_rotated", "k_rotated", "keys", "values", "weights", "scores")
"""Points whose second axis is heads: (B, H, T, ...)."""


def ablate(
    point: str,
    *,
    heads: Sequence[int] | None = None,
    neurons: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    value: float | Tensor = 0.0,
) -> Edit:
    """Put a constant in place of heads, neurons, or all of what passes a point.

    Args:
        point: ``...attn:mixed`` for heads, ``...mlp:hidden`` for neurons, the path of a sublayer for what it writes.
        heads, neurons: which; None for all. Heads are the second axis, neurons the last one.
        positions: of the pass's tokens; None for all.
        value: 0, or a mean from `means`, whose heads and neurons are all there are.

    Raises:
        ScantlingInputError: heads at a point that has none; and when the pass runs, one that does not exist.
    """
    by_head = point.rpartition(":")[2] in BY_HEAD
    if heads is not None and not by_head:
        names = ", ".join(f":{name}" for name in BY_HEAD)
        raise ScantlingInputError(f"heads are not apart at {point!r}; they are at {names} of an attention")

    def change(x: Tensor) -> Tensor:
        put = torch.as_tensor(value, dtype=x.dtype, device=x.device).expand_as(x)
        chosen = torch.ones((), dtype=torch.bool, device=x.device)
        axes = ((heads, 1, "head"), (positions, 2 if by_head else 1, "position"), (neurons, x.dim() - 1, "neuron"))
        for wanted, axis, what in axes:
            if wanted is not None:
                chosen = chosen & _picked(wanted, x, axis, f"{what} of {point!r}")
        return torch.where(chosen, put, x)

    return Edit(point, change)


def _picked(wanted: Iterable[int], x: Tensor, axis: int, what: str) -> Tensor:
    """True at the wanted places of an axis, in a shape that broadcasts."""
    size = x.shape[axis]
    picked = torch.zeros(size, dtype=torch.bool, device=x.device)
    for i in wanted:
        if not -size <= i < size:
            raise ScantlingInputError(f"{what}: {i} is none of 0 to {size - 1}")
        picked[i] = True
    return picked.view([size if i == axis else 1 for i in range(x.dim())])


def means(lm: Model, points: Iterable[str], ids: Any, given: Given = ALL_REAL) -> dict[str, Tensor]:
    """What passes each point on average over the rows and real tokens of `ids`, for `ablate`.

    (1, H, 1, D) where heads are apart, (1, 1, d) elsewhere.
    """
    seen = capture(lm, ids, points, given)
    real = None if given.attention_mask is None else torch.as_tensor(given.attention_mask).bool().to(lm.device)
    found = {}
    for point, value in seen.values.items():
        by_head = point.rpartition(":")[2] in BY_HEAD
        over = (0, 2) if by_head else (0, 1)
        if real is None or lm.parts.two_stacks:
            found[point] = value.mean(over, keepdim=True)
            continue
        weight = (real[:, None, :, None] if by_head else real[..., None]).to(value)
        found[point] = (value * weight).sum(over, keepdim=True) / weight.sum(over, keepdim=True)
    return found


def add(point: str, vector: Tensor, strength: float = 1.0, positions: Sequence[int] | None = None) -> Edit:
    """Add `strength` times a vector (d) at a point, at every token or at some.

    Raises:
        ScantlingInputError: when the pass runs, a vector that is not as wide as what passes.
    """

    def change(x: Tensor) -> Tensor:
        if vector.shape != x.shape[-1:]:
            raise ScantlingInputError(
                f"the direction has shape {list(vector.shape)} and what passes {point!r} is {x.shape[-1]} wide"
            )
        push = strength * vector.to(x)
        if positions is None:
            return x + push
        axis = 2 if point.rpartition(":")[2] in BY_HEAD else 1
        return x + _picked(positions, x, axis, f"position of {point!r}").to(x) * push

    return Edit(point, change)


def put(point: str, value: Tensor, positions: Sequence[Sequence[int]] | None = None) -> Edit:
    """Put another pass's value in place of this one's.

    Args:
        value: (1 or B, T, ...), or by heads (1 or B, H, T, ...).
        positions: for each row of the pass the tokens at which it is put; None for all of all rows.
    """
    axis = 2 if point.rpartition(":")[2] in BY_HEAD else 1

    def change(x: Tensor) -> Tensor:
        if value.shape[1:] != x.shape[1:]:
            raise ScantlingInputError(
                f"what was captured at {point!r} has shape {list(value.shape[1:])}, this pass has {list(x.shape[1:])}: "
                "both texts need as many tokens"
            )
        if positions is None:
            return value.to(x).expand_as(x)
        rows = [_picked(row, x[:1], axis, f"position of {point!r}") for row in positions]
        return torch.where(torch.cat(rows), value.to(x), x)

    return Edit(point, change)
