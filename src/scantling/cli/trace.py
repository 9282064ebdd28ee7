"""`scantling trace`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from scantling.assembly import assemble
from scantling.checkpoint.find import card_of
from scantling.cli import show
from scantling.cli.traced import Traced, largest, legend, symbols, totals
from scantling.errors import ScantlingInputError
from scantling.numbers.trace import AGAIN, BACKWARD, FORWARD, Row, trace
from scantling.parts.saved import POLICIES
from scantling.units import count_text, weights_dtype

LARGEST = "<- largest"


@click.command()
@click.argument("model")
@show.workload_options()
@click.option("--train", is_flag=True, help="A training pass: no cache, a loss over every position, and the backward.")
@click.option("--decode", is_flag=True, help="One new token per row; without --past, the last of the model's context.")
@click.option(
    "--recompute", type=click.Choice(POLICIES), default="none", show_default=True, help="Again in the backward pass."
)
@click.option(
    "--kernel", type=click.Choice(["fused", "reference"]), default="fused", show_default=True, help="Of attention."
)
@click.option("--dtype", default="bfloat16", show_default=True, help="Of the activations.")
@click.option("--unroll", is_flag=True, help="Every block, instead of one with the number of its repeats.")
@click.option("--html", "page", type=click.Path(path_type=Path), metavar="FILE", help="Write one page to look through.")
@click.option("--overwrite", is_flag=True, help="Of a FILE that exists.")
@click.option("--markdown", is_flag=True, help="Print a Markdown table.")
@show.revision_option
@show.json_option
def command(
    model: str,
    batch: int,
    tokens: int | None,
    past: int,
    source_tokens: int | None,
    train: bool,
    decode: bool,
    recompute: str,
    kernel: str,
    dtype: str,
    unroll: bool,
    page: Path | None,
    overwrite: bool,
    markdown: bool,
    revision: str | None,
    as_json: bool,
) -> None:
    """Every step of one pass, from text to probabilities, loss and cache, and back again with --train.

    Shapes in symbols and numbers, parameters, FLOPs over the full square, bytes, and what is kept for the backward.
    """
    if page is not None and page.exists() and not overwrite:
        raise ScantlingInputError(f"{page}: exists already; name another file, or --overwrite")
    _refuse(train, decode, past, tokens, recompute, (markdown, as_json))
    card = card_of(model, revision=revision)
    if decode:
        tokens, past = 1, past or card.context - 1
    options = {"training": train, "kernel": kernel, "unrolled": unroll, "recompute": recompute}
    w = show.workload(card, batch, tokens, past, source_tokens, dtype=weights_dtype(dtype), **options)
    traced = Traced(card, w, trace(assemble(card), w))
    if page is not None:
        _write(traced, page)
    if as_json:
        show.emit(_data(traced))
    elif markdown:
        _markdown(traced)
    elif page is None:
        _print(traced)


def _refuse(
    train: bool, decode: bool, past: int, tokens: int | None, recompute: str, outputs: tuple[bool, bool]
) -> None:
    problem = ""
    if train and (past or decode):
        problem = f"{'--past' if past else '--decode'} is for decoding; a training pass has no cache"
    elif recompute != "none" and not train:
        problem = "--recompute is about the backward pass: it needs --train"
    elif decode and tokens not in (None, 1):
        problem = "--decode is one new token: leave --tokens out"
    elif all(outputs):
        problem = "--markdown and --json both print: choose one"
    if problem:
        raise click.UsageError(problem, click.get_current_context())


def _data(traced: Traced) -> dict[str, Any]:
    found, w = traced.found, traced.w
    top, forward, backward = found.largest, found.cost(FORWARD), found.cost(BACKWARD)
    about: dict[str, Any] = {"batch": w.batch, "tokens": w.tokens, "past": w.past, **show.sources(traced.card, w)}
    sums: dict[str, Any] = {
        "total_params": found.params,
        "total_flops": found.cost().full,
        "forward_flops": forward.full,
        "kv_cache_bytes": found.cache_bytes,
    }
    if w.training:
        about["recompute"] = w.recompute
        sums["backward_flops"] = backward.full
        sums["recomputed_flops"] = found.cost(AGAIN).full
        sums["training_flops"] = forward.full + backward.full
        sums["saved_bytes"] = found.saved_bytes
    return {
        "name": traced.card.name,
        **about,
        "kernel": w.kernel,
        "dtype": w.dtype,
        "sizes": {name: values[0] if len(values) == 1 else list(values) for name, values in found.sizes.items()},
        "steps": [_row(row, row is top) for row in found.rows],
        **sums,
        "largest": {"path": top.path, "stage": top.stage, "tensor": top.largest[0], "bytes": top.largest[1]},
    }


def _row(row: Row, top: bool) -> dict[str, Any]:
    return {
        "stage": row.stage,
        "path": row.path,
        "op": row.op,
        "formula": row.formula,
        "shape": list(row.shape),
        "symbols": list(row.symbols),
        "elements": row.numel,
        "params": row.params,
        "flops": row.cost.full,
        "flops_causal": row.cost.causal,
        "flops_visible": row.cost.visible,
        "bytes": row.bytes,
        "saved_bytes": row.saved_bytes,
        "repeat": row.repeat,
        "largest": top,
        "note": row.note,
    }


def _print(traced: Traced) -> None:
    show.say(traced.title)
    show.say(", ".join(f"{name} {size}" for name, size in legend(traced.found)))
    show.say()
    _table(traced)
    for what, number, short in totals(traced):
        show.say(f"{what}: {number:,} ({short})")
    show.say(f"largest allocation: {largest(traced)}")


def _table(traced: Traced) -> None:
    """All columns where there is room for them; on a narrow terminal, short figures and no sentences."""
    found, top = traced.found, traced.found.largest
    if show.width() < 200:
        rows = [(_short(r), r.op, r.shape, *_figures(r), r.repeat, "<" if r is top else "") for r in found.rows]
        show.table(("path", "op", "shape", "params", "FLOPs", "bytes", "kept", "x", ""), rows)
        return
    names = ("stage", "path", "op", "formula", "symbols", "shape", "elements")
    numbers = ("parameters", "FLOPs", "bytes", "kept", "repeat", "", "what")
    show.table(
        (*names, *numbers),
        [
            (
                *(r.stage, r.path, r.op, r.formula, symbols(r), r.shape, r.numel, r.params or None),
                *(r.cost.full or None, r.bytes, r.saved_bytes or None, r.repeat, LARGEST if r is top else "", r.note),
            )
            for r in found.rows
        ],
    )


def _short(row: Row) -> str:
    back = {FORWARD: "", AGAIN: "~ ", BACKWARD: "< "}[row.stage]
    return back + row.path.removeprefix("decoder.").replace("blocks.", "")


def _figures(row: Row) -> tuple[str, ...]:
    return tuple(count_text(n) if n else "" for n in (row.params, row.cost.full, row.bytes, row.saved_bytes))


def _markdown(traced: Traced) -> None:
    found, top = traced.found, traced.found.largest
    show.say(f"# {traced.title}\n")
    show.say(", ".join(f"`{name}` {size}" for name, size in legend(found)) + "\n")
    columns = ("stage", "path", "op", "formula", "symbols", "shape", "params", "FLOPs", "bytes", "kept", "x", "what")
    show.say(f"| {' | '.join(columns)} |\n|{'---|' * 6}{'---:|' * 5}---|")
    for row in found.rows:
        words = (row.stage, _code(row.path), row.op, _code(row.formula), symbols(row), row.shape)
        numbers = (row.params, row.cost.full, row.bytes, row.saved_bytes, row.repeat)
        note = f"**largest** {row.note}" if row is top else row.note
        cells = (*map(str, words), *(f"{n:,}" if n else "" for n in numbers), note)
        show.say(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    show.say()
    for what, number, short in totals(traced):
        show.say(f"- {what}: {number:,} ({short})")
    show.say(f"- largest allocation: {largest(traced)}")


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _write(traced: Traced, path: Path) -> None:
    from scantling.cli.trace_page import page

    new = path.with_name(f".{path.name}.new")
    new.write_text(page(traced), encoding="utf-8")
    new.replace(path)
    click.echo(f"{traced.card.name} is in {path}", err=True)
