"""Options of `scantling plan` that say which layouts are looked at."""

from __future__ import annotations

from typing import Any

import click

from scantling.cli import drawing
from scantling.parts.saved import POLICIES
from scantling.study.plan import Choices


def _numbers(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """``4,8`` as numbers; stages of ZeRO from 0 to 3, everything else from 1."""
    if value is None:
        return None
    low, high = (0, 3) if param.name == "zero" else (1, 10**9)
    pieces = [piece.strip() for piece in value.split(",")]
    if not all(piece.isdigit() and low <= int(piece) <= high for piece in pieces):
        raise click.BadParameter(f"{value!r}: whole numbers from {low} to {high:,} are needed, commas between them")
    return tuple(int(piece) for piece in pieces)


allowed_options = drawing.grouped(
    "allowed",
    {
        "recompute": click.option(
            "--recompute", type=click.Choice(POLICIES), multiple=True, help="Allowed policies. [default: all]"
        ),
        "zero": click.option(
            "--zero", callback=_numbers, metavar="N,...", help="Allowed stages of ZeRO; 3 is FSDP. [default: 1,2,3]"
        ),
        "data": click.option("--data", callback=_numbers, metavar="N,...", help="Allowed numbers of replicas."),
        "tensor": click.option("--tensor", callback=_numbers, metavar="N,...", help="Allowed numbers of tensor ranks."),
        "pipeline": click.option(
            "--pipeline", callback=_numbers, metavar="N,...", help="Allowed numbers of pipeline ranks."
        ),
        "context_ranks": click.option(
            "--context-ranks", callback=_numbers, metavar="N,...", help="Allowed numbers of context ranks."
        ),
        "experts": click.option(
            "--experts", callback=_numbers, metavar="N,...", help="Allowed numbers of expert ranks."
        ),
        "micro_batch": click.option(
            "--micro-batch", callback=_numbers, metavar="N,...", help="Allowed rows of a pass."
        ),
        "virtual": click.option(
            "--virtual", callback=_numbers, metavar="N,...", help="Allowed chunks of a pipeline rank."
        ),
        "no_sequence": click.option(
            "--no-sequence", is_flag=True, help="Tensor ranks do not divide norms and residuals by positions."
        ),
    },
)


def chosen(allowed: dict[str, Any]) -> Choices:
    """What these options leave; what none of them says is left as it is by default."""
    names = {"context_ranks": "context", "experts": "expert"}
    stated = {names.get(name, name): value for name, value in allowed.items() if value and name != "no_sequence"}
    return Choices(**stated, sequence=not allowed["no_sequence"])
