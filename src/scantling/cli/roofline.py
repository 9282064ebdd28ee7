"""`scantling roofline`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from scantling.assembly import assemble
from scantling.checkpoint.find import card_of
from scantling.cli import show
from scantling.numbers.hardware import arithmetic, device
from scantling.numbers.roofline import Bound, roofline, step_bytes
from scantling.parts.transformer import Transformer
from scantling.units import bytes_text, flops_text, storage_dtype

if TYPE_CHECKING:
    from scantling.study.calibrate import Calibration

HERE = "this"


@click.command()
@click.argument("model")
@click.option(
    "--device",
    "device_name",
    metavar="NAME",
    default=HERE,
    help="h100, ..., a path, or this: measured. [default: this]",
)
@click.option("--device-file", type=click.Path(path_type=Path), metavar="F", help="More devices, YAML.")
@click.option("--batch", type=click.IntRange(1, 2**40), default=1, show_default=True, help="Rows (B).")
@click.option("--context", type=click.IntRange(1, 2**40), help="Positions per row (T). [default: the model's context]")
@click.option("--dtype", default="bfloat16", show_default=True, help="Of the weights and of the arithmetic.")
@click.option("--cache-dtype", default="bfloat16", show_default=True, help="Of keys and values.")
@show.revision_option
@show.json_option
def command(
    model: str,
    device_name: str,
    device_file: Path | None,
    batch: int,
    context: int | None,
    dtype: str,
    cache_dtype: str,
    revision: str | None,
    as_json: bool,
) -> None:
    """Bounds of decode and prefill on one device: FLOPs, bytes, which of them binds, tokens per second.

    No run is faster; activations, launches and communication are not counted. With no --device, or with `this`, this
    machine is measured for about two seconds; `this:cuda` measures another of its devices.
    """
    card = card_of(model, revision=revision)
    weights, cache = (storage_dtype({"fp8": "float8_e4m3fn"}.get(name, name)) for name in (dtype, cache_dtype))
    tokens, parts = show.workload(card, batch, context, 0).tokens, assemble(card)
    kind, _, place = device_name.partition(":")
    measured = None
    if kind == HERE:
        measured = _measure(parts, (batch, tokens, weights, cache), place or "cpu")
    row = device(device_name, device_file) if measured is None else measured.device
    found = roofline(parts, row, batch, tokens, weights, cache)
    if as_json:
        show.emit(
            {
                "name": card.name,
                "device": row.name,
                "device_source": row.source,
                "batch": batch,
                "context": tokens,
                "dtype": weights,
                "cache_dtype": cache,
                "dense_peak_tflops": row.peak(arithmetic(weights)) / 1e12,
                "bandwidth_bytes_per_second": row.bandwidth,
                "ridge_flops_per_byte": found.ridge,
                "resident_bytes": found.resident_bytes,
                "memory_bytes": row.memory_bytes,
                "fits": found.fits,
                "decode": _data(found.decode),
                "prefill": _data(found.prefill),
                "measured": measured and asdict(measured),
            }
        )
        return
    show.say(f"{card.name} on {row.name} ({row.about}), B {batch}, T {tokens:,}, {weights}")
    show.say()
    rows = [
        (
            what,
            flops_text(bound.flops),
            bytes_text(bound.weight_bytes),
            bytes_text(bound.cache_bytes),
            f"{bound.intensity:,.4g}",
            bound.binds,
            f"{1000 * bound.seconds:,.4g} ms",
            f"{bound.tokens_per_second:,.0f}",
        )
        for what, bound in (("decode, one step", found.decode), ("prefill", found.prefill))
    ]
    show.table(("pass", "FLOPs", "weights", "cache", "FLOP/byte", "binds", "at least", "tokens/s at most"), rows)
    peak = row.peak(arithmetic(weights)) / 1e12
    show.say(
        f"{peak:,.5g} TFLOP/s dense, {row.bandwidth / 1e9:,.5g} GB/s: compute binds from {found.ridge:,.4g} FLOP/byte"
    )
    if found.fits is not None and row.memory_bytes is not None:
        held, has = bytes_text(found.resident_bytes), bytes_text(row.memory_bytes)
        free = " free" if measured else ""
        show.say(f"weights and cache {held} {'fit into' if found.fits else 'do NOT fit into'} {has}{free}")
    if measured is not None:
        _measured(measured)


def _measure(parts: Transformer, asked: tuple[int, int, str, str], place: str) -> Calibration:
    """This machine in the arithmetic that is asked for and the usual ones, over as many bytes as a step reads."""
    from scantling.study.calibrate import calibrate

    batch, tokens, weights, cache = asked
    click.echo("measuring this machine for about 2 seconds", err=True)
    kinds = dict.fromkeys((arithmetic(weights), "fp32", "bf16", "int8"))
    found = calibrate([*kinds], step_bytes(parts, batch, tokens, weights, cache), place=place)
    if found.load is not None and found.load > 0.5:
        told = (
            f"{found.load:.1f} programs were running in the last minute: they make the figures lower than they need be"
        )
        click.echo(f"note: {told}", err=True)
    return found


def _measured(c: Calibration) -> None:
    rates = {"read": (c.read, 1e9, "GB/s"), **{name: (rate, 1e12, "TFLOP/s") for name, rate in c.products.items()}}
    rows = [
        (what, f"{rate.best / unit:,.4g} {name}", f"{rate.median / unit:,.4g} {name}", rate.passes, rate.what)
        for what, (rate, unit, name) in rates.items()
    ]
    show.say()
    show.say(f"measured at {c.at} in {c.seconds:.1f} s on {c.place}, {c.threads} threads, torch {c.torch}")
    show.table(("what", "best, used above", "median", "passes", "size"), rows)


def _data(bound: Bound) -> dict[str, object]:
    return {
        "flops": bound.flops,
        "weight_bytes": bound.weight_bytes,
        "cache_bytes": bound.cache_bytes,
        "compute_seconds": bound.compute_seconds,
        "memory_seconds": bound.memory_seconds,
        "binds": bound.binds,
        "seconds": bound.seconds,
        "tokens_per_second": bound.tokens_per_second,
    }
