"""The parts list: a Part is one component of a Transformer, a Step one row of what it does.

In a part's `forward(self, net, ...)`, `self` is the drawing (sizes and choices, no tensors) and `net` is the hull
(the built module that holds the weights and the built children).
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from scantling.errors import ScantlingInputError
from scantling.parts.saved import POLICIES, Value, flowing
from scantling.units import DTYPE_BYTES

if TYPE_CHECKING:
    from torch import nn

Shape: TypeAlias = tuple[int, ...]
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
        lead: leading shape of the activations where it is not (B, T): the rows sent to experts.
        last_only: the head reads the last position only, as a prefill does.
        unrolled: rows for every block, instead of one block with the number of its repeats.
        prefix_lengths: of each row, in layers with a prefix; () where no row has one.
        dtype: of weights and activations, which decides what a training pass keeps.
        autocast: what torch.autocast runs products in, where it is not `dtype`.
        recompute: what a training pass computes again in the backward: ``none``, ``selective``, ``block``.
        packed: documents share the rows, and each row has its own.
        x: what the part reads, known inside a training pass.
        beside: what it reads besides: the encoder's output, or where each expert's rows end.
    """

    batch: int = 1
    tokens: int = 1
    past: int = 0
    source: int | None = None
    training: bool = False
    kernel: str = "fused"
    lead: Shape | None = None
    last_only: bool = False
    unrolled: bool = False
    prefix_lengths: tuple[int, ...] = ()
    dtype: str = "float32"
    autocast: str | None = None
    recompute: str = "none"
    packed: bool = False
    x: Value | None = None
    beside: Value | None = None

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("tokens", 1), ("past", 0), ("source", 1)):
            value = getattr(self, name)
            if name == "source" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ScantlingInputError(f"{name} is {value!r}; a whole number of at least {least} is needed")
        if self.kernel not in ("fused", "reference"):
            raise ScantlingInputError(f"kernel is {self.kernel!r}; use fused or reference")
        if self.recompute not in POLICIES:
            raise ScantlingInputError(f"recompute is {self.recompute!r}; use one of {', '.join(POLICIES)}")
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
    def rows(self) -> Shape:
        """Leading shape of an activation."""
        return (self.batch, self.tokens) if self.lead is None else self.lead

    def on(self, x: Value) -> Workload:
        """The same for a part that reads `x`."""
        return replace(self, x=x) if self.training else self

    def read(self, numel: int, dtype: str | None = None) -> Value:
        """What the part reads; where nobody says, a tensor of its own."""
        return self.x or Value("x", numel, dtype)

    def keep(self, *values: Value) -> tuple[Value, ...]:
        """The values in training, nothing in inference."""
        return values if self.training else ()

    def cast(self, x: Value, numel: int, dtype: str | None) -> Value:
        """`x`, of which `numel` elements are meant, in `dtype`: itself where that is what it has."""
        return x if (x.dtype or self.dtype) == (dtype or self.dtype) else Value(f"{x.name} as {dtype}", numel, dtype)

    def factor(self, x: Value, numel: int) -> Value:
        """`x` as a product reads it: autocast casts it each time."""
        return x if self.autocast is None else self.cast(x, numel, self.autocast)

    def joint(self, *values: Value) -> str | None:
        """The dtype of a sum: that of the widest, where it is not the activations' own."""
        widest = max((v.dtype or self.dtype for v in values), key=DTYPE_BYTES.__getitem__)
        return None if widest == self.dtype else widest

    @property
    def places(self) -> int:
        """Rows that have positions of their own: one for all, unless they are packed."""
        return self.batch if self.packed else 1


UNSAID = Value("unsaid", 0)


@dataclass(frozen=True)
class Step:
    """One row of the trace.

    Attributes:
        path: the module whose output this is, or ``module:point`` for a value between modules.
        op: what happens, in two or three words.
        shape: of the output.
        params: parameters used here and counted here (a tied matrix is counted where it is owned).
        flops: of matrix products only, 2 per multiply-add, attention over the full T x S square.
        flops_visible: the same with only the pairs that the layer's Visibility lets be seen.
        repeat: how many equal blocks this row stands for.
        formula: the operation in symbols.
        note: one plain sentence.
        dtype: of the output where it is not the activations' own.
        stored: whether the output is a tensor of its own; False where a kernel only reads it by an index.
        saved: what autograd keeps here for the backward, also where another row keeps it too.
        saved_bytes: of what no row before keeps; known in the rows of a whole Transformer.
        flops_before_saving: of the products that come before the last value is kept here.
        flops_again: computed a second time in the backward.
        out: the storage of what is passed on: of this row's own, where nothing else is said.
    """

    path: str
    op: str
    shape: Shape
    params: int = 0
    flops: int = 0
    flops_visible: int = 0
    repeat: int = 1
    formula: str = ""
    note: str = ""
    dtype: str | None = None
    stored: bool = True
    saved: tuple[Value, ...] = ()
    saved_bytes: int = 0
    flops_before_saving: int = 0
    flops_again: int = 0
    out: Value = UNSAID

    def __post_init__(self) -> None:
        if self.out is UNSAID:
            object.__setattr__(self, "out", Value(self.op, self.numel, self.dtype))

    @property
    def numel(self) -> int:
        """Elements of the output."""
        return math.prod(self.shape)

    def under(self, prefix: str) -> Step:
        """The same row seen from the parent: its path prefixed."""
        return replace(self, path=join(prefix, self.path))

    def times(self, repeat: int) -> Step:
        """The same row standing for `repeat` equal blocks."""
        return replace(self, repeat=self.repeat * repeat)


def join(prefix: str, path: str) -> str:
    """A dotted path; capture points hang on a colon: ``attn`` + ``:q_heads`` is ``attn:q_heads``."""
    return prefix + path if not prefix or not path or path.startswith(":") else f"{prefix}.{path}"


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
        self, name: str, w: Workload, op: str | None = None, note: str | None = None
    ) -> Generator[Step, None, Value]:
        """Rows of the child `name`, seen from here; `op` and `note` say what the child is to this part.

        Returns:
            What the child passes on.
        """
        child = self.children()[name]
        assert isinstance(child, Part)
        seen = (
            replace(step, path=join(name, step.path), op=op or step.op, note=note or step.note)
            for step in child.steps(w)
        )
        return (yield from flowing(seen, w.x))


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
