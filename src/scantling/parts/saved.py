"""What autograd keeps of a training pass for its backward, by storage: a storage that several operations keep is one.

The rows of a part name what torch's operators save there (the formulas of torch's derivatives.yaml, on CPU), and the
laws compare their sum with what `torch.autograd.graph.saved_tensors_hooks` sees.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from scantling.parts.cost import FREE
from scantling.units import DTYPE_BYTES

if TYPE_CHECKING:
    from scantling.parts.step import Step
    from scantling.parts.work import Workload

POLICIES = ("none", "selective", "block")
"""What is computed again in the backward instead of kept: nothing; the inner part of attention, of which queries, keys
and values are kept (Korthikanti et al., arXiv:2205.05198, section 5); whole blocks, of which the input is kept (Chen
et al., arXiv:1604.06174)."""


NARROW = "weights as autocast reads them"
"""Name of the copies of weights that autocast makes and the backward keeps."""


@dataclass(frozen=True, eq=False)
class Value:
    """The storage of a tensor of one pass. It equals only itself; a view is the Value of what it views.

    Attributes:
        name: what it is.
        numel: elements of the storage.
        dtype: where it is not the activations' own.
        key: names the storage where several blocks of a stack share it; None where it is one row's own.
    """

    name: str
    numel: int
    dtype: str | None = None
    key: Hashable = None

    def nbytes(self, activations: str) -> int:
        """Bytes, with activations in that dtype."""
        return self.numel * DTYPE_BYTES[self.dtype or activations]


def flowing(steps: Iterable[Step], x: Value | None) -> Generator[Step, None, Value]:
    """The same rows; returns what the last of them passes on, which is `x` where there are none."""
    last = None
    for last in steps:
        yield last
    return (x or Value("x", 0)) if last is None else last.out


def region(steps: Iterable[Step], kept: tuple[Value, ...]) -> Iterator[Step]:
    """Rows whose results are computed again in the backward, from `kept` alone.

    The second computation ends as soon as it has made the last of what the rows would have kept: torch's checkpoint
    stops there, so a product that comes after is not repeated.
    """
    rows = list(steps)
    last = max((i for i, step in enumerate(rows) if step.saved), default=-1)
    for i, step in enumerate(rows):
        again = step.cost if i < last else step.before_saving if i == last else FREE
        yield replace(step, saved=kept if i == 0 else (), again=again)


def settled(steps: Iterable[Step], w: Workload) -> list[Step]:
    """The rows of a whole pass, each with the bytes that it is the first to keep.

    What equal blocks share is counted once, in the last row before them that stands for itself alone.
    """
    rows: list[Step] = []
    anchor: int | None = None
    seen: set[Hashable] = set()
    for step in steps:
        own, shared = 0, 0
        for value in step.saved:
            name = value if value.key is None else (step.path.partition(".")[0], value.key)
            if name in seen:
                continue
            seen.add(name)
            if value.key is not None and step.repeat > 1:
                shared += value.nbytes(w.dtype)
            else:
                own += value.nbytes(w.dtype)
        rows.append(replace(step, saved_bytes=own))
        if step.repeat == 1:
            anchor = len(rows) - 1
        if shared:
            assert anchor is not None
            rows[anchor] = replace(rows[anchor], saved_bytes=rows[anchor].saved_bytes + shared)
    return rows
