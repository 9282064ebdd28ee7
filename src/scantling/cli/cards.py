"""`scantling cards`."""

from __future__ import annotations

import click

from scantling.assembly import assemble
from scantling.cards import presets
from scantling.cli import show
from scantling.units import count_text


@click.command()
@show.json_option
def command(as_json: bool) -> None:
    """List the presets: parameters, layers, widths, heads, context, vocabulary."""
    if as_json:
        show.emit(presets())
        return
    from scantling.cards import preset
    from scantling.cards.schema import MoE

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
