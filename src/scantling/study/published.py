"""Published training runs, and what the simulator on paper says about them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from msgspec.structs import replace as changed

from scantling import strict_yaml
from scantling.assembly import assemble
from scantling.cards import preset
from scantling.cards.read import from_dict
from scantling.cards.schema import Card, Learned
from scantling.numbers.flops import flops
from scantling.numbers.hardware import device
from scantling.numbers.parallel.communication import fabric
from scantling.numbers.parallel.job import Estimate, Job
from scantling.numbers.parallel.layouts import Layout, Mesh
from scantling.numbers.parallel.memory import precision
from scantling.numbers.parallel.step import Simulator
from scantling.numbers.parallel.work import speed
from scantling.parts.part import Workload
from scantling.study.plan import Choices

_TABLE = Path(__file__).with_name("published_runs.yaml")
DTYPE = "bf16"
"""All runs multiplied in 16 bits, and no device of them has another peak for its other 16-bit format."""


@dataclass(frozen=True)
class Run:
    """A run as it was published.

    Attributes:
        group, source, note, misses: of the runs of one source.
        model: its name in the table, and its card.
        device: by name.
        seconds: of a step, given or from what was given.
        printed: the figure as it was printed, with its unit.
        mfu: as printed, a share; None where none was.
        parameters: as published; None where they were not, a float in billions where they were rounded.
        choices: what the software could choose, by the names of `Choices`.
    """

    group: str
    source: str
    note: str
    misses: str
    model: str
    card: Card
    device: str
    job: Job
    layout: Layout
    seconds: float
    printed: str
    mfu: float | None
    parameters: int | float | None
    choices: Mapping[str, Any]

    @property
    def allowed(self) -> Choices:
        """What the software could choose."""
        chosen: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in self.choices.items()}
        return Choices(**chosen)


@dataclass(frozen=True)
class Beside:
    """A run, and the same layout on paper.

    Attributes:
        published, predicted: MFU, a share, by the same count of FLOPs.
    """

    run: Run
    estimate: Estimate
    published: float
    predicted: float

    @property
    def error(self) -> float:
        """Predicted less published, in points of MFU."""
        return 100 * (self.predicted - self.published)

    @property
    def fits(self) -> bool:
        """Whether the layout fits on paper, as it did."""
        return self.estimate.memory.total <= self.run.job.memory


@cache
def beside() -> tuple[Beside, ...]:
    """All runs with their predictions."""
    found = []
    for run in runs():
        simulator = Simulator(run.job)
        estimate, counted = simulator.estimate(run.layout), simulator.model_flops("full")
        rate = run.job.devices * run.job.speed.peak
        shares = (counted / (seconds * rate) for seconds in (run.seconds, estimate.times.total))
        found.append(Beside(run, estimate, *shares))
    return tuple(found)


@dataclass(frozen=True)
class Errors:
    """Of several runs, in points of MFU: the mean, the root of the mean square, the largest."""

    runs: int
    mean: float
    rms: float
    largest: float


def errors(rows: Sequence[Beside]) -> Errors:
    """How far the predictions of at least one run are off."""
    off = [row.error for row in rows]
    n = len(off)
    return Errors(n, sum(off) / n, math.sqrt(sum(e * e for e in off) / n), max(off, key=abs))


@cache
def runs() -> tuple[Run, ...]:
    """The table that comes with the package."""
    table = strict_yaml.parse(_TABLE.read_text("utf-8"), "published_runs.yaml", "a table of published runs")
    return tuple(run for group in table["groups"] for run in _runs(group, table))


def _runs(group: Mapping[str, Any], table: Mapping[str, Any]) -> Iterator[Run]:
    common = group["common"]
    about = {key: " ".join(group.get(key, "").split()) for key in ("source", "note", "misses")}
    for row in group["runs"]:
        own = dict(common) | dict(row) | {"layout": dict(common["layout"]) | dict(row["layout"])}
        sizes = table["models"][own["model"]]
        card = _card(own["model"], sizes, table["cards"], own["tokens"])
        layout, where = _layout(own["layout"]), device(own["device"])
        n = layout.mesh.devices
        job = Job(
            model=assemble(card),
            devices=n,
            tokens=own["tokens"],
            sequences=own["sequences"],
            speed=speed(where, DTYPE),
            fabric=fabric(where, n),
            memory=where.memory_bytes or 0,
            precision=precision(own["precision"]),
            kernel=own.get("kernel", "fused"),
            overlap=frozenset(own["overlap"]),
        )
        seconds, printed = _seconds(own, job)
        yield Run(
            group=group["name"],
            **about,
            model=own["model"],
            card=card,
            device=own["device"],
            job=job,
            layout=layout,
            seconds=seconds,
            printed=printed,
            mfu=own.get("mfu"),
            parameters=own.get("parameters") or sizes.get("billions"),
            choices=own.get("choices", {}),
        )


def _card(name: str, sizes: Mapping[str, Any], families: Mapping[str, Any], tokens: int) -> Card:
    """A preset, or a family's card with a model's sizes; a table of positions has as many rows as the run's tokens."""
    if "preset" in sizes:
        return preset(sizes["preset"])
    family = families[sizes["card"]]
    attention = dict(family["attention"]) | {"n_heads": sizes["n_heads"]}
    own = {key: sizes[key] for key in ("n_layers", "d_model")} | {"attention": attention, "context": tokens}
    card = from_dict(dict(family) | own | {"name": name}, "published_runs.yaml")
    return changed(card, context=tokens) if isinstance(card.position, Learned) else card


def _layout(row: Mapping[str, Any]) -> Layout:
    ways = {name: row.get(name, 1) for name in ("data", "tensor", "pipeline", "context", "expert")}
    return Layout(Mesh(**ways), **{key: value for key, value in row.items() if key not in ways})


def _seconds(row: Mapping[str, Any], job: Job) -> tuple[float, str]:
    """Seconds of a step, and the figure as it was printed."""
    if "seconds" in row:
        return float(row["seconds"]), f"{row['seconds']} s"
    if "tokens_per_second" in row:
        return job.step_tokens / (job.devices * row["tokens_per_second"]), f"{row['tokens_per_second']:,} tokens/s"
    w = Workload(1, job.tokens)
    counted = flops(job.model, w)
    each = counted.training
    if row["counts"] == "hardware":
        each += counted.forward - counted.by_part.get("head", 0)
    return job.sequences * each / (job.devices * row["tflops"] * 1e12), f"{row['tflops']} TFLOP/s"
