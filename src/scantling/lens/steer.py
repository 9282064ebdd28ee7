"""Steering: a direction in the stream, from pairs of texts or from a file, added while the model runs.

(Turner et al., arXiv:2308.10248; the mean difference at the last token, Rimsky et al., arXiv:2312.06681, section 3.)
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scantling.errors import ScantlingInputError
from scantling.lens.arrays import read_arrays, write_arrays
from scantling.lens.edits import add
from scantling.lens.hooks import ALL_REAL, capture, edited
from scantling.lens.points import chosen
from scantling.lens.reading import first_target
from scantling.passes import Given

if TYPE_CHECKING:
    from scantling.model import Model


@dataclass(frozen=True)
class Direction:
    """A vector (d) at a capture point."""

    point: str
    vector: Tensor

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as a safetensors file whose one tensor is named by the point."""
        write_arrays(Path(path), {self.point: self.vector})


def direction_of(
    lm: Model, pairs: Sequence[tuple[str, str]], point: str, position: int = -1, normalize: bool = False
) -> Direction:
    """The mean difference of what passes a point at one token, between the first text of each pair and the second.

    Args:
        position: of the token in each text; negative ones count from the end.
        normalize: divided by its Euclidean length.

    Raises:
        ScantlingInputError: no pair, no such point, no such token, texts without a difference, or no tokenizer.
    """
    if not pairs:
        raise ScantlingInputError("no pair of texts is given: a direction needs at least one")
    (at,) = chosen(lm.parts, [point])
    difference = torch.stack([_seen(lm, a, at, position) - _seen(lm, b, at, position) for a, b in pairs]).mean(0)
    length = float(difference.norm())
    if not length:
        raise ScantlingInputError(f"the texts of each pair give the same at {point!r}: there is no direction")
    return Direction(at, difference / length if normalize else difference)


def _seen(lm: Model, text: str, point: str, position: int) -> Tensor:
    if lm.tokenizer is None:
        raise ScantlingInputError("the model has no tokenizer beside it, so texts give no direction")
    ids = lm.tokenizer.encode(text)
    if not ids:
        raise ScantlingInputError("a text of a pair is empty: at least one token is needed")
    given = Given(decoder_ids=first_target(lm)) if lm.parts.two_stacks else ALL_REAL
    value = capture(lm, ids, [point], given)[point]
    if value.dim() != 3:
        raise ScantlingInputError(f"{point!r} is no stream of vectors (B, T, d): it has shape {list(value.shape)}")
    if not -value.shape[1] <= position < value.shape[1]:
        raise ScantlingInputError(f"position {position}: a text of a pair has {value.shape[1]} tokens")
    return value[0, position].float()


def read_direction(lm: Model, path: str | os.PathLike[str]) -> Direction:
    """A direction from a safetensors file with one tensor (d), named by a capture point of the model.

    Raises:
        ScantlingInputError: no such file, more than one tensor, no such point, or no vector.
    """
    found = read_arrays(path)
    if len(found) != 1:
        raise ScantlingInputError(f"{path}: {len(found)} tensors; a direction is one, named by its capture point")
    ((name, vector),) = found.items()
    if vector.dim() != 1:
        raise ScantlingInputError(f"{path}: {name!r} has shape {list(vector.shape)}; a vector is needed")
    try:
        (point,) = chosen(lm.parts, [name])
    except (ScantlingInputError, ValueError) as error:
        raise ScantlingInputError(f"{path}: {error}") from None
    return Direction(point, vector)


@contextmanager
def steering(
    lm: Model, direction: Direction, strength: float = 1.0, positions: Sequence[int] | None = None
) -> Iterator[Model]:
    """Within the context `strength` times the direction is added in every pass, also those of `lm.generate`.

    Args:
        positions: of each pass's tokens; None for all. A generated token is a pass of its own.
    """
    with edited(lm, add(direction.point, direction.vector, strength, positions)):
        yield lm
