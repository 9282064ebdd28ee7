"""`scantling roofline`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from scantling.assembly import assemble
from scantling.checkpoint.find import card_of
from scantling.cli import show
from scantling.numbers.hardware import Device, arithmetic, device
from scantling.numbers.roofline import Bound, Roofline, generating, roofline, step_bytes
from scantling.parts.transformer import Transformer
from scantling.units import bytes_text, flops_text, storage_dtype

if TYPE_CHECKING:
    from scantling.study.calibrate import Calibration

HERE = "this"
USUAL = ("fp32", "bf16", "int8")
"""Measured besides what is asked for."""
BUSY = 0.5


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
    asked = Asked(card.name, batch, show.workload(card, batch, context, 0).tokens, weights, cache)
    parts = generating(assemble(card))
    kind, _, place = device_name.partition(":")
    measured = _measure(parts, asked, place or "cpu") if kind == HERE else None
    row = device(device_name, device_file) if measured is None else measured.device
    found = roofline(parts, row, batch, asked.tokens, weights, cache)
    if as_json:
        show.emit(_data(asked, row, found) | {"measured": measured and asdict(measured)})
        return
    _print(asked, row, found, " free" if measured else "")
    if measured is not None:
        _measured(measured)


@dataclass(frozen=True)
class Asked:
    """What the bounds are asked of."""

    name: str
    batch: int
    tokens: int
    dtype: str
    cache_dtype: str


def _data(asked: Asked, row: Device, found: Roofline) -> dict[str, object]:
    return {
        "name": asked.name,
        "device": row.name,
        "device_source": row.source,
        "batch": asked.batch,
        "context": asked.tokens,
        "dtype": asked.dtype,
        "cache_dtype": asked.cache_dtype,
        "dense_peak_tflops": row.peak(arithmetic(asked.dtype)) / 1e12,
        "bandwidth_bytes_per_second": row.bandwidth,
        "ridge_flops_per_byte": found.ridge,
        "resident_bytes": found.resident_bytes,
        "memory_bytes": row.memory_bytes,
        "fits": found.fits,
        "decode": _bound(found.decode),
        "prefill": _bound(found.prefill),
    }


def _print(asked: Asked, row: Device, found: Roofline, free: str) -> None:
    show.say(f"{asked.name} on {row.name} ({row.about}), B {asked.batch}, T {asked.tokens:,}, {asked.dtype}")
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
    peak = row.peak(arithmetic(asked.dtype)) / 1e12
    show.say(
        f"{peak:,.5g} TFLOP/s dense, {row.bandwidth / 1e9:,.5g} GB/s: compute binds from {found.ridge:,.4g} FLOP/byte"
    )
    if found.fits is not None and row.memory_bytes is not None:
        held, has = bytes_text(found.resident_bytes), bytes_text(row.memory_bytes)
        show.say(f"weights and cache {held} {'fit into' if found.fits else 'do NOT fit into'} {has}{free}")


def _measure(parts: Transformer, asked: Asked, place: str) -> Calibration:
    """This machine in the arithmetic that is asked for and the usual ones, over as many bytes as a step reads."""
    from scantling.study.calibrate import calibrate

    click.echo("measuring this machine for about 2 seconds", err=True)
    wanted = arithmetic(asked.dtype)
    nbytes = step_bytes(parts, asked.batch, asked.tokens, asked.dtype, asked.cache_dtype)
    usual = [name for name in USUAL if name != wanted]
    found = calibrate([wanted], nbytes, place=place, besides=usual)
    notes = list(found.missing)
    if found.load is not None and found.load > BUSY:
        notes.append(f"{found.load:.1f} programs were running in the last minute; without them the figures are higher")
    for note in notes:
        click.echo(f"note: {note}", err=True)
    return found


def _measured(c: Calibration) -> None:
    rates = {
        "read": (c.read, 1e9, "GB/s"),
        **{name: (rate, 1e12, "TOP/s" if name == "int8" else "TFLOP/s") for name, rate in c.products.items()},
    }
    rows = [
        (what, f"{rate.best / unit:,.4g} {name}", f"{rate.median / unit:,.4g} {name}", rate.passes, rate.what)
        for what, (rate, unit, name) in rates.items()
    ]
    show.say()
    show.say(f"measured at {c.at} in {c.seconds:.1f} s on {c.place}, {c.threads} threads, torch {c.torch}")
    show.table(("what", "best, used above", "median", "passes", "size"), rows)


def _bound(bound: Bound) -> dict[str, object]:
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
