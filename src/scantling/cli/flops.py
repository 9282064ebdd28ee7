"""`scantling flops`."""

from __future__ import annotations

from typing import Any

import click

from scantling.assembly import assemble
from scantling.cards import Card
from scantling.cards.rules import position_limit
from scantling.checkpoint.find import card_of
from scantling.cli import show
from scantling.numbers.flops import CONVENTIONS, Flops, flops, half_at
from scantling.numbers.phases import AGAIN, Phase, phases
from scantling.parts.part import FREE, Cost, Workload
from scantling.parts.saved import POLICIES
from scantling.parts.transformer import Transformer
from scantling.units import count_text, flops_text

LENGTHS = (2048, 8192, 16384, 32768, 131072)


@click.command()
@click.argument("model")
@show.workload_options()
@click.option(
    "--recompute", type=click.Choice(POLICIES), default="none", show_default=True, help="Again in the backward pass."
)
@show.revision_option
@show.json_option
def command(
    model: str,
    batch: int,
    tokens: int | None,
    past: int,
    source_tokens: int | None,
    recompute: str,
    revision: str | None,
    as_json: bool,
) -> None:
    """FLOPs by phase and component in three named conventions, the 2N / 6N rule beside them, attention's share by T.

    2 per multiply-add, matrix products only: norms, softmax, activations and lookups are not counted.
    """
    card = card_of(model, revision=revision)
    parts = assemble(card)
    w = show.workload(card, batch, tokens, past, source_tokens, recompute=recompute)
    f, found, shares = flops(parts, w), phases(parts, w), _shares(card, parts, w)
    half = half_at(parts, w.source)
    if as_json:
        show.emit(_data(card, parts, w, f) | _more(found, shares, half))
        return
    show.say(f"{card.name}, {show.sizes(card, w)}: {flops_text(f.forward)} forward, every position's logits")
    active = f"{count_text(parts.active_params)} active of " if parts.active_params != parts.params else ""
    show.say(f"N: {active}{count_text(parts.params)} parameters; looking up a row of a table costs no FLOPs")
    show.say()
    for phase in found:
        _phase(card, phase)
    _conventions(f, w.batch * w.tokens)
    show.table(
        ("T", *(f"{name}, of the blocks" for name in CONVENTIONS), "full, of all"),
        [(row["tokens"], *(_percent(row[name]) for name in (*CONVENTIONS, "full_of_total"))) for row in shares],
        title="attention's share: scores and mix",
    )
    for name, length in half.items():
        told = f"from T = {length:,} on" if length else "at no length"
        show.say(f"scores and mix are half of the blocks {told} ({name}: {CONVENTIONS[name]})")


def _shares(card: Card, model: Transformer, w: Workload) -> list[dict[str, Any]]:
    """Attention's share at the usual lengths and the model's own, as far as there are positions for them."""
    limit = position_limit(card)
    rows = []
    for tokens in sorted({*LENGTHS, card.context}):
        if limit is None or tokens <= limit:
            f = flops(model, Workload(tokens=tokens, source=w.source))
            rows.append(
                {"tokens": tokens}
                | {name: f.share(name) for name in CONVENTIONS}
                | {"full_of_total": f.share("full", of_total=True)}
            )
    return rows


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _phase(card: Card, phase: Phase) -> None:
    w, whole = phase.work, phase.model
    rows: list[tuple[object, ...]] = [(role, *cost, _of(cost, whole)) for role, cost in phase.by_part.items()]
    rows.append((_MODEL[phase.name], *whole, _of(whole, whole)))
    if phase.again:
        rows += [(what, *cost, _of(cost, whole)) for what, cost in phase.again.items()]
        rows.append(("hardware FLOPs: all of it", *phase.hardware, _of(phase.hardware, whole)))
    title = f"{phase.name}: {show.sizes(card, w)}{_TOLD[phase.name]}"
    show.table(("part", *CONVENTIONS, "share (full)"), rows, title=title)


_TOLD = {
    "forward": "",
    "prefill": ", logits of the last position",
    "decode": ", one new token per row",
    "training": ", forward and backward",
}
_MODEL = dict.fromkeys(_TOLD, "all") | {"training": "model FLOPs: 3 x forward"}


def _of(cost: Cost, whole: Cost) -> str:
    return f"{100 * cost.full / whole.full:.2f} %" if whole.full else ""


def _conventions(f: Flops, n: int) -> None:
    costs = (f.cost, f.cost.scaled(3))
    rows = [
        (f"{what}, {name}", getattr(cost, name), round(getattr(cost, name) / n), said)
        for what, cost in zip(("forward", "training"), costs, strict=True)
        for name, said in CONVENTIONS.items()
    ]
    said = "N active parameters, looked-up tables included"
    rows[3:3] = [("forward, rule 2N", f.rule_2n, round(f.rule_2n / n), said)]
    rows += [("training, rule 6N", f.rule_6n, round(f.rule_6n / n), said)]
    show.table(("convention", "FLOPs", "per token", "what is counted"), rows, title="every position's logits")


def _data(card: Card, parts: Transformer, w: Workload, f: Flops) -> dict[str, Any]:
    return {
        "name": card.name,
        "batch": w.batch,
        "tokens": w.tokens,
        "past": w.past,
        **show.sources(card, w),
        "forward_flops": f.forward,
        "forward_flops_causal": f.forward_causal,
        "forward_flops_visible": f.forward_visible,
        "training_flops": f.training,
        "training_flops_causal": f.training_causal,
        "training_flops_visible": f.training_visible,
        "by_part": f.by_part,
        "attention_share": f.attention_share,
        "attention_share_of_total": f.attention_share_of_total,
        "attention_share_causal": f.share("causal"),
        "attention_share_visible": f.attention_share_visible,
        "rule_2n": f.rule_2n,
        "rule_6n": f.rule_6n,
        "total_params": parts.params,
        "active_params": parts.active_params,
        "lookup_flops": 0,
    }


def _more(found: list[Phase], shares: list[dict[str, Any]], half: dict[str, int | None]) -> dict[str, Any]:
    training = next((phase for phase in found if phase.name == "training"), None)
    hardware: dict[str, Any] = {}
    if training is not None:
        policy = training.again.get(AGAIN.format(training.work.recompute), FREE)
        hardware["recompute"] = training.work.recompute
        hardware["recomputed_flops"] = policy.full
        hardware["training_hardware_flops"] = training.hardware.full
    return {
        **hardware,
        "attention_half_at_tokens": half["full"],
        "attention_half_at_tokens_by_convention": half,
        "attention_share_by_tokens": shares,
        "phases": [
            {
                "phase": phase.name,
                "batch": phase.work.batch,
                "tokens": phase.work.tokens,
                "past": phase.work.past,
                **({"recompute": phase.work.recompute} if phase.name == "training" else {}),
                "by_part": {role: cost._asdict() for role, cost in phase.by_part.items()},
                "model_flops": phase.model._asdict(),
                "computed_again": {what: cost._asdict() for what, cost in phase.again.items()},
                "hardware_flops": phase.hardware._asdict(),
            }
            for phase in found
        ],
    }
