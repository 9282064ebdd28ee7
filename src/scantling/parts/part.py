"""The parts list: a Part is one component of a Transformer, a Step one row of what it does.

In a part's `forward(self, net, ...)`, `self` is the drawing (sizes and choices, no tensors) and `net` is the hull
(the built module that holds the weights and the built children).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from scantling.errors import ScantlingInputError
from scantling.parts.dims import Dim, Dims, Shape, elements, shape_of

if TYPE_CHECKING:
    from torch import nn

Child: TypeAlias = "Part | tuple[Part, ...]"


@dataclass(frozen=True)
class Workload:
    """What a model is asked to do in one pass.

    Attributes:
        batch: rows (B).
        tokens: new positions per row (T).
        past: positions already in the cache (P); keys are S = P + T.
        source: positions of an encoder-decoder's source; default as many as its keys.
        training: no cache, and a loss over every position instead of next-token probabilities.
        kernel: ``fused`` never holds the T x S scores; ``reference`` is plain matmul and softmax.
        lead: leading axes of the activations where they are not (B, T): the rows sent to experts.
        last_only: the head reads the last position only, as a prefill does.
        unrolled: rows for every block, instead of one block with the number of its repeats.
        prefix_lengths: of each row, in layers with a prefix; () where no row has one.
        of_source: the tokens are an encoder-decoder's source, which the encoder reads.
    """

    batch: int = 1
    tokens: int = 1
    past: int = 0
    source: int | None = None
    training: bool = False
    kernel: str = "fused"
    lead: Dims | None = None
    last_only: bool = False
    unrolled: bool = False
    prefix_lengths: tuple[int, ...] = ()
    of_source: bool = False

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("tokens", 1), ("past", 0), ("source", 1)):
            value = getattr(self, name)
            if name == "source" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ScantlingInputError(f"{name} is {value!r}; a whole number of at least {least} is needed")
        if self.kernel not in ("fused", "reference"):
            raise ScantlingInputError(f"kernel is {self.kernel!r}; use fused or reference")
        if self.training and self.past:
            raise ScantlingInputError("a training pass has no cache: past must be 0")
        if self.prefix_lengths and (len(self.prefix_lengths) != self.batch or min(self.prefix_lengths) < 0):
            raise ScantlingInputError(
                f"prefix_lengths are {list(self.prefix_lengths)}; a length of at least 0 for each of {self.batch} rows"
                " is needed"
            )

    @property
    def keys(self) -> int:
        """Key positions per row: S = P + T."""
        return self.past + self.tokens

    @property
    def sources(self) -> int:
        """Positions of the source."""
        return self.keys if self.source is None else self.source

    @property
    def B(self) -> Dim:
        """Rows."""
        return Dim("B", self.batch)

    @property
    def T(self) -> Dim:
        """New positions, of the source where that is what is read."""
        return Dim("T_src" if self.of_source else "T", self.tokens)

    @property
    def S(self) -> Dim:
        """Key positions."""
        return self.T if self.of_source else Dim("S", self.keys)

    @property
    def T_src(self) -> Dim:
        """Positions of the source."""
        return Dim("T_src", self.sources)

    @property
    def rows(self) -> Dims:
        """Leading axes of an activation."""
        return (self.B, self.T) if self.lead is None else self.lead


class Cost(NamedTuple):
    """FLOPs of a matrix product, 2 per multiply-add, in three conventions.

    Attributes:
        full: attention over the full T x S square, as a kernel without a shortcut computes it.
        causal: attention over the pairs whose key is not after the query, in layers that hide what comes after:
            T (T + 1) / 2 of a row, whatever window the layer has.
        visible: attention over exactly the pairs that the layer's Visibility lets be seen, windows and all.
    """

    full: int = 0
    causal: int = 0
    visible: int = 0

    @classmethod
    def of(cls, flops: int) -> Cost:
        """A product that does not depend on which pairs are seen."""
        return cls(flops, flops, flops)

    def scaled(self, factor: int) -> Cost:
        """So many times the cost."""
        return Cost(*(n * factor for n in self))


FREE = Cost()
"""No product."""


class Factor(NamedTuple):
    """Something that a row reads and that gets a gradient of its own shape.

    Attributes:
        name: x, W, q, ...
        dims: its axes.
        cost: of the product that makes its gradient; None: as much as the row itself, as in any matrix product.
        weight: it is a parameter.
        stored: the gradient is a tensor of its own; False where a kernel keeps it to itself.
    """

    name: str
    dims: Dims
    cost: Cost | None = None
    weight: bool = False
    stored: bool = True


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
        stored: whether the output is a tensor of its own; False where a kernel only reads it by an index.
        factors: what a backward pass makes gradients of here: the factors of a product, the weights of anything.
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
    def flops_causal(self) -> int:
        """Over the causal half, windows or not."""
        return self.cost.causal

    @property
    def flops_visible(self) -> int:
        """Over the pairs that are seen."""
        return self.cost.visible

    def under(self, prefix: str, repeat: int = 1) -> Step:
        """The same row seen from the parent: its path prefixed, standing for `repeat` equal blocks."""
        return replace(self, path=join(prefix, self.path), repeat=self.repeat * repeat)


def _named(dims: Dims, sizes: Mapping[str, Dim]) -> Dims:
    if not sizes:
        return dims
    assert all(sizes[dim.symbol].size == dim.size for dim in dims if dim.symbol in sizes)
    return tuple(sizes.get(dim.symbol, dim) for dim in dims)


def join(prefix: str, path: str) -> str:
    """A dotted path; capture points hang on a colon: ``attn`` + ``:q_heads`` is ``attn:q_heads``."""
    return prefix + path if not prefix or not path or path.startswith(":") else f"{prefix}.{path}"


NOTHING: Mapping[str, Dim] = {}


class Part:
    """A component: what it owns, what it contains, what it costs, what it remembers, what it computes.

    Subclasses are frozen, final dataclasses. They override `children`, `weights`, `steps`, `state` and `forward`;
    everything else is derived.
    """

    @property
    def role(self) -> str | None:
        """Heading under which `count` lists the weights; None takes the parent's. Subclasses set a class attribute."""
        return None

    def children(self) -> Mapping[str, Child]:
        """Sub-parts by name; the names are the path in the state dict."""
        return {}

    def weights(self) -> Mapping[str, Shape]:
        """Parameters that the part owns directly."""
        return {}

    def buffers(self) -> Mapping[str, Shape]:
        """Numbers that are stored with the weights and that no gradient trains: no parameters."""
        return {}

    @property
    def computed(self) -> bool:
        """Whether the part's own weights are computed when it is built: counted, never trained, never stored."""
        return False

    def compute(self) -> Mapping[str, Any]:
        """The values of such weights, float32 tensors by name."""
        return {}

    def steps(self, w: Workload) -> Iterator[Step]:
        """Rows of the trace in the order of execution: the only place where a cost is written."""
        raise NotImplementedError(type(self).__name__)

    def state(self, w: Workload) -> Mapping[str, Shape]:
        """What the part itself keeps between decode steps, sized for `w.keys` positions."""
        return {}

    @property
    def initial(self) -> Mapping[str, float]:
        """First values of weights that are not drawn like matrices."""
        return {}

    def idle_params(self) -> int:
        """Parameters that no single token uses (experts not chosen), children included."""
        return sum(part.idle_params() for _, part in self.parts())

    def forward(self, net: Any, *args: Any) -> Any:
        """The computation on tensors."""
        raise NotImplementedError(type(self).__name__)

    def module(self, path: str) -> nn.Module:
        """The torch module of this part at `path`, on the current default device. Leaves return torch's own classes."""
        from scantling.parts.net import Net

        return Net(self, path)

    def build(self, device: str = "cpu", dtype: str = "float32", seed: int | None = 0) -> nn.Module:
        """Build the real module with initial weights, in evaluation mode.

        Args:
            device: any torch device; ``meta`` allocates nothing.
            dtype: of the weights: float32, float16, bfloat16 or float64.
            seed: of the initial weights; None leaves them uninitialised, for loading over.

        Raises:
            ScantlingInputError: no such device or dtype, or the weights do not fit into the free memory.
            MissingExtra: torch is not installed.
        """
        from scantling.errors import need

        need("torch", "build the model")
        from scantling.parts.net import build

        return build(self, device, dtype, seed)

    def parts(self) -> Iterator[tuple[str, Part]]:
        """Direct sub-parts with their paths, tuples spread out."""
        for name, child in self.children().items():
            if isinstance(child, tuple):
                for i, part in enumerate(child):
                    yield f"{name}.{i}", part
            else:
                yield name, child

    def walk(self, path: str = "", role: str = "other") -> Iterator[tuple[str, Part, str]]:
        """Every part of the tree, itself first: (path, part, role)."""
        role = self.role or role
        yield path, self, role
        for name, part in self.parts():
            yield from part.walk(join(path, name), role)

    @property
    def named_weights(self) -> dict[str, Shape]:
        """Every parameter of the tree by its name in the state dict."""
        return {join(path, name): shape for path, part, _ in self.walk() for name, shape in part.weights().items()}

    @property
    def named_buffers(self) -> dict[str, Shape]:
        """Every buffer of the tree by its name in the state dict."""
        return {join(path, name): shape for path, part, _ in self.walk() for name, shape in part.buffers().items()}

    @property
    def named_stored(self) -> dict[str, Shape]:
        """What a checkpoint holds: every weight that is not computed, and every buffer."""
        computed = {join(path, name) for path, part, _ in self.walk() if part.computed for name in part.weights()}
        kept = {name: shape for name, shape in self.named_weights.items() if name not in computed}
        return kept | self.named_buffers

    def named_state(self, w: Workload) -> dict[str, Shape]:
        """Everything the tree keeps between decode steps, by path."""
        return {f"{path}:{name}": shape for path, part, _ in self.walk() for name, shape in part.state(w).items()}

    @property
    def params(self) -> int:
        """Exact number of parameters, a tied matrix once."""
        return sum(math.prod(shape) for shape in self.named_weights.values())

    @property
    def active_params(self) -> int:
        """Parameters that one token uses: all but the experts not chosen."""
        return self.params - self.idle_params()

    def steps_of(
        self, name: str, w: Workload, op: str | None = None, note: str | None = None, sizes: Mapping[str, Dim] = NOTHING
    ) -> Iterator[Step]:
        """Rows of the child `name`, seen from here.

        Args:
            op, note: what the child is to this part.
            sizes: this part's symbols for those of the child: its ``d_out`` is our ``H*d_head``.
        """
        child = self.children()[name]
        assert isinstance(child, Part)
        for step in child.steps(w):
            yield replace(
                step,
                path=join(name, step.path),
                op=op or step.op,
                note=note or step.note,
                dims=_named(step.dims, sizes),
                factors=tuple(factor._replace(dims=_named(factor.dims, sizes)) for factor in step.factors),
            )


def cycles(parts: tuple[Part, ...]) -> Iterator[tuple[int, int, int]]:
    """Runs of repeating parts as (start, period, times), covering all of them in order.

    A local/global pattern of period 2 over 8 blocks is one run (0, 2, 4); three dense blocks before 58 sparse
    ones are (0, 1, 3), (3, 1, 58).
    """
    start = 0
    while start < len(parts):
        best = (1, 1)
        for period in range(1, min(16, (len(parts) - start) // 2) + 1):
            unit = parts[start : start + period]
            times = 1
            while parts[start + times * period : start + (times + 1) * period] == unit:
                times += 1
            if times > 1 and times * period > best[0] * best[1]:
                best = (period, times)
        period, times = best
        yield start, period, times
        start += period * times


def total(steps: Iterable[Step], field: str) -> int:
    """Sum of a numeric field over rows, each as often as it repeats."""
    return sum(int(getattr(step, field)) * step.repeat for step in steps)
