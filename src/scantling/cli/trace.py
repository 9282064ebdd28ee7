"""`scantling trace`."""

from __future__ import annotations

from typing import Any

import click

from scantling.assembly import assemble
from scantling.checkpoint.find import card_of
from scantling.cli import show
from scantling.numbers.flops import BACKWARD
from scantling.parts.part import Step, total
from scantling.units import DTYPE_BYTES, bytes_text, count_text, flops_text, weights_dtype


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
    source_tokens: int | None,
    train: bool,
    kernel: str,
    dtype: str,
    unroll: bool,
    revision: str | None,
    as_json: bool,
) -> None:
    """Every step of one pass, from text to probabilities, loss and cache: shape, parameters, FLOPs, bytes."""
    card = card_of(model, revision=revision)
    if train and past:
        raise click.UsageError("--past is for decoding; a training pass has no cache", click.get_current_context())
    activations = weights_dtype(dtype)
    w = show.workload(
        card, batch, tokens, past, source_tokens, dtype=activations, training=train, kernel=kernel, unrolled=unroll
    )
    parts = assemble(card)
    steps = list(parts.steps(w))
    params, forward = parts.params, total(steps, "flops")
    kept = parts.named_state(w)
    cache = 0 if train else sum(_bytes(s, activations) * s.repeat for s in steps if s.path in kept)
    if as_json:
        about = {
            "batch": w.batch,
            "tokens": w.tokens,
            "past": w.past,
            **show.sources(card, w),
            "kernel": kernel,
            "dtype": activations,
        }
        sums: dict[str, Any] = {"total_params": params, "total_flops": forward, "kv_cache_bytes": cache}
        if train:
            sums["training_flops"] = (1 + BACKWARD) * forward
        show.emit({"name": card.name, **about, "steps": [_json(step, activations) for step in steps], **sums})
        return
    show.say(f"{card.name}, {show.sizes(card, w)}, {kernel} attention, activations in {activations}")
    show.say()
    _table(steps, activations)
    show.say(f"total: {params:,} parameters, {forward:,} FLOPs ({flops_text(forward)}) forward, full square")
    if train:
        whole = (1 + BACKWARD) * forward
        show.say(f"with the backward: {whole:,} FLOPs ({flops_text(whole)})")
    if cache:
        show.say(f"KV cache after this pass: {cache:,} bytes ({bytes_text(cache)}) in {activations}")


def _bytes(step: Step, activations: str) -> int:
    return step.numel * DTYPE_BYTES[step.dtype or activations] if step.stored else 0


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


def _table(steps: list[Step], activations: str) -> None:
    """All columns where there is room for them; on a narrow terminal, short figures and no sentences."""
    if show.width() < 200:
        show.table(
            ("path", "op", "shape", "params", "FLOPs", "bytes", "x"),
            [(_short(s.path), s.op, s.shape, *_figures(s, activations), s.repeat) for s in steps],
        )
        return
    names = ("path", "op", "formula", "shape", "elements", "parameters", "FLOPs", "bytes", "repeat", "what")
    rows = []
    for s in steps:
        figures = (s.numel, s.params or None, s.flops or None, _bytes(s, activations))
        rows.append((s.path, s.op, s.formula, s.shape, *figures, s.repeat, s.note))
    show.table(names, rows)


def _short(path: str) -> str:
    return path.removeprefix("decoder.").replace("blocks.", "")


def _figures(step: Step, activations: str) -> tuple[str, ...]:
    return tuple(count_text(n) if n else "" for n in (step.params, step.flops, _bytes(step, activations)))
