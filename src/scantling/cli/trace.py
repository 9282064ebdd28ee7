"""`scantling trace`."""

from __future__ import annotations

from typing import Any

import click

from scantling.assembly import assemble
from scantling.checkpoint.find import card_of
from scantling.cli import show
from scantling.parts.part import Step, Workload, total
from scantling.units import DTYPE_BYTES, bytes_text, dtype_name, flops_text


@click.command()
@click.argument("model")
@show.workload_options()
@click.option("--train", is_flag=True, help="A training pass: no cache, a loss over every position.")
@click.option(
    "--kernel", type=click.Choice(["fused", "reference"]), default="fused", show_default=True, help="Of attention."
)
@click.option("--dtype", default="bfloat16", show_default=True, help="Of the activations.")
@click.option("--unroll", is_flag=True, help="Every block, instead of one with the number of its repeats.")
@show.revision_option
@show.json_option
def command(
    model: str,
    batch: int,
    tokens: int | None,
    past: int,
    train: bool,
    kernel: str,
    dtype: str,
    unroll: bool,
    revision: str | None,
    as_json: bool,
) -> None:
    """Every step of one pass, from token ids to probabilities, loss and cache: shape, parameters, FLOPs, bytes."""
    card = card_of(model, revision=revision)
    if train and past:
        raise click.UsageError("--past is for decoding; a training pass has no cache", click.get_current_context())
    w = Workload(batch, tokens or card.context, past, training=train, kernel=kernel, unrolled=unroll)
    activations = dtype_name(dtype)
    parts = assemble(card)
    steps = list(parts.steps(w))
    params, forward = total(steps, "params"), total(steps, "flops")
    if as_json:
        rows = [_json(step, activations) for step in steps]
        show.emit({"name": card.name, "steps": rows, "total_params": params, "total_flops": forward})
        return
    show.say(
        f"{card.name}, B {w.batch}, T {w.tokens:,}, P {w.past:,}, {kernel} attention, activations in {activations}"
    )
    show.say()
    names = ("#", "path", "op", "shape", "elements", "parameters", "FLOPs", "bytes", "repeat", "what")
    show.table(names, [_row(i, step, activations) for i, step in enumerate(steps)])
    show.say(f"total: {params:,} parameters, {forward:,} FLOPs ({flops_text(forward)}) forward, full square")
    cache = sum(_bytes(s, activations) * s.repeat for s in steps if s.path.endswith((":keys", ":values")))
    if cache:
        show.say(f"KV cache after this pass: {cache:,} bytes ({bytes_text(cache)}) in {activations}")


def _bytes(step: Step, activations: str) -> int:
    return step.numel * DTYPE_BYTES[step.dtype or activations]


def _json(step: Step, activations: str) -> dict[str, Any]:
    return {
        "path": step.path,
        "op": step.op,
        "formula": step.formula,
        "shape": list(step.shape),
        "elements": step.numel,
        "params": step.params,
        "flops": step.flops,
        "flops_causal": step.flops_visible,
        "bytes": _bytes(step, activations),
        "saved_bytes": step.saved_bytes,
        "repeat": step.repeat,
        "note": step.note,
    }


def _row(i: int, s: Step, activations: str) -> tuple[Any, ...]:
    return (
        i,
        s.path,
        s.op,
        s.shape,
        s.numel,
        s.params or None,
        s.flops or None,
        _bytes(s, activations),
        s.repeat,
        s.note,
    )
