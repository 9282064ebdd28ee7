"""RoPE in a config.json: old spelling (rope_theta, rope_scaling), new spelling (rope_parameters), and every scaling."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from scantling.checkpoint.config_keys import Keys, near
from scantling.checkpoint.files import shown
from scantling.errors import ScantlingInputError

_OLD_NAMES = {"su": "longrope"}
_MOST = 2**32
"""More than any length or width that a card may have, and still a float."""


def rope(
    keys: Keys,
    d_head: int,
    context: int,
    *,
    fraction: float | None = None,
    theta: float = 10000.0,
    spelled: Mapping[str, str] | None = None,
    trained: int | None = None,
) -> dict[str, Any]:
    """The card's position section.

    Args:
        d_head: channels of a head.
        context: max_position_embeddings, the trained length where a scaling does not say another.
        fraction: of the channels that are turned, where the config does not say; None for a family that turns all of
            them: its original passes over partial_rotary_factor, so a config that asks for a part is refused.
        theta: the base, where the config does not say.
        spelled: old keys of this family's own, by the new name of what they say. Where no mapping says it, they decide,
            with their default where they are missing: the originals pass over the new name beside the mappings.
        trained: original_max_position_embeddings beside the mappings, where the config does not say.

    Raises:
        ScantlingInputError: the spellings contradict each other, or a scaling is unknown or incomplete.
    """
    old, new = _mapping(keys, "rope_scaling"), _mapping(keys, "rope_parameters")
    usual = {"rope_theta": theta, "partial_rotary_factor": fraction}
    own = {
        name: keys.raw(key, None if name in old or name in new else usual[name])
        for name, key in (spelled or {}).items()
    }
    beside = {name: keys.raw(name) for name in ("rope_theta", "partial_rotary_factor")}
    beside["original_max_position_embeddings"] = keys.raw("original_max_position_embeddings", trained)
    return section(keys.where, _agreeing(keys, [beside, own, old, new]), d_head, context, fraction, theta)


def by_layer_type(
    keys: Keys, d_head: int, context: int, bases: Mapping[str, tuple[str, float]], scaled: str
) -> dict[str, dict[str, Any]]:
    """The position section of each layer type, for models whose layer types turn differently (Gemma 3, ModernBERT).

    Args:
        bases: by layer type, the key of its base in the old spelling, and the base where the config does not say.
        scaled: the layer type that rope_scaling of the old spelling is about.

    Raises:
        ScantlingInputError: as for `rope`, or a layer type that the model does not have.
    """
    old, new = _mapping(keys, "rope_scaling"), _mapping(keys, "rope_parameters")
    if unknown := [name for name in new if name not in bases]:
        known = ", ".join(bases)
        raise ScantlingInputError(f"{keys.where}: rope_parameters has {shown(unknown[0])}; known: {known}")
    found = {}
    for kind, (base, theta) in bases.items():
        spellings = [
            {"rope_theta": keys.raw(base)},
            old if kind == scaled else {},
            _mapping(Keys(new, keys.where), kind),
        ]
        found[kind] = section(keys.where, _agreeing(keys, spellings), d_head, context, theta=theta)
    return found


def reach(position: Mapping[str, Any], context: int) -> int:
    """The longest sequence of a model with this position section: dynamic scaling starts where the context ends."""
    scaling = position.get("scaling", {})
    if scaling.get("kind") != "dynamic":
        return context
    # What is larger is left to the card to refuse.
    return int(min(min(context, 2 * _MOST) * scaling["factor"], 2 * _MOST))


def section(
    where: str,
    values: Mapping[str, Any],
    d_head: int,
    context: int,
    fraction: float | None = None,
    theta: float = 10000.0,
) -> dict[str, Any]:
    """The same from one mapping in the new spelling, such as the one of a layer type."""
    named = _RopeKeys(dict(values), where)
    trained_length = named.size("original_max_position_embeddings", context)
    kind = named.raw("rope_type", "default")
    if kind == "dynamic":
        # Its original starts to stretch where the context ends, whatever else the config says.
        named.only("original_max_position_embeddings", context)
    if fraction is None:
        named.only("partial_rotary_factor", 1.0, 1)
    share = named.number("partial_rotary_factor", 1.0 if fraction is None else fraction)
    if not 0 < share <= 1:
        right = "a number above 0 and at most 1 is needed"
        raise ScantlingInputError(f"{where}: partial_rotary_factor is {share}; {right}")
    found: dict[str, Any] = {
        "kind": "rope",
        "theta": named.number("rope_theta", theta),
        "d_rotary": int(min(d_head, _MOST) * share),
    }
    if kind != "default":
        found["scaling"] = {"kind": kind, **_reader(kind, where)(named, trained_length)}
    named.finish(frozenset())
    return found


class _RopeKeys(Keys):
    """The keys of one RoPE mapping."""

    def finish(self, irrelevant: frozenset[str]) -> None:
        if left := sorted(set(self.data) - self._taken - irrelevant):
            scaling = self.raw("rope_type", "default")
            kind = "without a scaling" if scaling == "default" else f"by the scaling {shown(scaling)}"
            hint = near(left[0], self._taken)
            raise ScantlingInputError(f"{self.where}: RoPE key {shown(left[0])} is not supported {kind}{hint}")


def _linear(keys: Keys, trained_length: int) -> dict[str, Any]:
    return {"factor": keys.number("factor")}


def _dynamic(keys: Keys, trained_length: int) -> dict[str, Any]:
    return {"factor": keys.number("factor"), "trained_length": trained_length}


def _yarn(keys: Keys, trained_length: int) -> dict[str, Any]:
    found: dict[str, Any] = {"factor": keys.number("factor"), "trained_length": trained_length}
    for name, usual in (("beta_fast", 32.0), ("beta_slow", 1.0)):
        found[name] = keys.number(name, usual)
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
        if keys.raw(name) is not None:
            found[name] = keys.number(name)
    return {**found, "truncate": keys.flag("truncate", True)}


def _llama3(keys: Keys, trained_length: int) -> dict[str, Any]:
    numbers = {name: keys.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor")}
    return {**numbers, "trained_length": trained_length}


def _longrope(keys: Keys, trained_length: int) -> dict[str, Any]:
    found: dict[str, Any] = {"trained_length": trained_length}
    for name in ("short_factor", "long_factor"):
        values = keys.raw(name)
        if not isinstance(values, list):
            raise ScantlingInputError(f"{keys.where}: {name} is {shown(values)}; a list of numbers is needed")
        found[name] = [Keys({name: v}, keys.where).number(name) for v in values]
    if keys.raw("attention_factor") is not None:
        found["attention_factor"] = keys.number("attention_factor")
    elif keys.raw("factor") is not None and trained_length > 1:
        # Instead of the context over the trained length.
        factor = keys.number("factor")
        found["attention_factor"] = math.sqrt(1 + math.log(factor) / math.log(trained_length)) if factor > 1 else 1.0
    keys.raw("factor")
    return found


_READERS: dict[str, Callable[[Keys, int], dict[str, Any]]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}


def _reader(kind: Any, where: str) -> Callable[[Keys, int], dict[str, Any]]:
    if not isinstance(kind, str) or kind not in _READERS:
        known = ", ".join(["default", *_READERS])
        nearest = near(kind, _READERS)
        raise ScantlingInputError(f"{where}: RoPE scaling {shown(kind)} is not supported; known: {known}{nearest}")
    return _READERS[kind]


def _agreeing(keys: Keys, spellings: list[Mapping[str, Any]]) -> dict[str, Any]:
    """All that the spellings say, once; `type` is the old name of `rope_type`."""
    merged: dict[str, Any] = {}
    for spelling in spellings:
        for name, value in spelling.items():
            if value is None:
                continue
            if name == "rope_theta":
                Keys(spelling, keys.where).number(name)
            new_name = "rope_type" if name == "type" else name
            new_value = _OLD_NAMES.get(value, value) if new_name == "rope_type" and isinstance(value, str) else value
            if merged.setdefault(new_name, new_value) != new_value:
                both = f"{shown(merged[new_name])} and {shown(new_value)}"
                raise ScantlingInputError(f"{keys.where}: RoPE's {new_name} is {both}; they must agree")
    return merged


def _mapping(keys: Keys, name: str) -> Mapping[str, Any]:
    value = keys.raw(name, {})
    if not isinstance(value, Mapping):
        raise ScantlingInputError(f"{keys.where}: {name} is {shown(value)}; a mapping is needed")
    return value
