"""Which layout trains a model fastest on so many devices, and why the others lose."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from scantling.errors import ScantlingInputError
from scantling.numbers.parallel.job import Estimate, Job
from scantling.numbers.parallel.layouts import (
    Layout,
    Limits,
    Mesh,
    divisors,
    expert_sizes,
    limits,
    meshes,
    refusal,
    virtual_sizes,
)
from scantling.numbers.parallel.step import Simulator
from scantling.parts.saved import POLICIES
from scantling.units import bytes_text

MOST_ROWS = 16
"""Rows of a micro-batch; larger ones bring products no more speed."""
LEAST_POSITIONS = 1024
"""Positions of a context rank; fewer are not tried, unless they are asked for."""
MOST_TENSOR = 64
"""Tensor ranks, where more devices share the fast links."""
Numbers = tuple[int, ...] | None


@dataclass(frozen=True)
class Choices:
    """What may be chosen; None leaves every legal number.

    Attributes:
        sequence: whether tensor ranks divide the stream by positions.
    """

    data: Numbers = None
    tensor: Numbers = None
    pipeline: Numbers = None
    context: Numbers = None
    expert: Numbers = None
    zero: tuple[int, ...] = (1, 2, 3)
    micro_batch: Numbers = None
    virtual: Numbers = None
    recompute: tuple[str, ...] = POLICIES
    sequence: bool = True

    def allows(self, mesh: Mesh) -> bool:
        """Whether the mesh is among them."""
        return all(
            chosen is None or n in chosen
            for n, chosen in (
                (mesh.data, self.data),
                (mesh.tensor, self.tensor),
                (mesh.pipeline, self.pipeline),
                (mesh.context, self.context),
            )
        )


@dataclass(frozen=True)
class Lost:
    """A mesh that is not the best.

    Attributes:
        estimate: its fastest layout that fits, or the smallest where none does; None where it is not legal.
        why: a word: fit, bubble, tensor, context, experts, pipeline, data, recompute, compute, batch, heads, ...
        clause: what it costs, in words.
    """

    mesh: Mesh
    estimate: Estimate | None
    why: str
    clause: str


@dataclass(frozen=True)
class Plan:
    """The answer.

    Attributes:
        ranked: the fastest layout of every mesh that fits, fastest first.
        lost: every other mesh, those that are legal first.
        estimated: layouts that were simulated.
    """

    job: Job
    flops: dict[str, int]
    ranked: tuple[Estimate, ...]
    lost: tuple[Lost, ...]
    estimated: int

    def mfu(self, estimate: Estimate, convention: str = "full") -> float:
        """Share of the dense peak that the model's own FLOPs are."""
        return self.flops[convention] / (estimate.times.total * self.job.devices * self.job.speed.peak)

    def tokens_per_second(self, estimate: Estimate) -> float:
        """Of one device."""
        return self.job.step_tokens / (estimate.times.total * self.job.devices)

    def rank(self, mesh: Mesh) -> int | None:
        """Place of a mesh among those that fit, from 1."""
        return next((i for i, e in enumerate(self.ranked, 1) if e.layout.mesh == mesh), None)

    def missing(self) -> str:
        """Why nothing fits: the closest layout, and what it lacks."""
        fits = [lost for lost in self.lost if lost.estimate is not None]
        if not fits:
            first = {lost.why: lost for lost in reversed(self.lost)}.values()
            reasons = "; ".join(f"{lost.mesh}: {lost.clause}" for lost in first) or "none that was allowed divides them"
            return f"no legal layout of {self.job.devices:,} devices: {reasons}"
        closest = min(fits, key=lambda lost: lost.estimate.memory.total if lost.estimate else 0)
        assert closest.estimate is not None
        needs, has = closest.estimate.memory.total, self.job.memory
        return (
            f"no layout of {self.job.devices:,} devices fits: the closest, {described(closest.estimate.layout)}, needs "
            f"{bytes_text(needs)} a device and there are {bytes_text(has)}, so {bytes_text(needs - has)} are missing; "
            "more devices, a shorter --context or a smaller --precision would help"
        )


def described(layout: Layout) -> str:
    """A layout in words: ``data 64 (ZeRO-2) x tensor 8 x pipeline 16 (8 chunks), micro-batch 1``."""
    mesh = layout.mesh
    shards = "" if layout.shards is None else f" over {layout.shards}"
    words = [f"data {mesh.data}" + (f" (ZeRO-{layout.zero}{shards})" if layout.zero else "")]
    words += [f"tensor {mesh.tensor}"] if mesh.tensor > 1 else []
    if mesh.pipeline > 1:
        words.append(f"pipeline {mesh.pipeline}" + (f" ({layout.virtual} chunks)" if layout.virtual > 1 else ""))
    words += [f"{name} {n}" for name, n in (("context", mesh.context), ("expert", mesh.expert)) if n > 1]
    again = "" if layout.recompute == "none" else f", recompute {layout.recompute}"
    return " x ".join(words) + f", micro-batch {layout.micro_batch}{again}"


def plan(job: Job, choices: Choices) -> Plan:
    """Simulate the legal layouts and rank the meshes by their fastest that fits."""
    simulator, has = Simulator(job), limits(job.model)
    best: list[Estimate] = []
    lost: list[Lost] = []
    count = 0
    for mesh in _meshes(job, choices, has):
        if (refused := _refused(job, mesh, has)) is not None:
            lost.append(Lost(mesh, None, *refused))
            continue
        estimates = [e for same in _variants(job, mesh, choices, has) for e in _tried(simulator, same, job.memory)]
        count += len(estimates)
        fitting = [e for e in estimates if e.memory.total <= job.memory]
        if fitting:
            best.append(min(fitting, key=_order))
        elif estimates:
            small = min(estimates, key=lambda e: e.memory.total)
            over = bytes_text(small.memory.total - job.memory)
            lost.append(Lost(mesh, small, "fit", f"does not fit by {over}"))
        else:
            rows = f"{job.sequences // mesh.data:,} rows of a replica"
            lost.append(Lost(mesh, None, "batch", f"no allowed micro-batch and number of chunks divide the {rows}"))
    best.sort(key=_order)
    legal = [_slower(e, best[0]) for e in best[1:]]
    counted = {name: simulator.model_flops(name) for name in ("full", "causal")}
    rest = sorted(lost, key=lambda each: (each.estimate is None, each.estimate.memory.total if each.estimate else 0))
    return Plan(job, counted, tuple(best), (*legal, *rest), count)


def _tried(simulator: Simulator, same: list[Layout], memory: int) -> Iterator[Estimate]:
    """Estimates of layouts that differ in what is computed again, nothing first, until one fits: it is the fastest."""
    for layout in same:
        estimate = simulator.estimate(layout)
        yield estimate
        if estimate.memory.total <= memory:
            return


def _order(estimate: Estimate) -> tuple[float, ...]:
    """Faster first; among equals what shares less, then what needs less."""
    return (estimate.times.total, estimate.layout.zero, estimate.memory.total)


def _meshes(job: Job, choices: Choices, has: Limits) -> Iterator[Mesh]:
    most = min(job.fabric.per_node, MOST_TENSOR) if choices.tensor is None else max(choices.tensor)
    for mesh in meshes(job.devices, most):
        short = choices.context is None and mesh.context > max(1, job.tokens // LEAST_POSITIONS)
        if short or not choices.allows(mesh):
            continue
        for expert in expert_sizes(mesh, has):
            if choices.expert is None or expert in choices.expert:
                yield replace(mesh, expert=expert)


def _refused(job: Job, mesh: Mesh, has: Limits) -> tuple[str, str] | None:
    if job.sequences % mesh.data:
        return "batch", f"{job.sequences:,} rows a step do not divide among {mesh.data:,} replicas"
    node = job.fabric.per_node
    if job.devices > node and node % mesh.tensor and mesh.tensor % node:
        return "node", f"groups of {mesh.tensor} tensor ranks do not divide nodes of {node}"
    return refusal(mesh, has, job.tokens)


def _variants(job: Job, mesh: Mesh, choices: Choices, has: Limits) -> Iterator[list[Layout]]:
    """Every choice that a legal mesh leaves; layouts that differ in what is computed again together, nothing first."""
    rows = job.sequences // mesh.data
    zeros = sorted(choices.zero) if mesh.replicas > 1 else [min(choices.zero)]
    policies = [policy for policy in POLICIES if policy in choices.recompute]
    shared = [(zero, shards) for zero in zeros for shards in dict.fromkeys((None, _shards(job, mesh, zero)))]
    for micro_batch in _among(choices.micro_batch, [n for n in divisors(rows) if n <= MOST_ROWS]):
        for virtual in _among(choices.virtual, virtual_sizes(has.layers, mesh.pipeline, rows // micro_batch)):
            for zero, shards in shared:
                yield [Layout(mesh, zero, shards, micro_batch, virtual, choices.sequence, p) for p in policies]


def _among(chosen: Numbers, legal: Iterable[int]) -> list[int]:
    return [n for n in legal if chosen is None or n in chosen]


def _shards(job: Job, mesh: Mesh, zero: int) -> int | None:
    """Replicas within a node, where that is another choice than all of them."""
    inside = job.fabric.per_node // mesh.tensor
    return inside if zero > 0 and 1 < inside < mesh.replicas and mesh.replicas % inside == 0 else None


def _slower(estimate: Estimate, best: Estimate) -> Lost:
    """What a layout spends more time on than the fastest does."""
    own, other = vars(estimate.times), vars(best.times)
    more = {name: own[name] - other[name] for name in own}
    why = max(more, key=lambda name: more[name])
    share = (estimate.times.total / best.times.total - 1) * 100
    uneven = estimate.layout.mesh.pipeline > 1
    words = {
        "compute": "arithmetic of the fullest stage" if uneven else "arithmetic in smaller pieces",
        "recompute": "computing again",
        "tensor": "exchange of tensor ranks",
        "context": "exchange of keys and values",
        "experts": "sending tokens to experts",
        "pipeline": "sends between stages",
        "data": "gradients and weights",
        "bubble": "pipeline bubble",
        "optimizer": "the update",
    }[why]
    part = more[why] / best.times.total * 100
    return Lost(estimate.layout.mesh, estimate, why, f"{share:.1f} % slower: {words} {part:+.1f} %")


def checked(found: Plan) -> Plan:
    """The plan, if anything fits.

    Raises:
        ScantlingInputError: nothing does; the message names the closest and what is missing.
    """
    if not found.ranked:
        raise ScantlingInputError(found.missing())
    return found
