"""A card with the sizes that its tensors show in place of those that its config says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from scantling.cards import Card
from scantling.cards.read import from_dict
from scantling.cards.schema import MultiHead
from scantling.checkpoint.inspect.facts import Facts
from scantling.errors import ScantlingInputError

MULTIPLES = (8, 16, 32, 64, 128, 256, 512, 1024)
"""That tables of tokens are padded to."""

Sections = dict[str, Any]


def corrected(card: Card, shown: Facts, differing: frozenset[str]) -> Card | None:
    """The card with the facts `differing` as the tensors show them; None where that is no card.

    What the tensors do not show stays as the config says. The number of heads is kept where the width of all queries
    is another, so the size of a head gives way.
    """
    data = _plain(card)
    try:
        for key, change in _CHANGES.items():
            if key in differing and shown.value(key) is not None:
                change(data, shown, card)
        return from_dict(data, f"the card of {card.name}")
    except (ScantlingInputError, _Cannot):
        return None


class _Cannot(Exception):
    """A value that no card can have."""


def padding(tokens: int, rows: int) -> int | None:
    """The least usual multiple to which `tokens` are padded where the table has `rows`."""
    return next((m for m in MULTIPLES if -(-tokens // m) * m == rows), None) if rows > tokens else None


def _plain(card: Card) -> Sections:
    data: Sections = msgspec.to_builtins(card)
    return data


def _number(shown: Facts, key: str) -> int:
    value = shown.value(key)
    if type(value) is not int:
        raise _Cannot(key)
    return value


def _layers(data: Sections, shown: Facts, card: Card) -> None:
    value = shown.value("layers")
    both = value.split(" + ") if isinstance(value, str) else [value]
    data["n_layers"] = int(str(both[0]))
    if len(both) > 1:
        data["decoder"] = (data.get("decoder") or {}) | {"n_layers": int(str(both[1]))}


def _width(data: Sections, shown: Facts, card: Card) -> None:
    data["d_model"] = _number(shown, "d_model")


def _rows(data: Sections, shown: Facts, card: Card) -> None:
    rows, tokens = _number(shown, "rows"), card.vocab_size
    multiple = padding(tokens, rows)
    data["embedding"]["vocab_multiple"] = multiple or 1
    data["vocab_size"] = tokens if multiple else rows


def _queries(data: Sections, shown: Facts, card: Card) -> None:
    q_width = _number(shown, "q_width")
    for section in _sections(data, "attention"):
        heads, d_head, known = section["n_heads"], section["d_head"], shown.value("d_head")
        if type(known) is int:
            heads, d_head = q_width // known, known
        elif q_width % heads == 0:
            d_head = q_width // heads
        elif q_width % d_head == 0:
            heads = q_width // d_head
        else:
            raise _Cannot("q_width")
        for position in (data["position"], *(layer.get("position") or {} for layer in data["pattern"])):
            if position.get("d_rotary") == section["d_head"]:
                position["d_rotary"] = d_head
        section |= {"n_heads": heads, "d_head": d_head}


def _keys(data: Sections, shown: Facts, card: Card) -> None:
    kv_width = _number(shown, "kv_width")
    for section in _sections(data, "attention"):
        if kv_width % section["d_head"]:
            raise _Cannot("kv_width")
        section["n_kv_heads"] = kv_width // section["d_head"]


def _feed_forward(data: Sections, shown: Facts, card: Card) -> None:
    for section in _sections(data, "mlp"):
        if section["kind"] != "moe":
            section["d_ff"] = _number(shown, "d_ff")


def _experts(key: str, change: Callable[[Sections, int], None]) -> Callable[[Sections, Facts, Card], None]:
    def apply(data: Sections, shown: Facts, card: Card) -> None:
        for section in _sections(data, "mlp"):
            if section["kind"] == "moe":
                change(section, _number(shown, key))

    return apply


def _biases(data: Sections, shown: Facts, card: Card) -> None:
    for section in _sections(data, "attention"):
        section["bias"] = [p for p in str(shown.value("bias")).split() if p in "qkvo"]


def _mlp_bias(data: Sections, shown: Facts, card: Card) -> None:
    for section in _sections(data, "mlp"):
        if section["kind"] != "moe":
            section["bias"] = shown.value("mlp_bias")


def _latent(data: Sections, shown: Facts, card: Card) -> None:
    keys = {"heads": "n_heads", **{key: key for key in ("kv_rank", "q_rank", "d_nope", "d_rope", "d_value")}}
    for section in _sections(data, "attention"):
        for key, ours in keys.items():
            value = shown.value(key)
            if value is None or section["kind"] != "latent":
                raise _Cannot(key)
            section[ours] = None if value == "none" else value
        data["position"]["d_rotary"] = section["d_rope"]


def _labels(data: Sections, shown: Facts, card: Card) -> None:
    data["head"]["n_labels"] = _number(shown, "n_labels")


def _qk_norm(data: Sections, shown: Facts, card: Card) -> None:
    if shown.value("qk_norm") != "none" or not isinstance(card.attention, MultiHead):
        raise _Cannot("qk_norm")
    for section in _sections(data, "attention"):
        section["qk_norm"] = None


def _tied(data: Sections, shown: Facts, card: Card) -> None:
    if card.family == "encoder-decoder":
        if shown.value("tied"):
            # A tied head of T5 scales the stream, by what no tensor tells.
            raise _Cannot("tied")
        data["head"]["scale"] = None
    data["tied"] = shown.value("tied")


def _positions(data: Sections, shown: Facts, card: Card) -> None:
    rows = _number(shown, "position_rows")
    if data["position"]["kind"] == "relative":
        data["position"]["buckets"] = rows
    else:
        data["context"] = rows - data["position"].get("offset", 0)


def _sections(data: Sections, key: str) -> Iterator[Sections]:
    """The card's own section and those of its layers and sides, each to be changed in place."""
    yield data[key]
    for place in (*data["pattern"], data.get("encoder"), data.get("decoder")):
        if place and place.get(key):
            yield place[key]
        if place and key == "attention" and place.get("cross"):
            yield place["cross"]


_CHANGES: dict[str, Callable[[Sections, Facts, Card], None]] = {
    "layers": _layers,
    "d_model": _width,
    "rows": _rows,
    "q_width": _queries,
    "d_head": _queries,
    "kv_width": _keys,
    "kv_heads": _keys,
    **dict.fromkeys(("d_nope", "d_rope", "d_value", "kv_rank", "q_rank"), _latent),
    "n_labels": _labels,
    "d_ff": _feed_forward,
    "experts": _experts("experts", lambda section, n: section.update(n_experts=n)),
    "d_expert": _experts("d_expert", lambda section, n: section["expert"].update(d_ff=n)),
    "bias": _biases,
    "mlp_bias": _mlp_bias,
    "qk_norm": _qk_norm,
    "tied": _tied,
    "position_rows": _positions,
}
"""By fact; widths before what they are divided into."""
