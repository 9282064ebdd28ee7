"""Inverse sizing: legal cards near a number of parameters, or as large as fits into a memory."""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

from msgspec.structs import replace

from scantling.assembly import assemble
from scantling.cards import schema
from scantling.cards.rules import MAX_PARAMS, complete
from scantling.cards.schema import Card
from scantling.errors import ScantlingInputError
from scantling.numbers.memory import memory
from scantling.parts.part import Workload
from scantling.units import DTYPE_BYTES, bytes_text, count_text

Style = Literal["llama", "gpt2"]
TOLERANCE = 0.05
"""A card whose parameters are further from the target than this share of it is not offered."""
RATIO = (95, 135)
"""d / L of the front; the middle of what most published models have."""
NARROW = 30
"""The least d / L where d is below 1024."""
GROUPS = (1, 4, 8)
"""Query heads that share a KV head."""
MULTI_HEAD = 5120
"""Above this width every card of the style llama has fewer KV heads than heads."""
EXPANSIONS = (8 / 3, 3.0, 3.5, 4.0)
"""d_ff / d of gated MLPs: Llama 2, Qwen 3, Llama 3 and Gemma 2. A plain MLP has 4 d."""
TILE = 256


@dataclass(frozen=True)
class Wish:
    """What every card of the front has.

    Attributes:
        style: llama (RMSNorm, RoPE, gated, no biases) or gpt2 (LayerNorm, learned positions, plain, biases).
        vocab_size: rows of the token table.
        context: longest sequence.
        tied: the head's matrix is the token table.
        dtype: in which the weights are stored.
    """

    style: Style = "llama"
    vocab_size: int = 32000
    context: int = 4096
    tied: bool = False
    dtype: Literal["float32", "float16", "bfloat16"] = "bfloat16"


@dataclass(frozen=True)
class Shape:
    """The sizes that are looked for."""

    n_layers: int
    d_model: int
    d_head: int
    n_kv_heads: int
    d_ff: int


@dataclass(frozen=True)
class Sized:
    """A card that was assembled and counted.

    Attributes:
        params: of the assembled card.
        kv_per_token: bytes in the cache for one position of one row, in the wish's dtype.
        memory: bytes of weights and cache where a batch was asked for, else None.
    """

    card: Card
    params: int
    kv_per_token: int
    memory: int | None = None


def near(target: float, wish: Wish, most: int = 10) -> list[Sized]:
    """Cards within `TOLERANCE` of `target` parameters, the closest first; one for each depth, width and KV heads.

    Raises:
        ScantlingInputError: there is none, or the target is none.
    """
    if not 1 <= target <= MAX_PARAMS:
        raise ScantlingInputError(f"{target:g} parameters: 1 to {MAX_PARAMS:.0e} can be asked for")
    start = bisect_left(WIDTHS, target, key=lambda d: max(n for n, _, _ in _shapes(d, wish)))
    found: list[tuple[float, Shape]] = []
    for d_model in WIDTHS[max(0, start - 2) :]:
        shapes = list(_shapes(d_model, wish))
        found += [(abs(n - target), shape) for n, _, shape in shapes]
        if min(n for n, _, _ in shapes) > target * (1 + TOLERANCE):
            break
    ranked = sorted(found, key=lambda item: (item[0], _order(item[1])))
    best = _one_of_each((item for item in ranked if item[0] <= target * TOLERANCE), most)
    if not best:
        closest = _sized(ranked[0][1], wish)
        raise ScantlingInputError(
            f"no card within {TOLERANCE:.0%} of {count_text(target)} parameters with a vocabulary of "
            f"{wish.vocab_size:,}: the closest of this front has {count_text(closest.params)}"
        )
    return [_sized(shape, wish) for shape in best]


def fitting(limit: int, wish: Wish, batch: int = 1, most: int = 10) -> list[Sized]:
    """The largest cards whose weights and cache of `batch` rows of the whole context take at most `limit` bytes.

    Raises:
        ScantlingInputError: not even the smallest card fits.
    """
    size, positions = DTYPE_BYTES[wish.dtype], batch * wish.context
    end = bisect_right(WIDTHS, limit, key=lambda d: size * min(n for n, _, _ in _shapes(d, wish)))
    found: list[tuple[float, Shape]] = []
    for d_model in reversed(WIDTHS[:end]):
        shapes = list(_shapes(d_model, wish))
        found += [(-n, shape) for n, kv, shape in shapes if n * size + kv * positions <= limit]
        found.sort(key=lambda item: (item[0], _order(item[1])))
        best = _one_of_each(found, most)
        if len(best) == most and max(n for n, _, _ in shapes) < -found[most - 1][0]:
            break
    if not found:
        raise ScantlingInputError(
            f"nothing fits into {bytes_text(limit)} with {batch} x {wish.context:,} positions and a vocabulary of "
            f"{wish.vocab_size:,}: ask for more memory, a shorter context or a smaller vocabulary"
        )
    return [_sized(shape, wish, batch) for shape in best]


def _widths() -> Iterator[int]:
    """Multiples of 64 up to 1024, then of 256, in wider steps from 8192 on."""
    yield from range(128, 1024, 64)
    yield from range(1024, 8192, 256)
    yield from range(8192, 2**16 + 1, 512)


WIDTHS = tuple(_widths())
"""d_model of the front."""


def _shapes(d_model: int, wish: Wish) -> Iterator[tuple[int, int, Shape]]:
    """Every shape of one width: parameters, bytes in the cache per position, and the shape.

    Parameters are linear in layers, d_ff and KV heads, so four small assembled cards give those of all.
    """
    size = DTYPE_BYTES[wish.dtype]
    for d_head in (64, 128):
        heads = d_model // d_head
        if d_model % d_head or (d_model >= 1024 and heads % 4):
            continue
        kv_heads = _kv_heads(heads, d_model, wish)
        base = _params(Shape(0, d_model, d_head, heads, TILE), wish)
        unit = _params(Shape(1, d_model, d_head, heads, TILE), wish)
        wider = _params(Shape(1, d_model, d_head, heads, 2 * TILE), wish) - unit
        fewer = (unit - _params(Shape(1, d_model, d_head, 1, TILE), wish)) // max(1, heads - 1)
        for kv, d_ff in product(kv_heads, _d_ffs(d_model, wish)):
            layer = unit - base + wider * (d_ff // TILE - 1) - fewer * (heads - kv)
            for n_layers in _depths(d_model):
                shape = Shape(n_layers, d_model, d_head, kv, d_ff)
                yield base + n_layers * layer, 2 * n_layers * kv * d_head * size, shape


def _kv_heads(heads: int, d_model: int, wish: Wish) -> list[int]:
    """All heads' own, unless the model is wide; a KV head for 4 or 8 of them; 8 KV heads."""
    if wish.style == "gpt2":
        return [heads]
    options = {heads // group for group in GROUPS if heads % group == 0} | ({8} if heads % 8 == 0 else set())
    grouped = options - {heads}
    return sorted(grouped if grouped and d_model > MULTI_HEAD else options)


def _depths(d_model: int) -> range:
    """Layers with d / L within `RATIO`; narrow models may be deeper, as they are in practice."""
    deepest = RATIO[0] if d_model >= 1024 else NARROW
    return range(max(1, -(-d_model // RATIO[1])), d_model // deepest + 1)


def _d_ffs(d_model: int, wish: Wish) -> list[int]:
    if wish.style == "gpt2":
        return [4 * d_model]
    return sorted({TILE * max(1, round(ratio * d_model / TILE)) for ratio in EXPANSIONS})


def _order(shape: Shape) -> tuple[int, ...]:
    """What is preferred among equals: heads of 128, an MLP near the convention, eight KV heads."""
    usual = abs(shape.d_ff - 8 * shape.d_model // 3)
    return (-shape.d_head, usual, abs(shape.n_kv_heads - 8), shape.n_layers)


def _one_of_each(ranked: Iterable[tuple[float, Shape]], most: int) -> list[Shape]:
    seen: dict[tuple[int, int, int], Shape] = {}
    for _, shape in ranked:
        seen.setdefault((shape.n_layers, shape.d_model, shape.n_kv_heads * shape.d_head), shape)
        if len(seen) == most:
            break
    return list(seen.values())


def _params(shape: Shape, wish: Wish) -> int:
    return assemble(_card(shape, wish, "shape")).params


def _sized(shape: Shape, wish: Wish, batch: int | None = None) -> Sized:
    """The card of a shape, assembled and counted as a whole."""
    card = _card(shape, wish, "sized")
    model = assemble(card)
    text = count_text(model.params).replace(" ", "").lower()
    card = complete(replace(card, name=f"{wish.style}-like-{text}"))
    if batch is None:
        kept = memory(model, Workload(), wish.dtype, wish.dtype)
        return Sized(card, model.params, kept.kv_per_token)
    kept = memory(model, Workload(batch, 1, wish.context - 1), wish.dtype, wish.dtype)
    return Sized(card, model.params, kept.kv_per_token, kept.weights + kept.kv)


def _card(shape: Shape, wish: Wish, name: str) -> Card:
    heads = shape.d_model // shape.d_head
    llama = wish.style == "llama"
    attention = schema.MultiHead(
        n_heads=heads, n_kv_heads=shape.n_kv_heads, d_head=shape.d_head, bias=[] if llama else ["q", "k", "v", "o"]
    )
    mlp: schema.Gated | schema.Plain = (
        schema.Gated(act="silu", d_ff=shape.d_ff)
        if llama
        else schema.Plain(act="gelu_tanh", d_ff=shape.d_ff, bias=True)
    )
    return Card(
        name=name,
        family="decoder",
        n_layers=shape.n_layers,
        d_model=shape.d_model,
        vocab_size=wish.vocab_size,
        context=wish.context,
        attention=attention,
        position=schema.RoPE(theta=500000.0 if wish.context > 4096 else 10000.0) if llama else schema.Learned(),
        norm=schema.RMSNorm(eps=1e-5) if llama else schema.LayerNorm(eps=1e-5),
        mlp=mlp,
        tied=wish.tied,
        dtype=wish.dtype,
    )


def parse_number(text: str) -> float:
    """A number as people write it: ``1.3B``, ``350M``, ``2T``, ``1e21``.

    Raises:
        ScantlingInputError: it is none, or not above 0.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\+?\d{1,3})?) ?([kmbtp]?)", text.strip().lower().replace("_", ""))
    value = float(match[1]) * {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12, "p": 1e15}[match[2]] if match else 0.0
    if not 0 < value < math.inf:
        raise ScantlingInputError(f"{text!r} is no size: give a number above 0, with k, M, B or T, or as 1e21")
    return value
