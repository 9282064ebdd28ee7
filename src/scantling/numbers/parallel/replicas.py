"""What replicas exchange: gradients, and weights where they share them."""

from __future__ import annotations

from dataclasses import dataclass

from scantling.numbers.parallel.communication import Fabric, Traffic
from scantling.numbers.parallel.layouts import Layout
from scantling.numbers.parallel.memory import Precision
from scantling.numbers.parallel.shards import Held


@dataclass(frozen=True)
class Group:
    """Ranks that have the same weights.

    Attributes:
        parameters: that they have.
        shards: ranks that may share them, next to each other.
        copies: groups of such ranks.
        stride: from one rank to the next.
    """

    parameters: int
    shards: int
    copies: int
    stride: int


def groups(layout: Layout, held: Held) -> list[Group]:
    """The replicas of a rank's dense weights, and of its experts."""
    mesh = layout.mesh
    dense, experts = layout.sharing
    found = [
        Group(held.dense, dense, mesh.replicas // dense, mesh.tensor),
        Group(held.experts, experts, mesh.replicas // mesh.expert // experts, mesh.tensor * mesh.expert),
    ]
    return [g for g in found if g.parameters and g.shards * g.copies > 1]


@dataclass(frozen=True)
class Phase:
    """Exchange that happens `times` per step.

    Attributes:
        seconds: of one time, if nothing hides it.
        traffic: of the step.
    """

    seconds: float
    times: int
    traffic: tuple[Traffic, ...]


def _phase(fabric: Fabric, what: str, times: int, collectives: list[tuple[str, int, int, int]]) -> Phase:
    """Collectives one after the other, each (kind, ranks, stride, bytes)."""
    real = [c for c in collectives if c[1] > 1 and c[3]]
    seconds = sum(fabric.seconds(*c) for c in real)
    traffic = tuple(Traffic(what, c[0], c[1], fabric.inside(c[1], c[2]), c[3], times) for c in real)
    return Phase(seconds, times, traffic)


def _scatter(which: list[Group], fabric: Fabric, size: int, times: int) -> Phase:
    """Sums of gradients: each shard to its owner, and over the owners of the same shard."""
    collectives = []
    for g in which:
        collectives.append(("reduce-scatter", g.shards, g.stride, g.parameters * size))
        collectives.append(("all-reduce", g.copies, g.stride * g.shards, -(-g.parameters // g.shards) * size))
    return _phase(fabric, "gradients", times, collectives)


def _gather(which: list[Group], fabric: Fabric, size: int, times: int) -> Phase:
    return _phase(fabric, "weights", times, [("all-gather", g.shards, g.stride, g.parameters * size) for g in which])


def _sum(which: list[Group], fabric: Fabric, size: int) -> Phase:
    ranks = [("all-reduce", g.shards * g.copies, g.stride, g.parameters * size) for g in which]
    return _phase(fabric, "gradients", 1, ranks)


@dataclass(frozen=True)
class Room:
    """Arithmetic that exchange may hide behind.

    Attributes:
        forward, backward: seconds of one micro-batch; 0 where nothing overlaps.
        pieces: that gradients and weights come in, chunks or blocks; what belongs to the one at the edge cannot hide.
    """

    forward: float
    backward: float
    pieces: int

    def exposed(self, phase: Phase, per_pass: float, passes: float) -> float:
        """Seconds per step that are waited for, with `passes` micro-batches of `per_pass` seconds beside each time."""
        if per_pass == 0.0:
            return phase.times * phase.seconds
        edge = 1 / max(1, self.pieces)
        return phase.times * max(phase.seconds * edge, phase.seconds - passes * per_pass * (1 - edge))


def waited(
    layout: Layout, held: Held, fabric: Fabric, size: Precision, room: Room, micro_batches: int
) -> tuple[float, tuple[Traffic, ...]]:
    """Seconds of a step that wait for replicas, and what they exchange.

    Stages 0 and 1 of ZeRO sum gradients once, behind the last backward: of one micro-batch, or of a round where chunks
    take turns. 1 and 2 gather new weights once, behind the first forward. Stage 2 scatters gradients in every round;
    stage 3 also gathers the weights for its forward and again for its backward: 3 times the parameters where 0 sends 2
    (arXiv:1910.02054, section 7).
    """
    which = groups(layout, held)
    rounds = layout.rounds(micro_batches)
    passes = micro_batches / rounds
    if layout.zero == 0:
        sums = _sum(which, fabric, size.gradients)
    else:
        sums = _scatter(which, fabric, size.gradients, rounds if layout.zero >= 2 else 1)
    if layout.zero < 3:
        new = _gather(which if layout.zero else [], fabric, size.weights, 1)
        seconds = room.exposed(sums, room.backward, passes) + room.exposed(new, room.forward, passes)
        return seconds, (*sums.traffic, *new.traffic)
    once = _gather(which, fabric, size.weights, rounds)
    both = Phase(once.seconds + sums.seconds, rounds, ())
    twice = tuple(_more(t, 2) for t in once.traffic)
    seconds = room.exposed(once, room.forward, passes) + room.exposed(both, room.backward, passes)
    return seconds, (*twice, *sums.traffic)


def _more(traffic: Traffic, factor: int) -> Traffic:
    return Traffic(traffic.what, traffic.kind, traffic.ranks, traffic.inside, traffic.size, factor * traffic.times)
