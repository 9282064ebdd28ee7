"""`scantling cards`."""

from __future__ import annotations

import click

from scantling.assembly import assemble
from scantling.cards import ladder, preset, presets
from scantling.cards.schema import MoE
from scantling.cli import show
from scantling.units import count_text


@click.command()
@click.option("--ladder", "only_ladder", is_flag=True, help="The small cards that change one choice at a time.")
@show.json_option
def command(only_ladder: bool, as_json: bool) -> None:
    """List the presets: parameters, layers, widths, heads, context, vocabulary."""
    if as_json:
        show.emit(ladder() if only_ladder else presets())
        return
    if only_ladder:
        cards = [preset(name) for name in ladder()]
        rungs = [(card.name, count_text(assemble(card).params), card.source) for card in cards]
        lines = [(name, n, source.note or "", source.config) for name, n, source in rungs if source]
        show.table(("name", "N", "what is new", "source"), lines)
        return
    rows = []
    for name in presets():
        card = preset(name)
        model = assemble(card)
        mlp = card.mlp
        d_ff = f"{mlp.expert.d_ff} x{mlp.n_experts}" if isinstance(mlp, MoE) else mlp.d_ff
        total, active = model.params, model.active_params
        n = count_text(total) if active == total else f"{count_text(total)} / {count_text(active)}"
        kv_heads = getattr(card.attention, "n_kv_heads", "latent")
        layers = "+".join(str(len(stack.blocks)) for stack in model.stacks.values())
        heads = (layers if len(model.stacks) > 1 else card.n_layers, card.d_model, card.attention.n_heads, kv_heads)
        rows.append((name, n, *heads, d_ff, card.context, card.vocab_size))
    show.table(("name", "N (total / active)", "L", "d", "H", "H_kv", "d_ff", "context", "V"), rows)
