"""What practitioners would frown at in a card: plain sentences, none of them an error."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from scantling.cards.rules import SIDES, table_rows
from scantling.cards.schema import Card, Gated, MoE, MultiHead, Plain

TILE = 64
GOOD_TILE = 128
USUAL_HEADS = (64, 80, 96, 128, 256)
DEPTH = (30.0, 200.0)
"""d / L of nearly all presets: 33 (GPT-2 XL) to 171 (the big one of 2017), 100 to 130 most often."""
EXPANSION = {"gated": (8 / 3, 2.0, 8.0), "plain": (4.0, 2.0, 8.0)}
"""d_ff / d: the convention, and the range of nearly all presets (Gemma's 8 d is the widest of the gated)."""
HARDWARE = "Anthony et al., arXiv:2401.14489"


@dataclass(frozen=True)
class Remark:
    """One thing to look at.

    Attributes:
        code: a word for programs: tile, vocabulary, depth, expansion, head_size, tensor_parallel.
        key: of the card.
        message: what is unusual, and what would be usual.
        source: who says so, where somebody does.
    """

    code: str
    key: str
    message: str
    source: str | None = None


def checks(card: Card, devices: int = 8) -> list[Remark]:
    """Remarks on a card that was read (defaults filled in).

    Args:
        devices: that tensor parallelism would divide the heads among.
    """
    return [
        *_tiles(card),
        *_vocabulary(card),
        *_depth(card),
        *_expansion(card),
        *_heads(card),
        *_tensor_parallel(card, devices),
    ]


def _sections(card: Card, name: str) -> dict[str, Any]:
    """The card's own section of that name by its key, and those of layers and stacks that have another."""
    own = getattr(card, name)
    others = {f"pattern[{i}].{name}": getattr(layer, name) for i, layer in enumerate(card.pattern)}
    sides = {side: getattr(card, side) for side in SIDES if getattr(card, side) is not None}
    others |= {f"{key}.{name}": getattr(side, name) for key, side in sides.items()}
    return {name: own} | {key: section for key, section in others.items() if section not in (None, own)}


def _mlps(card: Card) -> Iterator[tuple[str, Plain | Gated, int, bool]]:
    """By the key of its width: an MLP, how many of it a token passes at once, and whether it is part of a mixture."""
    for key, section in _sections(card, "mlp").items():
        if not isinstance(section, MoE):
            yield f"{key}.d_ff", section, 1, False
            continue
        yield f"{key}.expert.d_ff", section.expert, section.top_k, True
        if section.shared is not None:
            yield f"{key}.shared.d_ff", section.shared, 1, True


def _tiles(card: Card) -> Iterator[Remark]:
    sizes = {"d_model": card.d_model, **{key: mlp.d_ff or 0 for key, mlp, *_ in _mlps(card)}}
    for key, size in sizes.items():
        if size % TILE:
            better = f"{size - size % TILE or TILE} or {size - size % TILE + TILE} would be"
            text = f"{key} {size:,} is no multiple of {TILE}, so the last tile of every product is part empty; {better}"
            yield Remark("tile", key, text, HARDWARE)
        elif size % GOOD_TILE:
            text = f"{key} {size:,} is a multiple of {TILE} and not of {GOOD_TILE}, the wider tile"
            yield Remark("tile", key, text, HARDWARE)


def _vocabulary(card: Card) -> Iterator[Remark]:
    rows = table_rows(card)
    if rows % TILE == 0:
        return
    padded = -(-rows // GOOD_TILE) * GOOD_TILE
    tables = (1 if card.embedding.shared else 2) + (card.head.kind == "lm" and not card.tied)
    more = (padded - rows) * (card.embedding.width or card.d_model) * tables
    text = (
        f"the token table has {rows:,} rows, no multiple of {TILE}; embedding.vocab_multiple {GOOD_TILE} would make it "
        f"{padded:,} for {more:,} more parameters"
    )
    yield Remark("vocabulary", "vocab_size", text, HARDWARE)


def _depth(card: Card) -> Iterator[Remark]:
    if not card.n_layers:
        return
    ratio, (low, high) = card.d_model / card.n_layers, DEPTH
    if not low <= ratio <= high:
        shape = "deep for its width" if ratio < low else "wide for its depth"
        usual = f"most published models have {low:g} to {high:g}, many 100 to 130"
        text = f"d_model / n_layers is {ratio:.4g}, {shape}: {usual}"
        yield Remark("depth", "n_layers", text)


def _expansion(card: Card) -> Iterator[Remark]:
    for key, part, times, mixed in _mlps(card):
        if mixed and times == 1:
            continue
        d_ff, kind = part.d_ff or 0, "gated" if isinstance(part, Gated) else "plain"
        usual, low, high = EXPANSION[kind]
        ratio = times * d_ff / card.d_model
        if not (0.0 if mixed else low) <= ratio <= high:
            wide = f"the {times} experts of a token are together" if times > 1 else f"{key} {d_ff:,} is"
            hint = "; d_ff is the width of one matrix, not of gate and up together" if kind == "gated" else ""
            text = f"{wide} {ratio:.4g} d_model wide; a {kind} MLP usually has {usual:.3g} d_model{hint}"
            yield Remark("expansion", key, text)


def _heads(card: Card) -> Iterator[Remark]:
    cross = {} if card.decoder is None else {"decoder.cross": card.decoder.cross}
    for key, section in (_sections(card, "attention") | cross).items():
        if not isinstance(section, MultiHead) or section.d_head in (None, *USUAL_HEADS):
            continue
        usual = ", ".join(map(str, USUAL_HEADS[:-1]))
        text = f"{key} has heads of {section.d_head}: {usual} or {USUAL_HEADS[-1]} are what kernels are made for"
        yield Remark("head_size", f"{key}.d_head", text, HARDWARE)


def _tensor_parallel(card: Card, devices: int) -> Iterator[Remark]:
    heads = card.attention.n_heads
    if heads % devices:
        text = f"{heads} heads cannot be divided equally among {devices} devices of tensor parallelism"
        yield Remark("tensor_parallel", "attention.n_heads", text)
        return
    kv_heads = getattr(card.attention, "n_kv_heads", None)
    if kv_heads is None or kv_heads % devices == 0:
        return
    if devices % kv_heads == 0:
        what = f"each is kept {devices // kv_heads} times over"
    else:
        what = "they cannot be divided equally"
    text = f"{kv_heads} KV {'head' if kv_heads == 1 else 'heads'} among {devices} devices of tensor parallelism: {what}"
    yield Remark("tensor_parallel", "attention.n_kv_heads", text)
