"""What the same parameters cost in another shape: more or fewer heads, deep and narrow or shallow and wide."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from msgspec.structs import replace

from scantling.assembly import assemble
from scantling.cards import Card
from scantling.cards.schema import Gated, MultiHead, Plain, RoPE
from scantling.errors import ScantlingInputError
from scantling.loading import from_card
from scantling.measure.asked import Asked, rows, run
from scantling.measure.figure import Cell, Figure
from scantling.measure.split import seconds_by_heading
from scantling.measure.timing import this_device
from scantling.model import Model
from scantling.numbers.flops import flops
from scantling.numbers.hardware import Device
from scantling.parts.part import Workload

DEEPER = 4
"""A twin of so many times fewer layers has twice the width, and as many parameters in its matrices."""
TOKENS = 8
"""Of the pass whose FLOPs are counted."""


@dataclass(frozen=True)
class Twin:
    """Another shape of the card."""

    what: str
    card: Card


def shapely(card: Card) -> bool:
    """Whether the card is a plain stack whose shape can be changed in one place."""
    plain = isinstance(card.attention, MultiHead) and isinstance(card.mlp, Plain | Gated) and not card.pattern
    return plain and card.family == "decoder" and card.n_layers % DEEPER == 0 and card.n_layers > 0


def twins(card: Card) -> list[Twin]:
    """Half and twice the heads at the same widths of queries and keys, where they divide; and the shallow one."""
    attention: Any = card.attention
    heads, kv_heads, d_head = attention.n_heads, attention.n_kv_heads, attention.d_head
    made = {}
    if heads % 2 == kv_heads % 2 == 0:
        made["half the heads"] = _headed(card, heads // 2, kv_heads // 2, 2 * d_head)
    if d_head % 4 == 0:
        made["twice the heads"] = _headed(card, 2 * heads, 2 * kv_heads, d_head // 2)
    mlp: Any = card.mlp
    made[f"{DEEPER} times shallower, twice as wide"] = replace(
        _headed(card, 2 * heads, 2 * kv_heads, d_head),
        n_layers=card.n_layers // DEEPER,
        d_model=2 * card.d_model,
        mlp=replace(mlp, d_ff=2 * mlp.d_ff),
    )
    return [Twin(what, other) for what, other in made.items() if _is_legal(other)]


def _headed(card: Card, heads: int, kv_heads: int, d_head: int) -> Card:
    """The card with other heads; as many of their channels are turned as before, in proportion."""
    attention, position = card.attention, card.position
    assert isinstance(attention, MultiHead)
    if isinstance(position, RoPE) and position.d_rotary and attention.d_head:
        position = replace(position, d_rotary=position.d_rotary * d_head // attention.d_head)
    return replace(
        card,
        attention=replace(attention, n_heads=heads, n_kv_heads=kv_heads, d_head=d_head),
        position=position,
    )


def _is_legal(card: Card) -> bool:
    try:
        assemble(card)
    except ScantlingInputError:
        return False
    return True


def shape(lm: Model, asked: Asked) -> Figure:
    """Parameters and FLOPs of each shape, and the time of one token of the model and of its shallow twin."""
    device = this_device(lm)
    lines = [_row("as it is", lm, device, asked)]
    for twin in twins(lm.card):
        timed = twin.card.n_layers != lm.card.n_layers
        lines.append(_row(twin.what, _built(twin.card, lm, timed, asked.seed), device if timed else None, asked))
    columns = (
        *("shape", "layers", "width", "heads", "parameters built", "predicted"),
        *("FLOPs counted", "predicted FLOPs", "ms a token", "ms by roofline", "products in sequence"),
    )
    notes = (
        f"FLOPs: a pass of {TOKENS} tokens, full square, by torch's counter; one token: no cache, the fastest of "
        f"{asked.passes * 10} passes. Bytes and FLOPs do not see that products wait for each other; depth does",
    )
    return Figure("shape", "The same parameters in another shape", columns, tuple(lines), notes)


def _built(card: Card, lm: Model, timed: bool, seed: int) -> Model:
    if timed:
        return from_card(card, seed=seed, dtype=str(lm.dtype).removeprefix("torch."), device=str(lm.device))
    parts = assemble(card)
    return Model(card, parts, parts.build(device="meta", seed=None))


def _row(what: str, lm: Model, device: Device | None, asked: Asked) -> tuple[Cell, ...]:
    attention: Any = lm.card.attention
    dtype = str(lm.dtype).removeprefix("torch.")
    one = Workload(tokens=1, dtype=dtype)
    products = sum(step.repeat for step in lm.parts.steps(one) if step.cost.full)
    bound = None if device is None else 1e3 * sum(seconds_by_heading(lm.parts, one, device).values())
    return (
        what,
        lm.card.n_layers,
        lm.card.d_model,
        attention.n_heads,
        sum(p.numel() for p in lm.net.parameters()),
        lm.parts.params,
        _counted(lm),
        flops(lm.parts, Workload(tokens=TOKENS)).forward,
        None if device is None else 1e3 * _seconds(lm, asked),
        bound,
        products,
    )


def _counted(lm: Model) -> int:
    """FLOPs of a pass on the meta device, attention by the math kernel, which the counter sees."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    drawn = Model(lm.card, lm.parts, lm.parts.build(device="meta", seed=None))
    ids = torch.zeros(1, TOKENS, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        run(drawn, ids)
    return int(counter.get_total_flops())


def _seconds(lm: Model, asked: Asked) -> float:
    ids, taken = rows(lm, asked, 1)[:1], list[float]()
    for _ in range(10 * asked.passes):
        start = time.perf_counter()
        run(lm, ids)
        if lm.device.type != "cpu":
            torch.accelerator.synchronize()
        taken.append(time.perf_counter() - start)
    return min(taken)
