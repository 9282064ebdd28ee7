"""Communication: what a collective sends, over which link, and how long that takes."""

from __future__ import annotations

from dataclasses import dataclass

from scantling.errors import ScantlingInputError
from scantling.numbers.hardware import Device
from scantling.numbers.parallel.assumptions import LINK, LINK_LATENCY, NETWORK, NETWORK_LATENCY

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send")


def sent(kind: str, ranks: int, size: int) -> float:
    """Bytes that a rank of a ring sends (and receives).

    Patarasuk and Yuan, Journal of Parallel and Distributed Computing 69 (2009): 2 (n - 1) / n of the tensor for an
    all-reduce, half of it for each of its two phases.

    Args:
        size: bytes of the whole tensor; of an all-to-all what one rank has to give; of a send the message.
    """
    if ranks == 1:
        return 0.0
    if kind == "send":
        return float(size)
    return (2 if kind == "all-reduce" else 1) * (ranks - 1) / ranks * size


@dataclass(frozen=True)
class Fabric:
    """The links of a machine.

    Attributes:
        per_node: devices that the fast links join.
        link: bytes per second of one device within a node, in one direction.
        network: bytes per second of one device's share between nodes.
    """

    per_node: int
    link: float
    network: float

    def inside(self, ranks: int, stride: int) -> bool:
        """Whether every group of `ranks`, `stride` apart, lies within one node."""
        return self.per_node % (ranks * stride) == 0

    def bandwidth(self, ranks: int, stride: int) -> float:
        """Bytes per second that a rank of a collective reaches: of the slower of its links and the adapters it shares.

        A ring over nodes enters each node once, over the adapters of all of its ranks there.
        """
        if self.inside(ranks, stride):
            return self.link * LINK
        return min(self.link * LINK, max(1, self.per_node // stride) * self.network * NETWORK)

    def seconds(self, kind: str, ranks: int, stride: int, size: int, times: int = 1) -> float:
        """Time of `times` collectives, one after the other."""
        if ranks == 1 or size == 0 or times == 0:
            return 0.0
        latency = LINK_LATENCY if self.inside(ranks, stride) else NETWORK_LATENCY
        if kind == "send":
            # Neighbours in a pipeline stand `stride` apart: one message, one adapter.
            within = self.inside(2, stride)
            rate = self.link * LINK if within else self.network * NETWORK
            return times * ((LINK_LATENCY if within else NETWORK_LATENCY) + size / rate)
        return times * (latency + sent(kind, ranks, size) / self.bandwidth(ranks, stride))


def fabric(device: Device, devices: int, per_node: int | None = None, network: float | None = None) -> Fabric:
    """The links between `devices` of a kind; a missing figure is only an error where it is needed.

    Args:
        per_node: instead of the device's own.
        network: bytes per second, instead of the device's own.

    Raises:
        ScantlingInputError: a figure is needed and not known.
    """
    node = per_node or device.devices_per_node
    if devices > 1 and node is None:
        raise ScantlingInputError(
            f"device {device.name} has no devices_per_node: --per-node or a row of --device-file states it"
        )
    node = node or 1
    if devices > 1 and node > 1 and device.link_gb_per_s is None:
        raise ScantlingInputError(f"device {device.name} has no link_gb_per_s: a row of --device-file can state it")
    between = network or (device.network_gb_per_s or 0.0) * 1e9
    if devices > node and not between:
        raise ScantlingInputError(
            f"device {device.name} has no network_gb_per_s: --network or a row of --device-file states it"
        )
    return Fabric(node, (device.link_gb_per_s or 0.0) * 1e9, between)


@dataclass(frozen=True)
class Traffic:
    """One kind of exchange of a rank in a step.

    Attributes:
        what: tensor, context, experts, pipeline, gradients or weights.
        kind: of the collective.
        ranks: of the group.
        inside: whether the group lies within a node.
        size: bytes of the tensor.
        times: per step.
    """

    what: str
    kind: str
    ranks: int
    inside: bool
    size: int
    times: int

    @property
    def sent(self) -> float:
        """Bytes that the rank sends per step."""
        return self.times * sent(self.kind, self.ranks, self.size)
