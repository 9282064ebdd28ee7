"""What `scantling bench` shows: progress, tables, JSON, a picture."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import click

from scantling.cli import show
from scantling.units import bytes_text

if TYPE_CHECKING:
    from scantling.benches.contest import Found, Row, Subject
    from scantling.benches.drift import Drift
    from scantling.benches.timing import Spread


class Progress:
    """What happens now, on standard error: one line that is written anew on a terminal, plain lines elsewhere."""

    def __init__(self) -> None:
        self._tty, self._written = sys.stderr.isatty(), 0

    def say(self, text: str) -> None:
        """Show it."""
        if not self._tty:
            click.echo(text, err=True)
            return
        click.echo(f"\r{text.ljust(self._written)}", err=True, nl=False)
        self._written = len(text)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._tty and self._written:
            click.echo(f"\r{' ' * self._written}\r", err=True, nl=False)


def tables(subject: Subject, found: Found, rounds: int) -> None:
    """Prefill, decode, memory; an encoder has vectors in place of the first two."""
    initial = "; initial weights, as this card has none" if subject.initial else ""
    show.say(f"{subject.model}: {rounds} interleaved rounds, medians with the lowest and the highest{initial}")
    show.say()
    rated = ("tokens/s", "from", "to")
    beside = ("of the roofline", *(f"x {peer}" for peer in _peers(found)))
    if subject.family == "encoder":
        columns = ("contender", "B", "tokens", "texts/s", "from", "to", "tokens/s", *beside)
        show.table(columns, [_texts(row, found) for row in found.rows], "vectors")
    else:
        columns = ("contender", "cache", "B", "prompt", *rated, "first token", *beside)
        show.table(columns, [_prefill(row, found) for row in found.rows], "prefill")
        columns = ("contender", "cache", "B", "after", *rated, "a step", "read a token", *beside)
        show.table(columns, [_decode(row, found) for row in found.rows if row.decode_rate], "decode")
    columns = ("contender", "cache", "B", "prompt", "resident at most", "keys and values", "predicted")
    show.table(columns, [_memory(row) for row in found.rows], "memory")
    machine = [
        (name, _seconds(found.load_seconds[name]), f"{c.read.best / 1e9:,.4g} GB/s", c.read.what, _products(c))
        for name, c in found.machine.items()
    ]
    show.table(("contender", "loaded in", "this machine reads", "of", "and multiplies"), machine)


def drift(name: str, initial: bool, found: Sequence[Drift], places: Sequence[str]) -> None:
    """What each way costs at each length, and at the longest one by layer.

    Args:
        places: names of where the stream is compared.
    """
    weights = "initial weights" if initial else "its weights"
    show.say(f"{name}, {weights}: how far each way is from a whole pass in float32 with the fused kernel")
    show.say()
    columns = ("what", "way", "tokens", "last layer", "worst layer", "logits", "log-probability", "same choice")
    show.table(columns, [_way(row, places) for row in found], "root mean square, over that of the plain pass")
    longest = max((row.tokens for row in found), default=0)
    deep = [row for row in found if row.layers is not None and row.tokens == longest]
    if deep:
        values = [[f"{x:.1e}" for x in row.layers or ()] for row in deep]
        show.table(("after", *(row.way for row in deep)), list(zip(places, *values, strict=True)), f"{longest} tokens")


def _way(row: Drift, places: Sequence[str]) -> tuple[Any, ...]:
    layers = None if row.layers is None else [f"{x:.1e}" for x in row.layers]
    worst = None if row.layers is None else max(range(len(row.layers)), key=lambda i: row.layers[i])  # type: ignore[index]
    return (
        row.kind,
        row.way,
        row.tokens,
        None if layers is None else layers[-1],
        None if layers is None or worst is None else f"{layers[worst]}, {places[worst]}",
        f"{row.logits:.1e}",
        None if row.likely is None else f"{row.likely:.1e}",
        None if row.agree is None else f"{100 * row.agree:.4g} %",
    )


def _memory(row: Row) -> tuple[Any, ...]:
    load = row.load
    head = (row.contender.name, load.cache, load.batch, load.prompt)
    return (*head, _bytes(row.resident), row.cache_bytes, row.cache_predicted)


def _products(calibration: Any) -> str:
    return ", ".join(f"{rate.best / 1e12:,.4g} T/s in {name}" for name, rate in calibration.products.items())


def _peers(found: Found) -> list[str]:
    return list(dict.fromkeys(row.contender.name for row in found.rows if row.contender.is_peer))


def ratios(row: Row, found: Found, phase: str) -> Iterator[float | None]:
    """The rate of a phase over each peer's at the same load, by medians; a peer has one kind of cache."""
    mine = getattr(row, f"{phase}_rate").median
    for peer in _peers(found):
        same = [r for r in found.rows if r.contender.name == peer]
        same = [r for r in same if (r.load.batch, r.load.prompt) == (row.load.batch, row.load.prompt)]
        yield round(mine / getattr(same[0], f"{phase}_rate").median, 2) if same else None


def _texts(row: Row, found: Found) -> tuple[Any, ...]:
    rate = row.text_rate
    head = (row.contender.name, row.load.batch, row.load.prompt, *_rated(rate))
    return (*head, _whole(row.prefill_rate.median), _share(row.prefill_share), *ratios(row, found, "text"))


def _prefill(row: Row, found: Found) -> tuple[Any, ...]:
    head = (row.contender.name, row.load.cache, row.load.batch, row.load.prompt, *_rated(row.prefill_rate))
    return (*head, _seconds(row.first.median), _share(row.prefill_share), *ratios(row, found, "prefill"))


def _decode(row: Row, found: Found) -> tuple[Any, ...]:
    rate, step, read = row.decode_rate, row.step, row.decode
    assert rate is not None
    assert step is not None
    head = (row.contender.name, row.load.cache, row.load.batch, row.load.prompt, *_rated(rate))
    each = bytes_text(read.nbytes // row.load.batch) if read is not None else None
    tail = (_seconds(step.median), each, _share(row.decode_share))
    return (*head, *tail, *ratios(row, found, "decode"))


def _rated(rate: Spread) -> tuple[float, ...]:
    return tuple(map(_whole, (rate.median, rate.low, rate.high)))


def _whole(rate: float) -> float:
    """A large rate without a fraction, which a table would write as a power of ten."""
    return round(rate) if rate >= 1000 else rate


def _seconds(seconds: float) -> str:
    return f"{seconds:,.3g} s" if seconds >= 1 else f"{1000 * seconds:,.3g} ms"


def _share(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.3g} %"


def _bytes(n: int | None) -> str | None:
    return None if n is None else bytes_text(n)


def data(subject: Subject, found: Found, rounds: int) -> dict[str, Any]:
    """The same for programs: plain integers, bytes, seconds."""
    return {
        "model": subject.model,
        "initial_weights": subject.initial,
        "rounds": rounds,
        "rows": [_row(row) for row in found.rows],
        "load_seconds": found.load_seconds,
        "machine": {
            name: {
                "read_bytes_per_second": c.read.best,
                "read_of": c.read.what,
                "products_per_second": {kind: rate.best for kind, rate in c.products.items()},
                "at": c.at,
                "threads": c.threads,
                "load": c.load,
            }
            for name, c in found.machine.items()
        },
        "missing": found.missing,
    }


def _row(row: Row) -> dict[str, Any]:
    decode, step = row.decode, row.step
    return {
        "contender": row.contender.name,
        "engine": row.contender.engine,
        "dtype": row.contender.dtype,
        "cache": row.load.cache,
        "batch": row.load.batch,
        "prompt_tokens": row.load.prompt,
        "new_tokens": row.load.tokens,
        "first_token_seconds": _spread(row.first),
        "prefill_tokens_per_second": _spread(row.prefill_rate),
        "texts_per_second": None if decode is not None else _spread(row.text_rate),
        "decode_tokens_per_second": _spread(row.decode_rate),
        "seconds_per_step": _spread(step),
        "seconds_per_token": None if step is None else _spread(step.over(row.load.batch)),
        "bytes_read_per_token": None if decode is None else decode.nbytes // row.load.batch,
        "prefill_flops": row.prefill.flops,
        "decode_flops_per_step": None if decode is None else decode.flops,
        "prefill_roofline_share": row.prefill_share,
        "decode_roofline_share": row.decode_share,
        "cache_bytes": row.cache_bytes,
        "cache_bytes_predicted": row.cache_predicted,
        "resident_bytes": row.resident,
    }


def _spread(spread: Spread | None) -> dict[str, float] | None:
    return None if spread is None else {"median": spread.median, "low": spread.low, "high": spread.high}


def draw(found: Found, path: Path) -> None:
    """Bars of the rates with their spreads: a panel for each phase, a group of bars for each load."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    phases = [("prefill", "prefill")]
    if any(row.decode_rate for row in found.rows):
        phases.append(("decode", "decode"))
    figure = Figure(figsize=(9, 3.6 * len(phases)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(phases), squeeze=False)
    for axes, (phase, title) in zip(grid[:, 0], phases, strict=True):
        _panel(axes, found, phase, title)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize="small", frameon=False)
    figure.savefig(path, dpi=120)


def _panel(axes: Any, found: Found, phase: str, title: str) -> None:
    loads = list(dict.fromkeys((row.load.batch, row.load.prompt) for row in found.rows))
    series = list(dict.fromkeys((row.contender.name, row.load.cache) for row in found.rows))
    wide = 0.8 / len(series)
    for number, (name, cache) in enumerate(series):
        rows = [r for r in found.rows if (r.contender.name, r.load.cache) == (name, cache)]
        rows = [row for row in rows if getattr(row, f"{phase}_rate") is not None]
        rates = [getattr(row, f"{phase}_rate") for row in rows]
        at = [loads.index((r.load.batch, r.load.prompt)) + (number - (len(series) - 1) / 2) * wide for r in rows]
        low, high = [r.median - r.low for r in rates], [r.high - r.median for r in rates]
        label = name if cache == "full" else f"{name}, {cache} cache"
        axes.bar(at, [r.median for r in rates], wide * 0.92, yerr=(low, high), label=label, error_kw={"lw": 0.8})
    axes.set_xticks(range(len(loads)), [f"batch {batch}, prompt {prompt}" for batch, prompt in loads])
    axes.set(ylabel="tokens per second, all rows", title=title)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
