"""The trace of one pass: its rows forward and, in training, those of the backward; bytes, and the largest of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from scantling.numbers.flops import added
from scantling.parts.dims import Dims, Shape, elements, shape_of
from scantling.parts.part import FREE, Cost, Factor, Step, Workload
from scantling.parts.transformer import Transformer
from scantling.units import DTYPE_BYTES

FORWARD, AGAIN, BACKWARD = "forward", "forward again", "backward"
_BLOCK = re.compile(r"\w+\.blocks\.\d+")


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        stage: forward; backward, what makes one gradient; or forward again, what a recompute policy does for it.
        dims: of what comes out: an activation, or a gradient.
        params: parameters used here and counted here, forward rows only.
        bytes: of what comes out, 0 where it is no tensor of its own.
        saved_bytes: kept here for the backward and nowhere before.
        repeat: equal blocks that the row stands for.
        largest: name and bytes of the largest tensor that is made here: what comes out, or what is kept besides.
    """

    stage: str
    path: str
    op: str
    dims: Dims
    params: int
    cost: Cost
    bytes: int
    saved_bytes: int
    repeat: int
    formula: str
    note: str
    largest: tuple[str, int]

    @property
    def shape(self) -> Shape:
        """In numbers."""
        return shape_of(self.dims)

    @property
    def symbols(self) -> tuple[str, ...]:
        """In symbols."""
        return tuple(dim.symbol for dim in self.dims)

    @property
    def numel(self) -> int:
        """Elements of what comes out."""
        return elements(self.dims)


@dataclass(frozen=True)
class Trace:
    """Every row of one pass, and what they add up to.

    Attributes:
        params: of the model, a tied matrix once.
        cache_bytes: keys and values (or latents) after the pass.
    """

    rows: tuple[Row, ...]
    params: int
    cache_bytes: int

    def cost(self, *stages: str) -> Cost:
        """FLOPs of the rows of these stages, of all where none is named."""
        return added(row.cost.scaled(row.repeat) for row in self.rows if not stages or row.stage in stages)

    @property
    def saved_bytes(self) -> int:
        """All that is kept for the backward."""
        return sum(row.saved_bytes * row.repeat for row in self.rows)

    @property
    def largest(self) -> Row:
        """The row that makes the largest tensor, the first of equals."""
        return max(self.rows, key=lambda row: row.largest[1])

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """What each symbol stands for; more than one number where layers differ."""
        found: dict[str, set[int]] = {}
        for row in self.rows:
            for dim in row.dims:
                for name, size in dim.names:
                    found.setdefault(name, set()).add(size)
        return {name: tuple(sorted(sizes)) for name, sizes in found.items()}


def trace(model: Transformer, w: Workload) -> Trace:
    """The rows of one pass over `w`; of a training pass the backward's follow, last row first.

    Raises:
        ScantlingInputError: the workload is none that the model can do.
    """
    steps = list(model.steps(w))
    rows = [_forward(step, w) for step in steps]
    kept = {} if w.training else model.named_state(w)
    cache = sum(row.bytes * row.repeat for row in rows if row.path in kept)
    if w.training:
        rows += _backward(steps, w)
    return Trace(tuple(rows), model.params, cache)


def _forward(step: Step, w: Workload) -> Row:
    size = step.numel * DTYPE_BYTES[step.dtype or w.dtype] if step.stored else 0
    made = [(step.op, size), *((value.name, value.nbytes(w.dtype)) for value in step.saved)]
    numbers = (step.params, step.cost, size, step.saved_bytes, step.repeat)
    largest = max(made, key=lambda tensor: tensor[1])
    return Row(FORWARD, step.path, step.op, step.dims, *numbers, step.formula, step.note, largest)


def _backward(steps: list[Step], w: Workload) -> Iterator[Row]:
    """For each row, last first, a row per gradient; before those of a part what is done again for them.

    Rows without a product and without a weight (softmax, activations, additions, views) only hand gradients on and
    have none of their own.
    """
    regions = [list(rows) for _, rows in groupby(steps, key=lambda step: _region(step, w))]
    for region in reversed(regions):
        yield from (_again(step, w) for step in region if step.again != FREE)
        for step in reversed(region):
            yield from (_gradient(step, factor, w) for factor in step.factors)


def _region(step: Step, w: Workload) -> str:
    """Rows that are computed again together: a block, or one part's attention."""
    block = _BLOCK.match(step.path)
    if w.recompute == "block":
        return block[0] if block else ""
    return step.path.partition(":")[0] if step.again != FREE else ""


def _again(step: Step, w: Workload) -> Row:
    size = step.numel * DTYPE_BYTES[step.dtype or w.dtype] if step.stored else 0
    note = "Was not kept, so it is computed a second time."
    numbers, words = (0, step.again, size, 0, step.repeat), (step.formula, note)
    return Row(AGAIN, step.path, step.op, step.dims, *numbers, *words, (step.op, size))


def _gradient(step: Step, factor: Factor, w: Workload) -> Row:
    size = elements(factor.dims) * DTYPE_BYTES[w.dtype] if factor.stored else 0
    cost = step.cost if factor.cost is None else factor.cost
    note = "Of a weight: summed over all rows." if factor.weight else "Goes on to what came before."
    op, numbers = f"gradient of {factor.name}", (0, cost, size, 0, step.repeat)
    return Row(BACKWARD, step.path, op, factor.dims, *numbers, factor.formula, note, (op, size))
