"""The parts list: a Part is one component of a Transformer, a Step one row of what it does.

In a part's `forward(self, net, ...)`, `self` is the drawing (sizes and choices, no tensors) and `net` is the hull
(the built module that holds the weights and the built children).
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from scantling.parts.cost import FREE, Cost
from scantling.parts.dims import Dim, Shape
from scantling.parts.saved import Value, flowing
from scantling.parts.step import Factor, Step, join, named, total
from scantling.parts.work import Workload

if TYPE_CHECKING:
    from torch import nn

__all__ = ["FREE", "Child", "Cost", "Factor", "Part", "Shape", "Step", "Workload", "cycles", "join", "total"]

Child: TypeAlias = "Part | tuple[Part, ...]"
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
    def of_source(self) -> bool:
        """Whether `state` keeps the positions of an encoder-decoder's source, and not those of the text."""
        return False

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
    def source_slots(self) -> frozenset[str]:
        """Those of `named_state` that have the source's positions."""
        return frozenset(
            f"{path}:{name}" for path, part, _ in self.walk() if part.of_source for name in part.state(Workload())
        )

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
    ) -> Generator[Step, None, Value]:
        """Rows of the child `name`, seen from here.

        Args:
            op, note: what the child is to this part.
            sizes: this part's symbols for those of the child: its ``d_out`` is our ``H*d_head``.

        Returns:
            What the child passes on.
        """
        child = self.children()[name]
        assert isinstance(child, Part)
        seen = (
            replace(
                step,
                path=join(name, step.path),
                op=op or step.op,
                note=note or step.note,
                dims=named(step.dims, sizes),
                factors=tuple(factor._replace(dims=named(factor.dims, sizes)) for factor in step.factors),
            )
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
