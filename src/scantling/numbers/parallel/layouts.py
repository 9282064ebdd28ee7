"""Layouts: how many ways a model, its rows and its positions are divided, and which divisions are legal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from scantling.errors import ScantlingInputError
from scantling.parts.attention import Attention
from scantling.parts.cross import CrossAttention
from scantling.parts.latent import LatentAttention
from scantling.parts.mlp import MLP, GatedMLP
from scantling.parts.moe import MoE
from scantling.parts.saved import POLICIES
from scantling.parts.transformer import Transformer


@dataclass(frozen=True)
class Mesh:
    """How the devices are divided.

    Attributes:
        data: replicas, each with rows of its own.
        tensor: ranks that share every matrix of a block (arXiv:1909.08053).
        pipeline: stages of consecutive blocks (arXiv:2104.04473).
        context: ranks that share the positions of a row.
        expert: ranks, within data x context, that share the experts of a mixture.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1

    @property
    def devices(self) -> int:
        """How many there are."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def replicas(self) -> int:
        """Ranks with the same shard of a dense weight."""
        return self.data * self.context

    def __str__(self) -> str:
        ways = {"data": self.data, "tensor": self.tensor, "pipeline": self.pipeline}
        more = {"context": self.context, "expert": self.expert}
        return " x ".join(f"{name} {n}" for name, n in (ways | {k: n for k, n in more.items() if n > 1}).items())


@dataclass(frozen=True)
class Layout:
    """A mesh and the choices that it leaves.

    Attributes:
        zero: what the replicas share among them (arXiv:1910.02054): 0 nothing, 1 optimizer state, 2 gradients too,
            3 weights too (FSDP).
        shards: replicas that share; all of them where it is None, fewer for shards within a node (hybrid FSDP).
        micro_batch: rows of one pass.
        virtual: chunks of blocks that a pipeline rank has, interleaved.
        sequence: norms and residuals are divided among tensor ranks by positions (arXiv:2205.05198, section 4.2.2), or
            by channels where positions do not divide.
        recompute: none, selective or block.
    """

    mesh: Mesh
    zero: int = 1
    shards: int | None = None
    micro_batch: int = 1
    virtual: int = 1
    sequence: bool = True
    recompute: str = "none"

    def __post_init__(self) -> None:
        for name, n in [*vars(self.mesh).items(), ("micro_batch", self.micro_batch), ("virtual", self.virtual)]:
            if n < 1:
                raise ScantlingInputError(f"{name} is {n}; a whole number of at least 1 is needed")
        if self.shards is not None and (self.shards < 1 or self.mesh.replicas % self.shards):
            raise ScantlingInputError(f"shards is {self.shards}, which does not divide {self.mesh.replicas} replicas")
        if self.zero not in (0, 1, 2, 3):
            raise ScantlingInputError(f"zero is {self.zero}; use 0, 1, 2 or 3")
        if self.recompute not in POLICIES:
            raise ScantlingInputError(f"recompute is {self.recompute!r}; use one of {', '.join(POLICIES)}")

    @property
    def sharing(self) -> tuple[int, int]:
        """Replicas that share dense weights, and those that share experts."""
        dense = self.mesh.replicas if self.shards is None else self.shards
        return dense, max(1, dense // self.mesh.expert)

    def rounds(self, micro_batches: int) -> int:
        """How often in a step gradients are scattered, or weights gathered, where replicas share them.

        Chunks that take turns do as many micro-batches as there are ranks before the next (arXiv:2211.05953); without
        them it is every micro-batch.
        """
        return micro_batches if self.virtual == 1 else -(-micro_batches // self.mesh.pipeline)


def divisors(n: int) -> list[int]:
    """All of them, ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def meshes(devices: int, most_tensor: int) -> Iterator[Mesh]:
    """Every way to divide `devices` but by experts, tensor ranks at most `most_tensor`."""
    for tensor in divisors(devices):
        if tensor > most_tensor:
            break
        for pipeline in divisors(devices // tensor):
            for context in divisors(devices // tensor // pipeline):
                yield Mesh(devices // tensor // pipeline // context, tensor, pipeline, context)


@dataclass(frozen=True)
class Limits:
    """What of a model can be divided.

    Attributes:
        heads: of each attention.
        kv_heads: of each attention that has its own.
        widths: hidden channels of each MLP.
        experts: of each mixture.
        d_model: width of the stream.
        layers: blocks of one stack; 0 where there are two stacks, which are not pipelined here.
    """

    heads: frozenset[int]
    kv_heads: frozenset[int]
    widths: frozenset[int]
    experts: frozenset[int]
    d_model: int
    layers: int


def limits(model: Transformer) -> Limits:
    """The limits of a model."""
    pieces = [part for _, part, _ in model.walk()]
    attentions = [p for p in pieces if isinstance(p, Attention | CrossAttention | LatentAttention)]
    grouped = [p.n_kv_heads for p in attentions if not isinstance(p, LatentAttention)]
    return Limits(
        frozenset(p.n_heads for p in attentions),
        frozenset(grouped),
        frozenset(p.d_ff for p in pieces if isinstance(p, MLP | GatedMLP)),
        frozenset(p.router.n_experts for p in pieces if isinstance(p, MoE)),
        model.d_model,
        0 if model.two_stacks else len(next(iter(model.stacks.values())).blocks),
    )


def refusal(mesh: Mesh, has: Limits, tokens: int) -> tuple[str, str] | None:
    """Why a model with rows of `tokens` cannot be divided like that: a word and a clause; None where it can."""
    t = mesh.tensor
    for heads in sorted(has.heads):
        if heads % t:
            return "heads", f"{heads} heads do not divide among {t} tensor ranks"
    for heads in sorted(has.kv_heads):
        if heads % t and t % heads:
            return "heads", f"{heads} KV heads and {t} tensor ranks divide in neither direction"
    for width in sorted(has.widths):
        if width % t:
            return "width", f"d_ff {width} does not divide among {t} tensor ranks"
    if mesh.pipeline > 1 and has.layers == 0:
        return "layers", "two stacks are not pipelined"
    if mesh.pipeline > max(1, has.layers):
        return "layers", f"{has.layers} blocks are fewer than {mesh.pipeline} pipeline stages"
    if mesh.context > 1 and tokens % (2 * mesh.context):
        return "context", f"{tokens:,} positions do not divide into two chunks for each of {mesh.context} context ranks"
    if tokens % t and has.d_model % t:
        return "width", f"neither {tokens:,} positions nor d_model {has.d_model} divide among {t} tensor ranks"
    if mesh.expert > 1:
        for experts in sorted(has.experts or {1}):
            if experts % mesh.expert:
                return "experts", f"{experts} experts do not divide among {mesh.expert} ranks"
        if mesh.replicas % mesh.expert:
            return "experts", f"{mesh.replicas} replicas do not divide into groups of {mesh.expert} expert ranks"
    return None


def expert_sizes(mesh: Mesh, has: Limits) -> list[int]:
    """Numbers of expert ranks that a mesh allows; 1 without a mixture."""
    if not has.experts:
        return [1]
    return [n for n in divisors(min(has.experts)) if mesh.replicas % n == 0 and all(e % n == 0 for e in has.experts)]


def virtual_sizes(layers: int, pipeline: int, micro_batches: int, most: int = 16) -> list[int]:
    """Chunks per pipeline rank: those that make chunks equal, the embedding and the head counted as a layer or not.

    One chunk may be uneven; more need at least as many micro-batches as ranks.
    """
    if pipeline == 1 or micro_batches < pipeline:
        return [1]
    return [
        v
        for v in range(1, most + 1)
        if v == 1 or (pipeline * v <= layers + 2 and 0 in (layers % (pipeline * v), (layers + 2) % (pipeline * v)))
    ]


def stages(layers: int, pipeline: int, virtual: int = 1) -> list[list[list[int]]]:
    """Numbers of the blocks by rank and chunk, in order; the first and the last chunk are the last to get one more.

    The first also embeds and the last also scores (Llama 3, arXiv:2407.21783, section 3.3.2, takes a layer from each).
    """
    chunks = pipeline * virtual
    base, more = divmod(layers, chunks)
    order = [*range(1, chunks - 1), 0, chunks - 1][:chunks] if chunks > 1 else [0]
    larger = set(order[:more])
    found: list[list[int]] = []
    start = 0
    for i in range(chunks):
        end = start + base + (i in larger)
        found.append(list(range(start, end)))
        start = end
    return [[found[rank + pipeline * i] for i in range(virtual)] for rank in range(pipeline)]
