"""One micro-batch through a block on one rank: arithmetic, what is kept, and the exchange that it waits for."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace

from scantling.numbers.parallel.assumptions import IN_SITU
from scantling.numbers.parallel.communication import Fabric, Traffic
from scantling.numbers.parallel.layouts import Layout
from scantling.numbers.parallel.rows import Rows
from scantling.numbers.parallel.work import ACTIVATIONS, Speed, Ways, Work, work
from scantling.parts.attention import Attention
from scantling.parts.block import Block, ParallelBlock
from scantling.parts.latent import LatentAttention
from scantling.parts.moe import MoE
from scantling.parts.part import Part, Workload
from scantling.units import DTYPE_BYTES

SIZE = DTYPE_BYTES[ACTIVATIONS]


@dataclass(frozen=True)
class Pass:
    """A micro-batch on a rank, forward and backward.

    Attributes:
        work: arithmetic.
        again: seconds of what the backward computes again, its exchange included.
        tensor, context, experts: seconds of exchange that is waited for, without what is repeated.
        saved: bytes kept for the backward.
        shared: of them what all blocks share, by its name: tables of positions, an encoder's output.
        working: bytes more that the backward of one block keeps, where it is computed again.
        traffic: every exchange, what is repeated included.
    """

    work: Work = field(default_factory=Work)
    again: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    experts: float = 0.0
    saved: float = 0.0
    shared: Mapping[Hashable, float] = field(default_factory=dict)
    working: float = 0.0
    traffic: tuple[Traffic, ...] = ()

    def __add__(self, other: Pass) -> Pass:
        return Pass(
            self.work + other.work,
            self.again + other.again,
            self.tensor + other.tensor,
            self.context + other.context,
            self.experts + other.experts,
            self.saved + other.saved,
            {**self.shared, **other.shared},
            max(self.working, other.working),
            (*self.traffic, *other.traffic),
        )

    def times(self, n: int) -> Pass:
        """The same for `n` equal blocks."""
        traffic = tuple(replace(t, times=n * t.times) for t in self.traffic)
        waits = (n * self.again, n * self.tensor, n * self.context, n * self.experts)
        return Pass(self.work.times(n), *waits, n * self.saved, self.shared, self.working, traffic)

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.work.forward + self.work.backward + self.again + self.tensor + self.context + self.experts


@dataclass(frozen=True)
class Exchange:
    """What the ranks of a layout exchange inside a pass.

    Attributes:
        hidden: whether the tensor ranks' exchange hides behind products of the backward.
    """

    fabric: Fabric
    layout: Layout
    hidden: bool

    def reductions(self, size: int, times: int) -> tuple[float, tuple[Traffic, ...]]:
        """Seconds and traffic of `times` sums of a tensor over tensor ranks in the forward; the backward has as many.

        Divided by positions, a sum is a reduce-scatter, and an all-gather restores the whole (arXiv:2205.05198, 4.2.2).
        """
        n = self.layout.mesh.tensor
        if n == 1:
            return 0.0, ()
        parts = ("all-gather", "reduce-scatter") if self.layout.sequence else ("all-reduce",)
        seconds = sum(self.fabric.seconds(kind, n, 1, size, times) for kind in parts)
        inside = self.fabric.inside(n, 1)
        return seconds, tuple(Traffic("tensor", kind, n, inside, size, 2 * times) for kind in parts)

    def keys(self, size: int, times: int) -> tuple[float, tuple[Traffic, ...]]:
        """Keys and values gathered from the context ranks: forward, and again with their gradients in the backward."""
        mesh = self.layout.mesh
        n, stride = mesh.context, mesh.tensor
        one = self.fabric.seconds("all-gather", n, stride, size, times)
        inside = self.fabric.inside(n, stride)
        kinds = (("all-gather", 2), ("reduce-scatter", 1))
        return one, tuple(Traffic("context", kind, n, inside, size, k * times) for kind, k in kinds if n > 1 and times)

    def tokens(self, size: int, times: int) -> tuple[float, tuple[Traffic, ...]]:
        """Tokens to their experts and back: twice in the forward, twice in the backward."""
        mesh = self.layout.mesh
        n, stride = mesh.expert, mesh.tensor
        one = self.fabric.seconds("all-to-all", n, stride, size, 2 * times)
        if n == 1 or not times:
            return 0.0, ()
        return one, (Traffic("experts", "all-to-all", n, self.fabric.inside(n, stride), size, 4 * times),)


def ways(layout: Layout) -> Ways:
    """How a layout divides the rows of a block."""
    mesh = layout.mesh
    return Ways(mesh.tensor, mesh.context, mesh.expert, layout.sequence and mesh.tensor > 1)


def block_pass(rows: Rows, speed: Speed, links: Exchange) -> Pass:
    """A micro-batch through one block."""
    layout, block, w = links.layout, rows.block, rows.w
    split = ways(layout)
    one = work(rows.steps, rows.where, split, speed)
    forward, traffic = links.reductions(rows.stream // layout.mesh.context, _sums(block))
    hidden = one.backward_products / 2 / IN_SITU if links.hidden else 0.0
    keys, of_keys = links.keys(_key_bytes(block, w) // layout.mesh.tensor, 1)
    sent, of_tokens = _experts(block, w, links)
    again = 0.0
    if layout.recompute == "block":
        again = one.forward + forward + keys + sent
        traffic, of_keys, of_tokens = (_repeated(each) for each in (traffic, of_keys, of_tokens))
    elif layout.recompute == "selective":
        again = one.core / IN_SITU
    saved, everything = (rows.kept(policy, split) for policy in (layout.recompute, "none"))
    return Pass(
        one,
        again,
        tensor=forward + max(0.0, forward - hidden),
        context=3 * keys,
        experts=2 * sent,
        saved=saved,
        shared={name: size / split.context for name, size in rows.shared.items()},
        working=everything - saved,
        traffic=(*traffic, *of_keys, *of_tokens),
    )


def _repeated(traffic: tuple[Traffic, ...]) -> tuple[Traffic, ...]:
    """A third pass through the block beside forward and backward."""
    return tuple(replace(t, times=t.times * 3 // 2) for t in traffic)


def _sums(block: Block | ParallelBlock) -> int:
    """Sums over tensor ranks in a forward: one for each sublayer, one for all where they run side by side."""
    return 1 if isinstance(block, ParallelBlock) else len(block.sublayers)


def _key_bytes(block: Part, w: Workload) -> int:
    """Bytes of the keys and values of a micro-batch, whole rows."""
    width = 0
    for _, part, _ in block.walk():
        if isinstance(part, Attention):
            width += 2 * part.n_kv_heads * part.d_head
        elif isinstance(part, LatentAttention):
            width += part.kv_rank + part.d_rope
    return w.batch * w.tokens * width * SIZE


def _experts(block: Part, w: Workload, links: Exchange) -> tuple[float, tuple[Traffic, ...]]:
    seconds: float = 0.0
    traffic: tuple[Traffic, ...] = ()
    for _, part, _ in block.walk():
        if isinstance(part, MoE):
            rows = w.batch * w.tokens * part.router.top_k // ways(links.layout).stream
            more, of_it = links.tokens(rows * part.router.d_model * SIZE, 1)
            seconds, traffic = seconds + more, (*traffic, *of_it)
    return seconds, traffic
