"""`scantling plan --published`: predictions beside published runs."""

from __future__ import annotations

from itertools import groupby

from scantling.cli import show
from scantling.numbers.parallel.assumptions import TEXT
from scantling.study.plan import described
from scantling.study.published import Beside, beside, errors


def run(as_json: bool) -> None:
    """Print every run with its error, each source with what the model misses, and how far off all are."""
    if as_json:
        show.emit({"runs": [_data(row) for row in beside()], "assumptions": list(TEXT)})
        return
    columns = ("model", "devices", "layout", "published", "MFU", "predicted", "MFU", "points", "memory")
    for name, group in groupby(beside(), lambda row: row.run.group):
        rows = list(group)
        show.table(columns, [_row(row) for row in rows], title=name)
        about = rows[0].run
        show.say(f"  source: {about.source}")
        if about.misses:
            show.say(f"  missed: {about.misses}")
        off = errors(rows)
        show.say(f"  {off.runs} runs: mean {off.mean:+.1f}, root mean square {off.rms:.1f}, largest {off.largest:+.1f}")
        show.say()


def _row(row: Beside) -> tuple[object, ...]:
    run, estimate = row.run, row.estimate
    return (
        run.model,
        run.job.devices,
        described(run.layout),
        f"{run.seconds:.2f} s",
        f"{100 * row.published:.1f} %",
        f"{estimate.times.total:.2f} s",
        f"{100 * row.predicted:.1f} %",
        f"{row.error:+.1f}",
        f"{estimate.memory.total / 2**30:.1f} GiB" + ("" if row.fits else ", too much"),
    )


def _data(row: Beside) -> dict[str, object]:
    run, estimate = row.run, row.estimate
    return {
        "group": run.group,
        "source": run.source,
        "note": run.note,
        "misses": run.misses,
        "model": run.model,
        "device": run.device,
        "devices": run.job.devices,
        "tokens": run.job.tokens,
        "rows_per_step": run.job.sequences,
        "layout": vars(run.layout) | {"mesh": vars(run.layout.mesh)},
        "printed": run.printed,
        "published_seconds": run.seconds,
        "published_mfu": row.published,
        "predicted_seconds": vars(estimate.times) | {"total": estimate.times.total},
        "predicted_mfu": row.predicted,
        "memory_bytes": vars(estimate.memory) | {"total": estimate.memory.total},
        "device_bytes": run.job.memory,
        "fits": row.fits,
    }
