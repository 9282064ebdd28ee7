"""What `scantling plan` prints."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from scantling.cards import Card
from scantling.cli import show
from scantling.numbers.hardware import Device
from scantling.numbers.parallel.assumptions import TEXT
from scantling.numbers.parallel.communication import Traffic
from scantling.numbers.parallel.job import Estimate
from scantling.numbers.parallel.memory import precision
from scantling.numbers.parallel.step import Simulator
from scantling.study.plan import Lost, Plan, described
from scantling.units import bytes_text, count_text

MOST_LOST = 12
"""Other layouts that are printed."""


@dataclass(frozen=True)
class Answer:
    """What is shown.

    Attributes:
        row: of the table of devices.
        asked: tokens per step, None where the default was taken.
        precision: by name.
        top: layouts to print.
    """

    card: Card
    row: Device
    asked: int | None
    precision: str
    found: Plan
    top: int

    @property
    def shown(self) -> tuple[Estimate, ...]:
        """The best layouts."""
        return self.found.ranked[: self.top]


def print_all(a: Answer) -> None:
    """The ranked table, the best layout's memory, time and traffic, why others lose, and what is taken for granted."""
    _print_head(a)
    _print_ranked(a)
    _print_best(a)
    _print_lost(a)
    show.say("assumed")
    for line in TEXT:
        show.say(f"  {line}")


def _print_head(a: Answer) -> None:
    job = a.found.job
    show.say(
        f"{a.card.name}, {count_text(job.model.params)} parameters, on {job.devices:,} x {a.row.name} "
        f"({job.fabric.per_node:,} to a node)"
    )
    near = "" if a.asked in (None, job.step_tokens) else f", for the {a.asked:,} asked for"
    show.say(
        f"{job.sequences:,} rows of {job.tokens:,} positions a step: {job.step_tokens:,} tokens{near}; "
        f"{precision(a.precision).about}"
    )
    show.say(f"layouts simulated: {a.found.estimated:,}; divisions of the devices that fit: {len(a.found.ranked):,}")
    show.say()


def _print_ranked(a: Answer) -> None:
    columns = ("", "layout", "micro-batches", "memory", "bubble", "exchange", "seconds", "tokens/s each")
    rows = []
    for i, e in enumerate(a.shown, 1):
        total = e.times.total
        rows.append(
            (
                i,
                described(e.layout),
                e.micro_batches,
                f"{e.memory.total / 1e9:.1f} GB",
                _percent(e.times.bubble / total),
                _percent(e.times.exchange / total),
                round(total, 3),
                round(a.found.tokens_per_second(e)),
                _percent(a.found.mfu(e)),
                _percent(a.found.mfu(e, "causal")),
            )
        )
    show.table((*columns, "MFU", "causal"), rows)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _print_best(a: Answer) -> None:
    best, job = a.found.ranked[0], a.found.job
    memory, total = best.memory, best.times.total
    sizes = vars(memory) | {"all": memory.total, "device": job.memory}
    lines = [(name, n, bytes_text(n)) for name, n in sizes.items()]
    show.table(("memory of the fullest rank", "bytes", ""), lines, title="the first layout")
    times = [(name, f"{1000 * t:,.1f} ms", _percent(t / total)) for name, t in vars(best.times).items() if t]
    show.table(("time of a step", "", ""), [*times, ("all", f"{1000 * total:,.1f} ms", "")])
    if rows := [_traffic_row(t) for t in Simulator(job).traffic(best.layout)]:
        show.table(("sent by a rank per step", "collective", "ranks", "over", "times", "of bytes", "bytes", ""), rows)


def _traffic_row(t: Traffic) -> tuple[object, ...]:
    over = "links of a node" if t.inside else "network"
    return t.what, t.kind, t.ranks, over, t.times, t.size, round(t.sent), bytes_text(round(t.sent))


def _print_lost(a: Answer) -> None:
    chosen = _examples(a.found)
    if not chosen:
        return
    rows = [
        (str(lost.mesh) if lost.estimate is None else described(lost.estimate.layout), lost.clause) for lost in chosen
    ]
    show.table(("others", "why they lose"), rows)
    counted = Counter(lost.why for lost in a.found.lost)
    show.say("all others by reason: " + ", ".join(f"{why} {n:,}" for why, n in counted.most_common()))
    show.say()


def _examples(found: Plan) -> list[Lost]:
    """The nearest of every reason."""
    first: dict[str, Lost] = {}
    for lost in found.lost:
        first.setdefault(lost.why, lost)
    more = [lost for lost in found.lost if lost.estimate is not None and first[lost.why] is not lost]
    return [*first.values(), *more][:MOST_LOST]


def data(a: Answer) -> dict[str, object]:
    """The same for JSON."""
    job, found = a.found.job, a.found
    simulator = Simulator(job)
    return {
        "name": a.card.name,
        "params": job.model.params,
        "device": a.row.name,
        "device_source": a.row.source,
        "devices": job.devices,
        "devices_per_node": job.fabric.per_node,
        "link_bytes_per_second": job.fabric.link,
        "network_bytes_per_second": job.fabric.network,
        "dense_peak_tflops": job.speed.peak / 1e12,
        "product_tflops": job.speed.product / 1e12,
        "memory_bytes": job.memory,
        "context": job.tokens,
        "rows_per_step": job.sequences,
        "tokens_per_step": job.step_tokens,
        "tokens_per_step_asked": a.asked,
        "precision": a.precision,
        "kernel": job.kernel,
        "overlap": sorted(job.overlap),
        "model_flops_per_step": found.flops,
        "layouts_simulated": found.estimated,
        "layouts": [_estimate(found, e, simulator) for e in a.shown],
        "others": [
            {
                "mesh": vars(lost.mesh),
                "why": lost.why,
                "clause": lost.clause,
                "layout": None if lost.estimate is None else _estimate(found, lost.estimate, simulator),
            }
            for lost in _examples(found)
        ],
        "others_by_reason": dict(Counter(lost.why for lost in found.lost)),
        "assumptions": list(TEXT),
    }


def _estimate(found: Plan, e: Estimate, simulator: Simulator) -> dict[str, object]:
    layout = e.layout
    return {
        **vars(layout.mesh),
        "zero": layout.zero,
        "shards": layout.shards,
        "micro_batch": layout.micro_batch,
        "micro_batches": e.micro_batches,
        "virtual": layout.virtual,
        "sequence": layout.sequence,
        "recompute": layout.recompute,
        "memory_bytes": vars(e.memory) | {"total": e.memory.total},
        "fits": e.memory.total <= found.job.memory,
        "seconds": vars(e.times) | {"total": e.times.total},
        "traffic": [_traffic(t) for t in simulator.traffic(e.layout)],
        "tokens_per_second": found.tokens_per_second(e) * found.job.devices,
        "tokens_per_second_per_device": found.tokens_per_second(e),
        "mfu": {name: found.mfu(e, name) for name in found.flops},
    }


def _traffic(t: Traffic) -> dict[str, object]:
    return vars(t) | {"sent_bytes": t.sent}
