"""`scantling plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from scantling.assembly import assemble
from scantling.checkpoint.find import card_of
from scantling.cli import plan_published, plan_tables, show
from scantling.cli.plan_options import allowed_options, chosen
from scantling.cli.plan_tables import Answer
from scantling.errors import ScantlingInputError
from scantling.numbers.hardware import Device, device
from scantling.numbers.parallel.communication import fabric
from scantling.numbers.parallel.job import OVERLAPS, Job
from scantling.numbers.parallel.memory import PRECISIONS, precision
from scantling.numbers.parallel.work import speed
from scantling.study.plan import checked, plan
from scantling.units import parse_count

LEAST_TOKENS = 2**22
TOKENS_OF_A_DEVICE = 1024
OFF = 0.05
"""How far the rows of a step may be from the tokens that are asked for, so that they divide well."""
POSITIVE = click.FloatRange(min=0, min_open=True)


@click.command()
@click.argument("model", required=False)
@click.option("--devices", "n_devices", type=click.IntRange(1, 10**6), help="How many.")
@click.option("--device", "device_name", metavar="NAME", help="h100, a100-80gb, ..., or a path.")
@click.option("--device-file", type=click.Path(path_type=Path), metavar="F", help="More devices, YAML.")
@click.option("--tokens-per-step", metavar="X", help="16M. [default: 4Mi, or 1,024 a device where that is more]")
@click.option("--context", type=click.IntRange(1, 2**40), help="Positions of a row (T). [default: the model's context]")
@click.option("--precision", "precision_name", default="mixed", show_default=True, help=f"{', '.join(PRECISIONS)}.")
@click.option("--kernel", type=click.Choice(["fused", "reference"]), default="fused", show_default=True)
@allowed_options
@click.option("--no-overlap", type=click.Choice(OVERLAPS), multiple=True, help="What cannot hide behind arithmetic.")
@click.option("--per-node", type=click.IntRange(1, 10**6), help="Devices to a node. [default: the device's]")
@click.option("--network", type=POSITIVE, metavar="GB/S", help="Of a device between nodes, one direction.")
@click.option("--top", type=click.IntRange(1, 1000), default=10, show_default=True, help="Layouts to print.")
@click.option("--published", is_flag=True, help="Predictions beside published runs instead.")
@show.revision_option
@show.json_option
def command(
    model: str | None,
    n_devices: int | None,
    device_name: str | None,
    device_file: Path | None,
    tokens_per_step: str | None,
    context: int | None,
    precision_name: str,
    kernel: str,
    allowed: dict[str, Any],
    no_overlap: tuple[str, ...],
    per_node: int | None,
    network: float | None,
    top: int,
    published: bool,
    revision: str | None,
    as_json: bool,
) -> None:
    """Layouts of training on many devices, ranked by their predicted time: memory, links, bubble, MFU, and why others
    lose. A simulator on paper; --published prints its predictions beside published runs, with the error.
    """
    if published:
        plan_published.run(as_json)
        return
    if model is None or n_devices is None or device_name is None:
        raise ScantlingInputError(
            "MODEL, --devices and --device are needed, as in: plan llama-3-8b --devices 64 --device h100"
        )
    card = card_of(model, revision=revision)
    row = device(device_name, device_file)
    tokens = show.workload(card, 1, context, 0).tokens
    asked = None if tokens_per_step is None else parse_count(tokens_per_step, "--tokens-per-step")
    size = precision(precision_name)
    job = Job(
        model=assemble(card),
        devices=n_devices,
        tokens=tokens,
        sequences=_rows(asked or max(LEAST_TOKENS, TOKENS_OF_A_DEVICE * n_devices), tokens),
        speed=speed(row, _arithmetic(row, precision_name)),
        fabric=fabric(row, n_devices, per_node, None if network is None else network * 1e9),
        memory=_capacity(row),
        precision=size,
        kernel=kernel,
        overlap=frozenset(OVERLAPS) - frozenset(no_overlap),
    )
    answer = Answer(card, row, asked, precision_name, checked(plan(job, chosen(allowed))), top)
    if as_json:
        show.emit(plan_tables.data(answer))
    else:
        plan_tables.print_all(answer)


def _rows(tokens: int, context: int) -> int:
    """Rows of a step: exactly as many as were asked for, or near that a number with many factors of two."""
    if tokens % context == 0:
        return tokens // context
    wanted = tokens / context
    if wanted < 1:
        raise ScantlingInputError(f"{tokens:,} tokens a step are less than a row of {context:,} positions")
    power = 1
    while abs(round(wanted / (2 * power)) * 2 * power - wanted) <= OFF * wanted:
        power *= 2
    return max(1, round(wanted / power) * power)


def _arithmetic(row: Device, name: str) -> str:
    """In which products are computed: 16 bits, or float32 on the units that are fastest at it."""
    order = ("tf32", "fp32") if name == "fp32" else ("bf16", "fp16")
    return next((dtype for dtype in order if dtype in row.dense_tflops), order[0])


def _capacity(row: Device) -> int:
    if row.memory_bytes is None:
        raise ScantlingInputError(f"device {row.name} has no memory_gb: a row of --device-file can state it")
    return row.memory_bytes
