"""Foreign tensor names and ours: rows of an invertible table, so that one table loads and saves."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Transform:
    """An invertible change of layout between their tensors and ours. This one changes nothing.

    `load` takes arrays of numpy as well as tensors.
    """

    def load(self, theirs: Sequence[Any], shapes: Sequence[Shape]) -> list[Any]:
        """Our tensors, of `shapes`, from theirs."""
        return list(theirs)

    def save(self, ours: Sequence[Any]) -> list[Any]:
        """Their tensors from ours."""
        return list(ours)

    def saved_shapes(self, ours: Sequence[Shape]) -> list[Shape]:
        """Shapes of their tensors, from ours."""
        return list(ours)

    def as_ours(self, shape: Shape) -> Shape:
        """A tensor of theirs turned as ours are; the rows of several that are one of theirs stay together."""
        return shape


@dataclass(frozen=True)
class Transpose(Transform):
    """Theirs are stored (d_in, d_out), as GPT-2's Conv1D does; vectors stay."""

    def load(self, theirs: Sequence[Any], shapes: Sequence[Shape]) -> list[Any]:
        return [x.T if x.ndim == 2 else x for x in theirs]

    def save(self, ours: Sequence[Any]) -> list[Any]:
        return self.load(ours, ())

    def saved_shapes(self, ours: Sequence[Shape]) -> list[Shape]:
        return [shape[::-1] for shape in ours]

    def as_ours(self, shape: Shape) -> Shape:
        return shape[::-1]


@dataclass(frozen=True)
class Unsqueeze(Transform):
    """Theirs has a first axis of length 1 more than ours."""

    def load(self, theirs: Sequence[Any], shapes: Sequence[Shape]) -> list[Any]:
        return [x.squeeze(0) for x in theirs]

    def save(self, ours: Sequence[Any]) -> list[Any]:
        return [x.unsqueeze(0) for x in ours]

    def saved_shapes(self, ours: Sequence[Shape]) -> list[Shape]:
        return [(1, *shape) for shape in ours]

    def as_ours(self, shape: Shape) -> Shape:
        return shape[1:]


def _cuts(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Where consecutive pieces of these lengths begin and end."""
    ends = list(accumulate(lengths))
    return list(zip([0, *ends], ends, strict=False))


@dataclass(frozen=True)
class Split(Transform):
    """Theirs is one tensor, ours are its consecutive rows; `inner` is applied to theirs first."""

    inner: Transform = field(default_factory=Transform)

    def load(self, theirs: Sequence[Any], shapes: Sequence[Shape]) -> list[Any]:
        (whole,) = self.inner.load(theirs, ())
        return [whole[start:end] for start, end in _cuts([shape[0] for shape in shapes])]

    def save(self, ours: Sequence[Any]) -> list[Any]:
        import torch

        return self.inner.save([torch.cat(list(ours), 0)])

    def saved_shapes(self, ours: Sequence[Shape]) -> list[Shape]:
        return self.inner.saved_shapes([(sum(shape[0] for shape in ours), *ours[0][1:])])

    def as_ours(self, shape: Shape) -> Shape:
        return self.inner.as_ours(shape)


@dataclass(frozen=True)
class Interleave(Transform):
    """Theirs is one tensor: for each of `groups` in turn, the rows of each of ours that belong to it.

    Fused queries, keys and values are laid out so, with a group for each KV head: its queries, its key, its value
    (GPT-NeoX, BLOOM, Falcon).
    """

    groups: int

    def load(self, theirs: Sequence[Any], shapes: Sequence[Shape]) -> list[Any]:
        (whole,) = theirs
        grouped = whole.reshape(self.groups, -1, *whole.shape[1:])
        pieces = [grouped[:, start:end] for start, end in _cuts([shape[0] // self.groups for shape in shapes])]
        return [x.reshape(-1, *x.shape[2:]) for x in pieces]

    def save(self, ours: Sequence[Any]) -> list[Any]:
        import torch

        grouped = [x.reshape(self.groups, -1, *x.shape[1:]) for x in ours]
        return [torch.cat(grouped, 1).flatten(0, 1)]

    def saved_shapes(self, ours: Sequence[Shape]) -> list[Shape]:
        return [(sum(shape[0] for shape in ours), *ours[0][1:])]


@dataclass(frozen=True)
class Stack(Transform):
    """Theirs are many equal tensors, ours is one with a new first axis: the experts."""

    def load(self, theirs: Sequence[Any], shapes: Sequence[Shape]) -> list[Any]:
        if hasattr(theirs[0], "__array_interface__"):
            import numpy

            return [numpy.stack(list(theirs))]
        import torch

        return [torch.stack(list(theirs))]

    def save(self, ours: Sequence[Any]) -> list[Any]:
        return list(ours[0].unbind(0))

    def saved_shapes(self, ours: Sequence[Shape]) -> list[Shape]:
        return [ours[0][1:]] * ours[0][0]


@dataclass(frozen=True)
class TransposeEach(Transform):
    """Theirs is a stack of matrices stored (d_in, d_out), one per expert; a stack of vectors stays."""

    def load(self, theirs: Sequence[Any], shapes: Sequence[Shape]) -> list[Any]:
        return [x.swapaxes(1, 2) if x.ndim == 3 else x for x in theirs]

    def save(self, ours: Sequence[Any]) -> list[Any]:
        return self.load(ours, ())

    def saved_shapes(self, ours: Sequence[Shape]) -> list[Shape]:
        return [(shape[0], *shape[:0:-1]) for shape in ours]

    def as_ours(self, shape: Shape) -> Shape:
        return (*shape[:1], *shape[:0:-1])


@dataclass(frozen=True)
class Alternate(Transform):
    """Theirs is one stack, ours are those of its rows that come in turn: gate, up, gate, up.

    `inner` is applied to theirs first.
    """

    inner: Transform = field(default_factory=Transform)

    def load(self, theirs: Sequence[Any], shapes: Sequence[Shape]) -> list[Any]:
        (whole,) = self.inner.load(theirs, ())
        return [whole[:, i :: len(shapes)] for i in range(len(shapes))]

    def save(self, ours: Sequence[Any]) -> list[Any]:
        import torch

        return self.inner.save([torch.stack(list(ours), 2).flatten(1, 2)])

    def saved_shapes(self, ours: Sequence[Shape]) -> list[Shape]:
        return self.inner.saved_shapes([(ours[0][0], len(ours) * ours[0][1], *ours[0][2:])])

    def as_ours(self, shape: Shape) -> Shape:
        return self.inner.as_ours(shape)


@dataclass(frozen=True)
class Halves(Transform):
    """Theirs keep the two channels of a rotated pair as neighbours, ours half a head apart (GGUF's llama layout)."""

    n_heads: int

    def load(self, theirs: Sequence[Any], shapes: Sequence[Shape]) -> list[Any]:
        return [x.reshape(self.n_heads, -1, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape) for x in theirs]

    def save(self, ours: Sequence[Any]) -> list[Any]:
        return [x.reshape(self.n_heads, 2, -1, *x.shape[1:]).transpose(1, 2).reshape(x.shape) for x in ours]


@dataclass(frozen=True)
class Row:
    """One line of a table: their names, our names, and what lies between.

    Names may hold ``{i}`` (the layer) and, in theirs, ``{e}`` (the expert, or the head that has a tensor of its own).
    A row of ``*`` on both sides is every weight under its own name.

    Attributes:
        suffixes: the ends of their names and of ours that belong together.
    """

    theirs: str
    ours: str | tuple[str, ...]
    transform: Transform = field(default_factory=Transform)
    suffixes: tuple[tuple[str, str], ...] = ((".weight", ".weight"), (".bias", ".bias"))


@dataclass(frozen=True)
class Link:
    """A row with every hole filled: tensors on both sides by their full names."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    transform: Transform


def links(rows: Sequence[Row], weights: Mapping[str, Shape]) -> list[Link]:
    """The table written out for a model with these weights; rows for weights that it lacks are left out.

    Raises:
        AssertionError: a weight of the model stands in no row.
    """
    out, missing = written_out(rows, weights)
    assert not missing, f"no row for {missing}"
    return out


def written_out(rows: Sequence[Row], weights: Mapping[str, Shape]) -> tuple[list[Link], list[str]]:
    """The same, and the weights that stand in no row: the table is not of this model if there are any."""
    layers = 1 + max((int(m[1]) for name in weights if (m := re.search(r"blocks\.(\d+)\.", name))), default=-1)
    out = list(_written_out(rows, weights, layers))
    covered = {name for link in out for name in link.ours}
    return out, [name for name in weights if name not in covered]


def _written_out(rows: Sequence[Row], weights: Mapping[str, Shape], layers: int) -> Iterator[Link]:
    for row in rows:
        bases = (row.ours,) if isinstance(row.ours, str) else row.ours
        if bases == ("*",):
            yield from (Link((name,), (name,), row.transform) for name in weights)
            continue
        for i in range(layers) if "{i}" in row.theirs else [0]:
            for their_suffix, suffix in row.suffixes:
                ours = tuple(base.replace("{i}", str(i)) + suffix for base in bases)
                if not all(name in weights for name in ours):
                    continue
                stem = row.theirs.replace("{i}", str(i)) + their_suffix
                experts = weights[ours[0]][0] if "{e}" in stem else 0
                theirs = tuple(stem.replace("{e}", str(e)) for e in range(experts)) if experts else (stem,)
                yield Link(theirs, ours, row.transform)


def foreign_shapes(table: Sequence[Link], weights: Mapping[str, Shape]) -> dict[str, Shape]:
    """Every tensor that the checkpoint of this model has: their name and shape."""
    shapes: dict[str, Shape] = {}
    for link in table:
        shapes |= zip(link.theirs, link.transform.saved_shapes([weights[name] for name in link.ours]), strict=True)
    return shapes


def heads(rows: Sequence[Row]) -> set[str]:
    """Names under which files store the head's matrix, also those of models that tie it and have none."""
    return {row.theirs + ".weight" for row in rows if row.ours in ("head", "head.matrix")}


def elements(shapes: Mapping[str, Shape]) -> int:
    """Numbers in all tensors together."""
    return sum(math.prod(shape) for shape in shapes.values())
