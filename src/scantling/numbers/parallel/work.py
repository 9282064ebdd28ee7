"""What one rank does for one micro-batch: rows of the trace, divided among tensor, context and expert ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from scantling.numbers.hardware import Device
from scantling.numbers.parallel.assumptions import (
    ATTENTION,
    ATTENTION_BACKWARD,
    BACKWARD_PASSES,
    IN_SITU,
    PASSES,
    UNMEASURED,
)
from scantling.numbers.parallel.shards import COLUMN, COPIED, ROW, divided
from scantling.parts.attention import Attention
from scantling.parts.cross import CrossAttention
from scantling.parts.heads import Head
from scantling.parts.latent import LatentAttention
from scantling.parts.leaf import GroupedLinear, HeadNorm, LayerNorm, RMSNorm
from scantling.parts.mlp import MLP, GatedMLP
from scantling.parts.part import Part, Step, join
from scantling.units import DTYPE_BYTES

ACTIVATIONS = "bfloat16"
CORE = (":k_shared", ":v_shared", ":scores", ":weights", ":mixed")
"""The core of an attention: the rows that a selective policy computes again."""
DROPPED = ("weights", "after_")
"""Points whose numbers a part with dropout reads and writes once more."""


@dataclass(frozen=True)
class Speed:
    """What a device reaches.

    Attributes:
        peak: dense FLOP/s.
        product: FLOP/s of a large matrix product.
        attention: FLOP/s of a fused attention.
        memory: bytes per second.
    """

    peak: float
    product: float
    attention: float
    memory: float


def speed(device: Device, dtype: str) -> Speed:
    """A device's speed in an arithmetic.

    Raises:
        ScantlingInputError: its peak or its bandwidth is not known.
    """
    peak = device.peak(dtype)
    measured = device.reached_tflops.get(dtype)
    product = UNMEASURED * peak if measured is None else measured * 1e12
    return Speed(peak, product, ATTENTION * product, device.bandwidth)


@dataclass(frozen=True)
class Ways:
    """How the rows of a block are divided.

    Attributes:
        tensor, context, expert: ranks.
        sequence: whether the stream is divided among tensor ranks too.
    """

    tensor: int = 1
    context: int = 1
    expert: int = 1
    sequence: bool = True

    @property
    def stream(self) -> int:
        """Ranks that share the stream: norms, residuals, routers."""
        return self.context * (self.tensor if self.sequence else 1)

    @property
    def inside(self) -> int:
        """Ranks that share what lies between the first and the last matrix of a sublayer."""
        return self.context * self.tensor


@dataclass(frozen=True)
class Work:
    """One rank's share of a forward pass and of its backward; every term adds up.

    Attributes:
        flops: carried out in the forward; a fused causal kernel skips what is hidden.
        products: seconds of matrix products and of attention in the forward, kernel by kernel.
        others: seconds of everything else in the forward.
        backward_products, backward_others: the same in the backward.
        core: seconds of the attention's core in the forward, which a selective policy adds to the backward.
    """

    flops: float = 0.0
    products: float = 0.0
    others: float = 0.0
    backward_products: float = 0.0
    backward_others: float = 0.0
    core: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def times(self, n: float) -> Work:
        """The same `n` times."""
        return Work(*(n * getattr(self, f.name) for f in fields(self)))

    @property
    def forward(self) -> float:
        """Seconds of the forward."""
        return (self.products + self.others) / IN_SITU

    @property
    def backward(self) -> float:
        """Seconds of the backward, nothing computed again."""
        return (self.backward_products + self.backward_others) / IN_SITU


@dataclass(frozen=True)
class Place:
    """Where the rows of a part stand.

    Attributes:
        how: its weight is divided: column, row, copied.
        output, input: whether they lie inside a sublayer, divided by heads or channels, and not in the stream.
        experts: how many weights there are side by side.
        dropout: some of its results are dropped in training.
    """

    how: str
    output: bool
    input: bool
    experts: int = 1
    dropout: bool = False


def places(root: Part) -> dict[str, Place]:
    """The place of every part of a tree by its path; a point (``attn:q_heads``) stands where its part does."""
    found: dict[str, Place] = {}

    def visit(part: Part, path: str, how: str, inner: bool) -> None:
        core = isinstance(part, Attention | CrossAttention | LatentAttention | MLP | GatedMLP)
        normed = inner and isinstance(part, RMSNorm | LayerNorm | HeadNorm) and how == COLUMN
        scores = isinstance(part, Head)
        experts = part.n_experts if isinstance(part, GroupedLinear) else 1
        drops = bool(getattr(part, "dropout", 0.0))
        inside = core or normed or how == ROW
        found[path] = Place(COLUMN if scores else how, core or scores or how == COLUMN, inside, experts, drops)
        split = divided(part)
        for name, child in part.parts():
            visit(child, join(path, name), split.get(name, (COPIED, 1))[0], core)

    visit(root, "", COPIED, False)
    return found


def work(rows: Iterable[Step], where: dict[str, Place], ways: Ways, speed: Speed) -> Work:
    """The work of a rank in `rows` of a training pass over one micro-batch, `where` telling their places."""
    total = Work()
    for step in rows:
        if step.dtype == "int64":
            continue
        place = where[step.path.partition(":")[0]]
        own = _product(step, place, ways, speed) if step.flops else _other(step, place, ways, speed)
        if step.path.endswith(CORE):
            own = replace(own, core=own.products + own.others)
        total += own.times(step.repeat)
    return total


def kept(rows: Iterable[Step], where: dict[str, Place], ways: Ways) -> float:
    """Bytes that a rank keeps for the backward of `rows` of a training pass, whose `saved_bytes` are known.

    What a row keeps lies where it is read: inside a sublayer, or in the stream (arXiv:2205.05198, section 4.2).
    """
    total = 0.0
    for step in rows:
        place = where[step.path.partition(":")[0]]
        total += step.repeat * step.saved_bytes / (ways.inside if place.input else ways.stream)
    return total


def _other(step: Step, place: Place, ways: Ways, speed: Speed) -> Work:
    """Norms, activations, residuals: bound by memory."""
    if not step.stored:
        return Work()
    out = step.numel / (ways.inside if place.output else ways.stream)
    passes = PASSES * (2 if place.dropout and step.path.partition(":")[2].startswith(DROPPED) else 1)
    seconds = passes * out * DTYPE_BYTES[step.dtype or ACTIVATIONS] / speed.memory
    return Work(others=seconds, backward_others=BACKWARD_PASSES / PASSES * seconds)


def _product(step: Step, place: Place, ways: Ways, speed: Speed) -> Work:
    """Matrix products: arithmetic and the bytes of both factors and of the result; the backward has two for one."""
    n: float = step.shape[-1]
    k = step.flops / (2 * step.numel)
    m = step.numel / n / ways.context
    size = DTYPE_BYTES[ACTIVATIONS]
    if step.path.endswith(CORE):
        fused = "fused" in step.op
        flops = (step.flops_visible if fused else step.flops) / ways.inside
        if fused:
            seconds = flops / speed.attention
            return Work(flops, seconds, 0.0, ATTENTION_BACKWARD * seconds)
        moved = size * (m * k + m * n) / ways.tensor
    else:
        flops = step.flops / (ways.stream if place.how == COPIED else ways.inside)
        weight = k * n * (place.experts / ways.expert if place.experts > 1 else 1)
        if place.how == COPIED:
            m /= ways.tensor if ways.sequence else 1
        elif place.how == COLUMN:
            n, weight = n / ways.tensor, weight / ways.tensor
        else:
            k, weight = k / ways.tensor, weight / ways.tensor
        moved = size * (m * k + weight + m * n)
    seconds = flops / speed.product + moved / speed.memory
    return Work(flops, seconds, 0.0, 2 * seconds)
