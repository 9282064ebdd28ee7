"""Predictions beside published runs, docs/plan.md: the simulator on paper against every run of its table.

``python -m tests.plan_page --write`` rewrites it; tests fail where it is out of date.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path

from scantling.numbers.parallel import assumptions
from scantling.study.plan import described, plan
from scantling.study.published import Beside, Run, beside, errors

PATH = Path(__file__).parents[1] / "docs" / "plan.md"
NEAR = 5.0
"""Points of MFU, and places among layouts, within which a prediction counts as near."""

HEADER = """# `scantling plan` beside published runs

`scantling plan` predicts on paper what a layout of a training run does: memory of a rank, bytes on its links, the
pipeline's bubble, seconds of a step, MFU. This page sets its predictions beside every run of
`src/scantling/study/published_runs.yaml`, where each figure has its source. It is made by
`python -m tests.plan_page --write` (or `make docs`), and tests fail where it is out of date;
`scantling plan --published` prints the same comparison.

- **MFU** here is forward and backward over the full T x S square, nothing computed again, over the dense peak. A figure
  that was published as TFLOP/s, tokens per second or seconds is turned into it with the same count of FLOPs, so that
  both columns differ by the step's time alone; it may differ by rounding, or by the convention, from an MFU that a
  source prints.
- **points**: predicted less published MFU.
- **place**: of the published division of devices among all that fit on paper, each with its fastest micro-batch, chunks
  and sharding, within what the run's software could choose (`choices` in the table).
- **memory**: of the fullest rank on paper. All runs did fit.
- A run that is more than 5 points off, after the fifth place, or too large on paper is in a group that says what the
  model misses.
"""


def numbered(number: float) -> str:
    """With its sign."""
    return f"{number:+.1f}"


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], numbers: int = 0) -> str:
    """A table of which the last `numbers` columns stand to the right."""
    left = len(columns) - numbers
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * left + "---:|" * numbers]
    return "\n".join([*lines, *("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)])


@cache
def places() -> tuple[str, ...]:
    """Of each run ``2 of 23``, the place of its division of devices; ``none of 23`` where it does not fit."""
    known: dict[tuple[str, int, int, int, str], str] = {}
    found = []
    for run in (row.run for row in beside()):
        key = (run.group, run.job.devices, run.job.tokens, run.job.sequences, f"{run.model} {run.layout.mesh}")
        if key not in known:
            known[key] = place(run)
        found.append(known[key])
    return tuple(found)


def place(run: Run) -> str:
    """The place of one run."""
    answer = plan(run.job, run.allowed)
    return f"{answer.rank(run.layout.mesh) or 'none'} of {len(answer.ranked)}"


def near(row: Beside, its_place: str) -> bool:
    """Whether error, place and memory are as they should be."""
    first = its_place.split()[0]
    return abs(row.error) <= NEAR and first != "none" and int(first) <= NEAR and row.fits


def printed_places(text: str) -> tuple[str, ...]:
    """The places that a page prints."""
    return tuple(re.findall(r"\| ((?:\d+|none) of \d+) \|$", text, re.MULTILINE))


def constants() -> list[tuple[str, str, str]]:
    """Name, value and reason of every number of the clock, as they stand in the module."""
    assert assumptions.__file__
    body = ast.parse(Path(assumptions.__file__).read_text()).body
    found = []
    for this, following in pairwise(body):
        if isinstance(this, ast.Assign) and isinstance(following, ast.Expr):
            assert isinstance(this.targets[0], ast.Name)
            assert isinstance(following.value, ast.Constant)
            name = this.targets[0].id
            found.append((name, f"{getattr(assumptions, name):,}", " ".join(str(following.value.value).split())))
    return found


def page(where: Sequence[str]) -> str:
    """The page, with the places given."""
    rows = list(zip(beside(), where, strict=True))
    groups = [(name, list(group)) for name, group in groupby(rows, lambda pair: pair[0].run.group)]
    parts = [HEADER, "## How far off\n", _summary(groups), "", "## What the clock takes for granted\n"]
    parts += [" ".join((assumptions.__doc__ or "").split("\n\n", 1)[1].split()) + "\n"]
    parts += [table(("constant", "value", "reason"), constants()), "", "As `scantling plan` prints it:\n"]
    parts += [*(f"- {line}" for line in assumptions.TEXT), ""]
    for name, group in groups:
        parts += [f"## {name}\n", _group(group), ""]
    return "\n".join(parts)


def _summary(groups: list[tuple[str, list[tuple[Beside, str]]]]) -> str:
    lines = []
    everything = [pair for _, group in groups for pair in group]
    for name, group in [*groups, ("all", everything)]:
        off = errors([row for row, _ in group])
        within = sum(abs(row.error) <= NEAR for row, _ in group)
        good = sum(near(row, where) for row, where in group)
        figures = (numbered(off.mean), f"{off.rms:.1f}", numbered(off.largest))
        lines.append((name, off.runs, *figures, f"{within}/{off.runs}", f"{good}/{off.runs}"))
    columns = (
        "source",
        "runs",
        "mean",
        "root mean square",
        "largest",
        "within 5 points",
        "also in the first five, fits",
    )
    return table(columns, lines, numbers=6)


def _group(group: list[tuple[Beside, str]]) -> str:
    run = group[0][0].run
    text = [f"Source: {run.source}.\n", f"{run.note}\n"]
    text += [f"**What the model misses**: {run.misses}\n"] if run.misses else []
    columns = ("model", "layout", "published", "MFU", "predicted", "MFU", "points", "memory", "place")
    return "\n".join([*text, table(columns, [_line(row, where) for row, where in group], numbers=6)])


def _line(row: Beside, where: str) -> tuple[object, ...]:
    run, estimate = row.run, row.estimate
    memory = f"{estimate.memory.total / 2**30:.0f} GiB"
    if not row.fits:
        memory += f", {(estimate.memory.total - run.job.memory) / 2**30:.1f} too much"
    return (
        f"{run.model}, T {run.job.tokens:,}",
        f"{run.job.devices:,} x {run.device}: {described(run.layout)}",
        run.printed,
        f"{100 * row.published:.1f} %",
        f"{estimate.times.total:.2f} s",
        f"{100 * row.predicted:.1f} %",
        numbered(row.error),
        memory,
        where,
    )


if __name__ == "__main__":
    if "--write" in sys.argv:
        PATH.write_text(page(places()))
    else:
        sys.stdout.write(page(places()))
