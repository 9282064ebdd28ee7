"""Tables and sentences of `scantling memory`."""

from __future__ import annotations

from scantling.cli import show
from scantling.numbers.fit import Fit
from scantling.numbers.training import Recipe, TrainingMemory, asked, state_lines
from scantling.parts.part import Workload
from scantling.units import bytes_text


def lines(rows: list[tuple[str, int]]) -> None:
    """A table of bytes."""
    show.table(("what", "bytes", ""), [(what, size, bytes_text(size)) for what, size in rows])


def training_lines(m: TrainingMemory, w: Workload, recipe: Recipe) -> list[tuple[str, int]]:
    """What is held at once, and beside it what may be."""
    formats = asked(w, recipe)
    kept = f"activations that autograd keeps, {formats.autocast or formats.dtype}, recompute {w.recompute}"
    inner = [
        ("  of them, the loss's log-probabilities, float32", m.loss),
        (f"  of them, copies of weights that autocast makes, {formats.autocast}", m.copies),
    ]
    beside = [
        ("logits of every position, float32, if all are held", m.logits),
        ("gradients that the chunked loss makes in the forward", m.loss_gradients),
        (f"scores of one layer, {formats.autocast or formats.dtype}, if a kernel stores them", m.scores),
    ]
    return [
        *state_lines(m, recipe).items(),
        (kept, m.activations),
        *((what, size) for what, size in inner if size),
        ("total: all of these at once", m.total),
        *((what, size) for what, size in beside if size),
    ]


def moments_table(moments: dict[str, int], highest: str) -> list[tuple[str, int, str]]:
    """Rows of what is held at each moment of a step."""
    return [
        (f"{moment}{', the peak' if moment == highest else ''}", size, bytes_text(size))
        for moment, size in moments.items()
    ]


def say_fit(found: Fit, w: Workload, states: str) -> None:
    """What fits, or why nothing does."""
    room = bytes_text(found.given)
    if found.least > found.given:
        show.say(f"nothing fits into {room}: one row of one token needs {bytes_text(found.least)}, of which {states}")
        return
    end = "" if found.bound is None else f", the model's {found.bound:,} positions being the limit"
    batch = f"at most B {found.batch:,}" if found.batch else "not even one row"
    tokens = f"at most T {found.tokens:,}{end}" if found.tokens else "not even one token"
    show.say(f"{room} hold, at T {w.tokens:,}, {batch}; at B {w.batch:,}, {tokens}")
