"""Whether two cards describe the same function, layer by layer, and where they first do not."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec.structs import replace

from scantling.cards import Card
from scantling.cards.rules import complete
from scantling.cards.schema import Layer, LongRopeScaling, MultiHead, RoPE, Section
from scantling.checkpoint.families.gguf.rope import attention_factor, divisors_of

_ABOUT = {"name", "dtype", "training", "inference", "source", "published"}
_NOT_COMPARED = _ABOUT | {"dropout", "pattern", "attention", "position", "mlp"}
"""Keys of a card that say nothing of the function in evaluation, and those that are compared layer by layer."""


def layers(card: Card) -> list[tuple[Section, Section, Section]]:
    """Attention, position and MLP of every layer, the pattern written out."""
    unit = [layer for layer in card.pattern for _ in range(layer.times)] or [Layer()]
    every = [unit[i % len(unit)] for i in range(card.n_layers)]
    return [(x.attention or card.attention, x.position or card.position, x.mlp or card.mlp) for x in every]


def differences(one: Card, other: Card) -> list[tuple[str, Any, Any]]:
    """(key, in one, in the other) wherever two cards differ, floats as float32.

    A key of a layer's section is named once, after the first layer that differs unless all do.
    """
    here, there = dict(_facts(complete(one))), dict(_facts(complete(other)))
    found: dict[str, list[tuple[str, Any, Any]]] = {}
    for key in dict.fromkeys([*here, *there]):
        if _rounded(here.get(key)) != _rounded(there.get(key)):
            found.setdefault(key[1], []).append((key[0], here.get(key), there.get(key)))
    out = []
    for name, places in found.items():
        layer, mine, its = places[0]
        alike = not layer or (len(places) == one.n_layers and len({repr(place[1:]) for place in places}) == 1)
        out.append((name if alike else f"{name} of {layer}", mine, its))
    return out


def _facts(card: Card) -> Iterator[tuple[tuple[str, str], Any]]:
    """((layer or nothing, key), value)."""
    ends = card.norm.final if card.norm.final is not None else "out" not in card.norm.at
    plain = replace(card, norm=replace(card.norm, at=sorted(card.norm.at), final=ends))
    for name in type(card).__struct_fields__:
        if name not in _NOT_COMPARED:
            yield from ((("", key), value) for key, value in _flat(name, getattr(plain, name)))
    for i, (attention, position, mlp) in enumerate(layers(card)):
        sections = {"attention": _attention(attention), "position": _position(position, card.context), "mlp": mlp}
        for name, section in sections.items():
            yield from (((f"layer {i}", key), value) for key, value in _flat(name, section))


def _attention(attention: Section) -> Section:
    if not isinstance(attention, MultiHead):
        return attention
    assert attention.d_head is not None
    scale = attention.d_head**-0.5 if attention.scale is None else attention.scale
    return replace(attention, bias=sorted(attention.bias), scale=scale)


def _position(position: Section, context: int) -> Any:
    """As a mapping; a scaling that is one list of divisors is that list, however it is spelled."""
    if not isinstance(position, RoPE):
        return position
    found = msgspec.to_builtins(position)
    if (divisors := divisors_of(position, context)) is not None:
        return found | {"scaling": {"kind": "divisors", "of pairs": divisors}}
    if isinstance(position.scaling, LongRopeScaling):
        found["scaling"]["attention_factor"] = attention_factor(position.scaling, context)
    return found


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    value = msgspec.to_builtins(value)
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}", inner)
    elif value is not None:
        yield name, value


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    return struct.pack("<f", value) if isinstance(value, float) else value
