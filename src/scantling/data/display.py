"""How far tokenising is, on standard error: a bar on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from scantling.data.making import Progress, Report
from scantling.units import count_text

_LINES = 10


@contextmanager
def shown_progress() -> Iterator[Report]:
    """What `prepare` takes as `progress`."""
    if not sys.stderr.isatty():
        yield _in_lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}")
    with Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("tokenising", total=None)

        def update(progress: Progress) -> None:
            text = f"tokenising: {count_text(progress.tokens)} tokens"
            bar.update(task, total=progress.shards, completed=progress.done, description=text)

        yield update


def _in_lines() -> Report:
    shown = 0

    def line(progress: Progress) -> None:
        nonlocal shown
        tenth = progress.done * _LINES // progress.shards
        if tenth > shown:
            shown = tenth
            what = f"{progress.done} of {progress.shards} shards, {progress.tokens:,} tokens"
            print(f"tokenising: {what}", file=sys.stderr, flush=True)

    return line
