"""Measured beside predicted: what a model is made of, where its time and memory go, what happens inside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from scantling.measure.asked import Asked as Asked
from scantling.measure.asked import judged
from scantling.measure.checklist import checklist
from scantling.measure.entropy import entropy
from scantling.measure.figure import Figure as Figure
from scantling.measure.gradients import gradients
from scantling.measure.memory import memory
from scantling.measure.parameters import parameters
from scantling.measure.routing import routed, routing
from scantling.measure.shape import shape, shapely
from scantling.measure.stream import outliers, residual
from scantling.measure.timing import timing
from scantling.model import Model

FIGURES: Mapping[str, Callable[[Model, Asked], Figure]] = {
    "checklist": checklist,
    "parameters": parameters,
    "time": timing,
    "memory": memory,
    "residual": residual,
    "gradients": gradients,
    "entropy": entropy,
    "outliers": outliers,
    "routing": routing,
    "shape": shape,
}


def answerable(lm: Model) -> tuple[str, ...]:
    """The figures that a model has: without layers nothing but parameters, without a vocabulary to score no gradients,
    without routers no routing, and only plain decoders whose depth can be divided have another shape."""
    if not any(stack.blocks for stack in lm.parts.stacks.values()):
        return ("parameters",)
    has = {"gradients": judged(lm), "routing": routed(lm), "shape": shapely(lm.card)}
    missing = {name for name, there in has.items() if not there}
    return tuple(name for name in FIGURES if name not in missing)
