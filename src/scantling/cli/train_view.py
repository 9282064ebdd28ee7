"""A run as a person sees it, on standard error: a panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click

from scantling.units import bytes_text, count_text

if TYPE_CHECKING:
    from scantling.cards.training import Training
    from scantling.train.watch import Record, Watcher

SECONDS = 2.0
"""Between two plain lines of updates."""


def view(training: Training, plain: bool) -> Watcher:
    """The panel, or lines."""
    return Lines(training) if plain or not sys.stderr.isatty() else Panel(training)


def line(record: Record, steps: int) -> str | None:
    """One line for a record, or None where there is nothing to say."""
    match record["kind"]:
        case "step":
            return _step(record, steps)
        case "evaluation":
            bits = record["bits_per_byte"]
            more = "" if bits is None else f", {bits:.4f} bits per byte"
            return (
                f"held out: loss {record['loss']:.4f}, perplexity {record['perplexity']:.2f}{more}, "
                f"{record['tokens']:,} tokens"
            )
        case "sample":
            return f"sample: {record['text']!r}"
        case "saved":
            return f"saved {record['folder']}"
        case "note":
            return f"note: {record['text']}"
    return None


def _step(record: Record, steps: int) -> str:
    memory, wanted = record["memory_bytes"], record["memory_predicted"]
    beside = "" if wanted is None else f", {bytes_text(wanted)} predicted"
    used = "" if memory is None else f" memory {bytes_text(memory)}{beside}"
    return (
        f"{record['step']}/{steps} loss {record['loss']:.4f} lr {record['lr']:.3g} norm {record['norm']:.3g} "
        f"{record['tokens_per_second']:,.0f} tokens/s mfu {100 * record['mfu']:.1f} % "
        f"left {_clock(record['remaining_seconds'])}{used}"
    )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


class Lines:
    """Plain lines; updates at most every two seconds, and the last one."""

    def __init__(self, training: Training) -> None:
        self._steps, self._shown = training.steps, -SECONDS

    def record(self, record: Record) -> None:
        """Show a record."""
        if record["kind"] == "step":
            now = time.monotonic()
            if now - self._shown < SECONDS and record["step"] != self._steps and "fault" not in record:
                return
            self._shown = now
        if (text := line(record, self._steps)) is not None:
            click.echo(text, err=True)

    def close(self) -> None:
        """Nothing is left."""


class Panel:
    """One panel that changes in place: the last update, the blocks' gradients, the last look at held-out text."""

    def __init__(self, training: Training) -> None:
        from rich.console import Console
        from rich.live import Live

        self._steps = training.steps
        self._last: dict[str, Record] = {}
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, refresh_per_second=4, transient=False)
        self._live.start()

    def record(self, record: Record) -> None:
        """Show a record."""
        self._last[record["kind"]] = record
        if record["kind"] in ("saved", "note", "sample") and (text := line(record, self._steps)) is not None:
            self._console.print(text, highlight=False, markup=False)
        if "step" in self._last:
            self._live.update(self._drawn(self._last["step"]))

    def close(self) -> None:
        """Leave the last state on the screen."""
        self._live.stop()

    def _drawn(self, step: Record) -> Any:
        from rich.console import Group
        from rich.panel import Panel as Frame
        from rich.progress_bar import ProgressBar
        from rich.text import Text

        norms = "  ".join(f"{name.removeprefix('decoder.')} {norm:.2g}" for name, norm in step["norms"].items())
        rows: list[Any] = [
            ProgressBar(self._steps, step["step"], width=60),
            Text(_step(step, self._steps)),
            Text(f"gradients  {norms}"),
        ]
        if (held := self._last.get("evaluation")) is not None:
            rows.append(Text(line(held, self._steps) or ""))
        return Frame(Group(*rows), title="training", subtitle=f"{count_text(self._steps)} updates")
