"""`scantling roofline`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from scantling.assembly import assemble
from scantling.cards import Card
from scantling.checkpoint.find import card_of
from scantling.cli import show
from scantling.numbers.hardware import Device, device
from scantling.numbers.roofline import Bound, Formats, Roofline, roofline, step_reads
from scantling.parts.latent import LatentAttention
from scantling.parts.part import Workload
from scantling.parts.transformer import Transformer
from scantling.units import BLOCKS, bytes_text, flops_text, format_name

if TYPE_CHECKING:
    from scantling.study.calibrate import Calibration

HERE = "this"
USUAL = ("fp32", "bf16", "int8")
"""Measured besides what is asked for."""
BUSY = 0.5
EXPANDED = (
    "FLOPs of decode are those of latents that every step expands to keys and values, as the model here does; a kernel "
    "that multiplies queries by W_UK instead computes less"
)
_TOLD = {"decode": "decode, one step"}


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
@click.option(
    "--source-tokens", type=click.IntRange(1, 2**40), help="Of an encoder-decoder's source (S). [default: --context]"
)
@click.option(
    "--dtype",
    default="bfloat16",
    show_default=True,
    help="Of the weights and of the arithmetic; q8_0, q4_k, ...: of the weights, beside bfloat16 arithmetic.",
)
@click.option("--cache-dtype", default="bfloat16", show_default=True, help="Of keys and values; also q8_0, ...")
@show.revision_option
@show.json_option
def command(
    model: str,
    device_name: str,
    device_file: Path | None,
    batch: int,
    context: int | None,
    source_tokens: int | None,
    dtype: str,
    cache_dtype: str,
    revision: str | None,
    as_json: bool,
) -> None:
    """Bounds of decode and prefill on one device: FLOPs, bytes, which of them binds, tokens per second.

    Of an encoder, of the pass over whole texts; of an encoder-decoder the prefill reads its source.

    No run is faster; activations, launches and communication are not counted. With no --device, or with `this`, this
    machine is measured for about two seconds; `this:cuda` measures another of its devices.
    """
    card = card_of(model, revision=revision)
    stored = Formats(*(format_name({"fp8": "float8_e4m3fn"}.get(name, name)) for name in (dtype, cache_dtype)))
    asked = Asked(card, show.workload(card, batch, context, 0, source_tokens), stored)
    parts = assemble(card)
    kind, _, place = device_name.partition(":")
    measured = _measure(parts, asked, place or "cpu") if kind == HERE else None
    row = device(device_name, device_file) if measured is None else measured.device
    found = roofline(parts, row, asked.work, stored)
    if as_json:
        show.emit(_data(asked, row, found) | {"measured": measured and asdict(measured)})
        return
    _print(asked, row, found, " free" if measured else "")
    if any(isinstance(part, LatentAttention) for _, part, _ in parts.walk()):
        show.say(EXPANDED)
    if measured is not None:
        _measured(measured)


@dataclass(frozen=True)
class Asked:
    """What the bounds are asked of."""

    card: Card
    work: Workload
    formats: Formats


def _data(asked: Asked, row: Device, found: Roofline) -> dict[str, object]:
    return {
        "name": asked.card.name,
        "device": row.name,
        "device_source": row.source,
        "batch": asked.work.batch,
        "context": asked.work.tokens,
        **show.sources(asked.card, asked.work),
        "dtype": asked.formats.weights,
        "cache_dtype": asked.formats.cache,
        "arithmetic": asked.formats.arithmetic,
        "dense_peak_tflops": row.peak(asked.formats.arithmetic) / 1e12,
        "bandwidth_bytes_per_second": row.bandwidth,
        "ridge_flops_per_byte": found.ridge,
        "resident_bytes": found.resident_bytes,
        "memory_bytes": row.memory_bytes,
        "fits": found.fits,
        **{name: _bound(bound) for name, bound in found.passes.items()},
    }


def _print(asked: Asked, row: Device, found: Roofline, free: str) -> None:
    w, formats = asked.work, asked.formats
    source = f", S {w.sources:,} of the source" if asked.card.family == "encoder-decoder" else ""
    kinds = f"{formats.weights}{f' beside {formats.arithmetic} products' if formats.weights in BLOCKS else ''}"
    show.say(f"{asked.card.name} on {row.name} ({row.about}), B {w.batch}, T {w.tokens:,}{source}, {kinds}")
    show.say()
    rows = [
        (
            _TOLD.get(what, what),
            flops_text(bound.flops),
            bytes_text(bound.weight_bytes),
            bytes_text(bound.cache_bytes),
            f"{bound.intensity:,.4g}",
            bound.binds,
            f"{1000 * bound.seconds:,.4g} ms",
            f"{bound.tokens_per_second:,.0f}",
        )
        for what, bound in found.passes.items()
    ]
    show.table(("pass", "FLOPs", "weights", "cache", "FLOP/byte", "binds", "at least", "tokens/s at most"), rows)
    peak = row.peak(formats.arithmetic) / 1e12
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
    wanted = asked.formats.arithmetic
    nbytes = sum(step_reads(parts, asked.work, asked.formats))
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
