"""`scantling memory`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click
from click.core import ParameterSource

from scantling.assembly import assemble
from scantling.cards import Card
from scantling.cards.rules import position_limit
from scantling.checkpoint.find import card_of
from scantling.cli import show
from scantling.cli.memory_options import kept_options, step_options
from scantling.cli.memory_view import lines, moments_table, say_fit, training_lines
from scantling.numbers.fit import Fit, fit
from scantling.numbers.memory import Memory, computing, memory
from scantling.numbers.peak import training_peak
from scantling.numbers.training import Recipe, state_lines, training_memory
from scantling.parts.part import Workload
from scantling.parts.transformer import Transformer
from scantling.units import bytes_text, format_name, parse_bytes


@click.command()
@click.argument("model")
@show.workload_options()
@click.option("--fit", "given", metavar="SIZE", help="The largest batch, and the most tokens, that SIZE holds: 24GiB.")
@kept_options
@click.option("--train", is_flag=True, help="Of a training step: weights, gradients, optimizer, activations, peak.")
@step_options
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
    kept: dict[str, Any],
    train: bool,
    step: dict[str, Any],
    revision: str | None,
    as_json: bool,
) -> None:
    """Memory, line by line: of inference, or with --train of a training step. With --fit, what a given memory holds."""
    _one_kind(ctx, ("past", *kept) if train else tuple(step), train)
    card = card_of(model, revision=revision)
    room = None if given is None else parse_bytes(given)
    if train:
        form = {name: step[name] for name in ("kernel", "recompute", "packed")}
        w = show.workload(card, batch, tokens, 0, source_tokens, training=True, **form)
        names = ("precision", "optimizer", "loss", "loss_rows", "micro_batches", "main_gradients")
        recipe = Recipe(*(step[name] for name in names))
        found = _training(card, w, recipe, room, as_json)
    else:
        w = show.workload(card, batch, tokens, past, source_tokens)
        formats = {name: format_name(kept[name]) for name in ("dtype", "cache_dtype")}
        found = _inference(card, w, Kept(**kept | formats), room, as_json)
    if found is not None and not (found.batch and found.tokens):
        ctx.exit(1)


@dataclass(frozen=True)
class Kept:
    """How weights and cache are kept, as `numbers.memory.memory` takes it."""

    dtype: str
    cache_dtype: str
    page: int
    kind: str
    numbers: str

    def of(self, parts: Transformer, w: Workload) -> Memory:
        """The lines of a workload."""
        return memory(parts, w, self.dtype, self.cache_dtype, self.page, self.kind, self.numbers)

    @property
    def cache_text(self) -> str:
        """``bfloat16``, or how it differs from that."""
        return f"{self.cache_dtype if self.numbers == 'plain' else self.numbers}{_RINGS if self.kind == 'ring' else ''}"


_RINGS = ", as rings where layers read only so far"
_OPTIONS = {"kind": "cache", "numbers": "cache_numbers"}


def _one_kind(ctx: click.Context, others: tuple[str, ...], train: bool) -> None:
    """Refuse options that mean nothing here."""
    for name in others:
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = f"--{_OPTIONS.get(name, name).replace('_', '-')}"
            where = "of inference, not of training" if train else "of training: add --train"
            raise click.UsageError(f"{option} is {where}", ctx)


def _inference(card: Card, w: Workload, kept: Kept, room: int | None, as_json: bool) -> Fit | None:
    parts = assemble(card)
    m = kept.of(parts, w)
    found = None
    if room is not None:
        found = fit(lambda asked: kept.of(parts, asked).peak, w, room, position_limit(card))
    if as_json:
        show.emit(
            {
                **_about(card, w),
                "dtype": kept.dtype,
                "cache_dtype": kept.cache_dtype,
                "page": kept.page,
                "cache": kept.kind,
                "cache_numbers": kept.numbers,
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
    pages = "" if kept.page == 1 else f", in pages of {kept.page}"
    reads = "a prompt of T" if parts.decoder else "texts of T"
    rows = [
        (f"weights, {kept.dtype}", m.weights),
        (f"KV cache, {kept.cache_text}, {w.batch} x {w.keys:,} positions{pages}", m.kv),
        ("logits of every position, float32", m.logits),
        ("total: weights, cache, logits; no activations", m.total),
        (f"working space while {reads} is read (a model of it)", m.working),
        ("weights, cache and working space", m.peak),
        ("one more position of one row in the cache", m.kv_per_token),
        (f"scores of one layer, {computing(kept.dtype)}, if a kernel stores them", m.scores),
    ]
    lines(rows)
    if found is not None:
        say_fit(found, w, f"the weights take {bytes_text(m.weights)}")
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
    lines(training_lines(m, w, recipe))
    show.table(("moment, with what is held only then (a model of it)", "bytes", ""), moments_table(moments, highest))
    if found is not None:
        say_fit(found, w, f"weights, gradients and optimizer take {bytes_text(m.states)}")
    return found


def _need(parts: Transformer, recipe: Recipe) -> Callable[[Workload], int]:
    def need(w: Workload) -> int:
        return max(training_peak(parts, w, recipe, training_memory(parts, w, recipe)).values())

    return need


def _about(card: Card, w: Workload) -> dict[str, Any]:
    return {"name": card.name, "batch": w.batch, "tokens": w.tokens, "past": w.past, **show.sources(card, w)}


def _fitted(found: Fit | None) -> dict[str, Any]:
    if found is None:
        return {}
    sizes = {"bytes": found.given, "least_bytes": found.least, "batch": found.batch, "tokens": found.tokens}
    return {"fit": sizes | {"limited_by_positions": found.bound is not None}}
