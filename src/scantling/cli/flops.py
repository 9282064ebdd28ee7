"""`scantling flops`."""

from __future__ import annotations

from dataclasses import replace

import click

from scantling.assembly import assemble
from scantling.checkpoint.find import card_of
from scantling.cli import show
from scantling.numbers.flops import flops, recomputed
from scantling.parts.saved import POLICIES
from scantling.units import flops_text


@click.command()
@click.argument("model")
@show.workload_options()
@click.option(
    "--recompute",
    type=click.Choice(POLICIES),
    default="none",
    show_default=True,
    help="What training computes again in the backward.",
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
    """FLOPs of one pass: per component, full and causal, forward and training, the 2N / 6N rule beside them.

    2 per multiply-add, matrix products only: norms, softmax, activations and lookups are not counted.
    """
    card = card_of(model, revision=revision)
    parts = assemble(card)
    w = show.workload(card, batch, tokens, past, source_tokens)
    f = flops(parts, w)
    again = recomputed(parts, replace(w, training=True, past=0, recompute=recompute))
    if as_json:
        show.emit(
            {
                "name": card.name,
                "batch": w.batch,
                "tokens": w.tokens,
                "past": w.past,
                **show.sources(card, w),
                "forward_flops": f.forward,
                "forward_flops_causal": f.forward_visible,
                "training_flops": f.training,
                "training_flops_causal": f.training_visible,
                "training_flops_kernel": f.training_kernel,
                "recompute": recompute,
                "recomputed_flops": again,
                "training_hardware_flops": f.training + again,
                "by_part": f.by_part,
                "attention_share": f.attention_share,
                "attention_share_of_total": f.attention_share_of_total,
                "attention_share_causal": f.attention_share_visible,
                "attention_half_at_tokens": f.crossover,
                "rule_2n": f.rule_2n,
                "rule_6n": f.rule_6n,
            }
        )
        return
    n = w.batch * w.tokens
    show.say(f"{card.name}, {show.sizes(card, w)}: {flops_text(f.forward)} forward")
    show.say()
    rows = [(name, value, value // n, f"{100 * value / f.forward:.2f} %") for name, value in f.by_part.items()]
    show.table(("part (full square)", "forward FLOPs", "per token", "share"), rows)
    totals = [
        ("forward, full T x S square", f.forward, f.forward / n),
        ("forward, only visible pairs (causal, window)", f.forward_visible, f.forward_visible / n),
        ("rule 2N (N active, tables included)", f.rule_2n, f.rule_2n / n),
        ("training (forward + 2x backward), full square", f.training, f.training / n),
        ("training, only visible pairs", f.training_visible, f.training_visible / n),
        ("the same, with the scores that a fused kernel computes again", f.training_kernel, f.training_kernel / n),
        ("rule 6N", f.rule_6n, f.rule_6n / n),
    ]
    if recompute != "none":
        hardware = f.training + again
        totals.append((f"on the hardware with recompute {recompute}, full square", hardware, hardware / n))
    show.table(("convention", "FLOPs", "per token"), [(what, value, round(each)) for what, value, each in totals])
    share = f"{100 * f.attention_share:.1f} % of the blocks, {100 * f.attention_share_of_total:.1f} % of the total"
    half = f"; half of the blocks from T = {f.crossover:,}" if f.crossover else ""
    show.say(f"attention (scores and mix, full square): {share}{half}")
    show.say(f"attention (only visible pairs): {100 * f.attention_share_visible:.1f} % of the blocks")
