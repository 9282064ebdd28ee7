"""`scantling memory`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
from click.core import ParameterSource

from scantling.assembly import assemble
from scantling.cards import Card
from scantling.cards.rules import position_limit
from scantling.checkpoint.find import card_of
from scantling.cli import show
from scantling.numbers.fit import Fit, fit
from scantling.numbers.memory import computing, memory
from scantling.numbers.optimizers import OPTIMIZERS
from scantling.numbers.peak import training_peak
from scantling.numbers.training import PRECISIONS, Recipe, TrainingMemory, asked, state_lines, training_memory
from scantling.parts.part import Workload
from scantling.parts.saved import POLICIES
from scantling.parts.transformer import Transformer
from scantling.units import bytes_text, format_name, parse_bytes

INFERENCE: tuple[str, ...] = ("past", "dtype", "cache_dtype", "page")
TRAINING: tuple[str, ...] = (
    "precision",
    "optimizer",
    "recompute",
    "kernel",
    "loss",
    "loss_rows",
    "micro_batches",
    "main_gradients",
    "packed",
)


@click.command()
@click.argument("model")
@show.workload_options()
@click.option("--fit", "given", metavar="SIZE", help="The largest batch, and the most tokens, that SIZE holds: 24GiB.")
@click.option("--dtype", default="bfloat16", help="Of the weights; also q8_0, q4_0, q4_k, ...", show_default=True)
@click.option("--cache-dtype", default="bfloat16", help="Of keys and values; also q8_0, ...", show_default=True)
@click.option(
    "--page", type=click.IntRange(1, 2**30), default=1, help="Positions that a row's cache is allotted at a time."
)
@click.option("--train", is_flag=True, help="Of a training step: weights, gradients, optimizer, activations, peak.")
@click.option("--precision", type=click.Choice(list(PRECISIONS)), default="bf16-mixed", show_default=True)
@click.option("--optimizer", type=click.Choice(OPTIMIZERS), default="adamw", show_default=True)
@click.option(
    "--recompute", type=click.Choice(POLICIES), default="none", show_default=True, help="In the backward, not kept."
)
@click.option(
    "--kernel", type=click.Choice(["fused", "reference"]), default="fused", show_default=True, help="Of attention."
)
@click.option("--loss", type=click.Choice(["plain", "chunked"]), default="plain", show_default=True)
@click.option(
    "--loss-rows", type=click.IntRange(1, 2**40), help="Of a piece of the chunked loss. [default: 2^24 logits]"
)
@click.option("--micro-batches", type=click.IntRange(1, 2**40), default=1, help="Per update.", show_default=True)
@click.option(
    "--main-gradients/--no-main-gradients",
    default=None,
    help="With a master copy: gradients are summed in float32, as `train` does, or stay narrow.",
)
@click.option("--packed", is_flag=True, help="Documents share the rows, each row has its own mask.")
@show.revision_option
@show.json_option
@click.pass_context
def command(
    ctx: click.Context,
    model: str,
    batch: int,
    tokens: int | None,
    past: int,
    source_tokens: int | None,
    given: str | None,
    dtype: str,
    cache_dtype: str,
    page: int,
    train: bool,
    precision: str,
    optimizer: str,
    recompute: str,
    kernel: str,
    loss: str,
    loss_rows: int | None,
    micro_batches: int,
    main_gradients: bool | None,
    packed: bool,
    revision: str | None,
    as_json: bool,
) -> None:
    """Memory, line by line: of inference, or with --train of a training step. With --fit, what a given memory holds."""
    _one_kind(ctx, INFERENCE if train else TRAINING, train)
    card = card_of(model, revision=revision)
    room = None if given is None else parse_bytes(given)
    if train:
        more = {"training": True, "kernel": kernel, "recompute": recompute, "packed": packed}
        w = show.workload(card, batch, tokens, 0, source_tokens, **more)
        recipe = Recipe(precision, optimizer, loss, loss_rows, micro_batches, main_gradients)
        found = _training(card, w, recipe, room, as_json)
    else:
        w = show.workload(card, batch, tokens, past, source_tokens)
        found = _inference(card, w, (format_name(dtype), format_name(cache_dtype)), page, room, as_json)
    if found is not None and not (found.batch and found.tokens):
        ctx.exit(1)


def _one_kind(ctx: click.Context, others: tuple[str, ...], train: bool) -> None:
    """Refuse options that mean nothing here."""
    for name in others:
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = f"--{name.replace('_', '-')}"
            where = "of inference, not of training" if train else "of training: add --train"
            raise click.UsageError(f"{option} is {where}", ctx)


def _inference(
    card: Card, w: Workload, kinds: tuple[str, str], page: int, room: int | None, as_json: bool
) -> Fit | None:
    parts, (weights, cache) = assemble(card), kinds
    m = memory(parts, w, weights, cache, page)
    found = None
    if room is not None:
        found = fit(lambda asked: memory(parts, asked, weights, cache, page).peak, w, room, position_limit(card))
    if as_json:
        show.emit(
            {
                **_about(card, w),
                "dtype": weights,
                "cache_dtype": cache,
                "page": page,
                "weights_bytes": m.weights,
                "kv_cache_bytes_per_token": m.kv_per_token,
                "kv_cache_bytes": m.kv,
                "logits_bytes": m.logits,
                "scores_bytes": m.scores,
                "working_bytes": m.working,
                "total_bytes": m.total,
                "peak_bytes": m.peak,
                **_fitted(found),
            }
        )
        return found
    show.say(f"{card.name}, {show.sizes(card, w)}")
    show.say()
    pages = "" if page == 1 else f", in pages of {page}"
    reads = "a prompt of T" if parts.decoder else "texts of T"
    rows = [
        (f"weights, {weights}", m.weights),
        (f"KV cache, {cache}, {w.batch} x {w.keys:,} positions{pages}", m.kv),
        ("logits of every position, float32", m.logits),
        ("total: weights, cache, logits; no activations", m.total),
        (f"working space while {reads} is read (a model of it)", m.working),
        ("weights, cache and working space", m.peak),
        ("one position of one row in the cache", m.kv_per_token),
        (f"scores of one layer, {computing(weights)}, if a kernel stores them", m.scores),
    ]
    _lines(rows)
    if found is not None:
        _say_fit(found, w, f"the weights take {bytes_text(m.weights)}")
    return found


def _training(card: Card, w: Workload, recipe: Recipe, room: int | None, as_json: bool) -> Fit | None:
    parts = assemble(card)
    m = training_memory(parts, w, recipe)
    moments = training_peak(parts, w, recipe, m)
    highest = max(moments, key=moments.__getitem__)
    found = None if room is None else fit(_need(parts, recipe), w, room, position_limit(card))
    if as_json:
        show.emit(
            {
                **_about(card, w),
                "precision": recipe.precision,
                "optimizer": recipe.optimizer,
                "recompute": w.recompute,
                "kernel": w.kernel,
                "loss": recipe.loss,
                "micro_batches": recipe.micro_batches,
                "packed": w.packed,
                "weights_bytes": m.weights,
                "master_bytes": m.master,
                "gradients_bytes": sum(m.gradients.values()),
                "optimizer_bytes": sum(m.optimizer.values()),
                "activations_bytes": m.activations,
                "autocast_copies_bytes": m.copies,
                "loss_bytes": m.loss,
                "loss_gradients_bytes": m.loss_gradients,
                "logits_bytes": m.logits,
                "scores_bytes": m.scores,
                "total_bytes": m.total,
                "peak_bytes": moments[highest],
                "peak_at": highest,
                "states": state_lines(m, recipe),
                "moments": moments,
                **_fitted(found),
            }
        )
        return found
    packed = ", packed" if w.packed else ""
    how = f"{recipe.precision}, {recipe.optimizer}, {w.kernel} attention, recompute {w.recompute}, {recipe.loss} loss"
    show.say(f"{card.name}, one step of B {w.batch}, T {w.tokens:,}{packed}: {how}")
    show.say()
    _lines(_training_lines(m, w, recipe))
    show.table(("moment, with what is held only then (a model of it)", "bytes", ""), _moments(moments, highest))
    if found is not None:
        _say_fit(found, w, f"weights, gradients and optimizer take {bytes_text(m.states)}")
    return found


def _need(parts: Transformer, recipe: Recipe) -> Callable[[Workload], int]:
    def need(w: Workload) -> int:
        return max(training_peak(parts, w, recipe, training_memory(parts, w, recipe)).values())

    return need


def _training_lines(m: TrainingMemory, w: Workload, recipe: Recipe) -> list[tuple[str, int]]:
    formats = asked(w, recipe)
    kept = f"activations that autograd keeps, {formats.autocast or formats.dtype}, recompute {w.recompute}"
    inner = [
        ("  of them, the loss's log-probabilities, float32", m.loss),
        (f"  of them, copies of weights that autocast makes, {formats.autocast}", m.copies),
    ]
    beside = [
        ("logits of every position, float32, if all are held", m.logits),
        ("gradients that the chunked loss makes in the forward", m.loss_gradients),
        (f"scores of one layer, {formats.autocast or formats.dtype}, if a kernel stores them", m.scores),
    ]
    return [
        *state_lines(m, recipe).items(),
        (kept, m.activations),
        *((what, size) for what, size in inner if size),
        ("total: all of these at once", m.total),
        *((what, size) for what, size in beside if size),
    ]


def _moments(moments: dict[str, int], highest: str) -> list[tuple[str, int, str]]:
    return [
        (f"{moment}{', the peak' if moment == highest else ''}", size, bytes_text(size))
        for moment, size in moments.items()
    ]


def _about(card: Card, w: Workload) -> dict[str, Any]:
    return {"name": card.name, "batch": w.batch, "tokens": w.tokens, "past": w.past, **show.sources(card, w)}


def _lines(rows: list[tuple[str, int]]) -> None:
    show.table(("what", "bytes", ""), [(what, size, bytes_text(size)) for what, size in rows])


def _fitted(found: Fit | None) -> dict[str, Any]:
    if found is None:
        return {}
    sizes = {"bytes": found.given, "least_bytes": found.least, "batch": found.batch, "tokens": found.tokens}
    return {"fit": sizes | {"limited_by_positions": found.bound is not None}}


def _say_fit(found: Fit, w: Workload, states: str) -> None:
    """What fits, or why nothing does."""
    room = bytes_text(found.given)
    if found.least > found.given:
        show.say(f"nothing fits into {room}: one row of one token needs {bytes_text(found.least)}, of which {states}")
        return
    end = "" if found.bound is None else f", the model's {found.bound:,} positions being the limit"
    batch = f"at most B {found.batch:,}" if found.batch else "not even one row"
    tokens = f"at most T {found.tokens:,}{end}" if found.tokens else "not even one token"
    show.say(f"{room} hold, at T {w.tokens:,}, {batch}; at B {w.batch:,}, {tokens}")
