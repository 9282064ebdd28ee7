"""A row of the trace: its shape in symbols and numbers, what it costs, what it keeps, what gets a gradient there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from scantling.parts.cost import FREE, Cost
from scantling.parts.dims import Dim, Dims, Shape, elements, shape_of
from scantling.parts.saved import Value


class Factor(NamedTuple):
    """Something that a row reads and that gets a gradient of its own shape.

    Attributes:
        name: x, W, q, ...
        dims: its axes.
        cost: of the product that makes its gradient; None: as much as the row itself, as in any matrix product.
        weight: it is a parameter.
        stored: the gradient is a tensor of its own; False where a kernel keeps it to itself.
        formula: of the gradient, dy being that of the row's output.
    """

    name: str
    dims: Dims
    cost: Cost | None = None
    weight: bool = False
    stored: bool = True
    formula: str = ""


UNSAID = Value("unsaid", 0)


@dataclass(frozen=True)
class Step:
    """One row of the trace.

    Attributes:
        path: the module whose output this is, or ``module:point`` for a value between modules.
        op: what happens, in two or three words.
        dims: the axes of the output, each a symbol and a number.
        params: parameters used here and counted here (a tied matrix is counted where it is owned).
        cost: FLOPs of matrix products only.
        repeat: how many equal blocks this row stands for.
        formula: the operation in symbols.
        note: one plain sentence.
        dtype: of the output where it is not the activations' own.
        stored: whether the output is a tensor of its own; False for a view of another one, and where a kernel only
            reads it by an index.
        factors: what a backward pass makes gradients of here: the factors of a product, the weights of anything.
        saved: what autograd keeps here for the backward, also where another row keeps it too.
        saved_bytes: of what no row before keeps; known in the rows of a whole Transformer.
        before_saving: of the products that come before the last value is kept here.
        again: computed a second time in the backward.
        out: the storage of what is passed on: of this row's own, where nothing else is said.
    """

    path: str
    op: str
    dims: Dims
    params: int = 0
    cost: Cost = FREE
    repeat: int = 1
    formula: str = ""
    note: str = ""
    dtype: str | None = None
    stored: bool = True
    factors: tuple[Factor, ...] = ()
    saved: tuple[Value, ...] = ()
    saved_bytes: int = 0
    before_saving: Cost = FREE
    again: Cost = FREE
    out: Value = UNSAID

    def __post_init__(self) -> None:
        if self.out is UNSAID:
            object.__setattr__(self, "out", Value(self.op, self.numel, self.dtype))

    @property
    def shape(self) -> Shape:
        """Of the output."""
        return shape_of(self.dims)

    @property
    def symbols(self) -> tuple[str, ...]:
        """The same in symbols."""
        return tuple(dim.symbol for dim in self.dims)

    @property
    def numel(self) -> int:
        """Elements of the output."""
        return elements(self.dims)

    @property
    def flops(self) -> int:
        """Over the full square."""
        return self.cost.full

    @property
    def flops_again(self) -> int:
        """A second time in the backward, over the full square."""
        return self.again.full

    @property
    def flops_visible(self) -> int:
        """Over the pairs that are seen."""
        return self.cost.visible

    def under(self, prefix: str, repeat: int = 1) -> Step:
        """The same row seen from the parent: its path prefixed, standing for `repeat` equal blocks."""
        return replace(self, path=join(prefix, self.path), repeat=self.repeat * repeat)


def named(dims: Dims, sizes: Mapping[str, Dim]) -> Dims:
    if not sizes:
        return dims
    assert all(sizes[dim.symbol].size == dim.size for dim in dims if dim.symbol in sizes)
    return tuple(sizes.get(dim.symbol, dim) for dim in dims)


def join(prefix: str, path: str) -> str:
    """A dotted path; capture points hang on a colon: ``attn`` + ``:q_heads`` is ``attn:q_heads``."""
    return prefix + path if not prefix or not path or path.startswith(":") else f"{prefix}.{path}"


def total(steps: Iterable[Step], field: str) -> int:
    """Sum of a numeric field over rows, each as often as it repeats."""
    return sum(int(getattr(step, field)) * step.repeat for step in steps)
