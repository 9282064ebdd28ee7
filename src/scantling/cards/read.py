"""YAML to Card and back."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec
from ruamel.yaml import YAML
from ruamel.yaml.representer import SafeRepresenter

from scantling import strict_yaml
from scantling.cards.rules import SIDES, complete
from scantling.cards.schema import REFUSED_KINDS, Card, Layer, Side
from scantling.cards.section import Section
from scantling.cards.training import Training
from scantling.errors import ScantlingInputError, nearest
from scantling.strict_yaml import MAX_BYTES as MAX_BYTES
from scantling.strict_yaml import shown


def read_file(path: Path) -> Card:
    """Read a card file.

    Raises:
        ScantlingInputError: no such file, too large, not UTF-8, not YAML, or not a card.
    """
    return read_text(strict_yaml.file_text(path, "a card"), str(path))


def read_text(text: str, where: str) -> Card:
    """Read a card from YAML 1.2 text; `where` names it in messages."""
    return from_dict(strict_yaml.parse(text, where, "a card"), where)


def from_dict(data: Any, where: str) -> Card:
    """A card from plain mappings, checked and with all defaults filled in.

    Raises:
        ScantlingInputError: an unknown or missing key, a value of the wrong kind, or keys that contradict each other.
    """
    data = _with_patterns(data)
    _check_keys(data, Card, "", where)
    try:
        card = msgspec.convert(data, Card, strict=True)
    except msgspec.ValidationError as error:
        raise ScantlingInputError(f"{where}: {_explain(str(error), data)}") from None
    return complete(card)


@cache
def _fields(struct: Any) -> tuple[msgspec.structs.FieldInfo, ...]:
    """Of a section: msgspec evaluates their annotations at every call."""
    return msgspec.structs.fields(struct)


class _Alone(Section, frozen=True):
    training: Training


def training_of(card: Card, changes: Mapping[str, Any], where: str) -> Training:
    """The card's training section with other values at dotted keys.

    Args:
        changes: by key, such as ``optimizer.lr``.
        where: names them in messages.

    Raises:
        ScantlingInputError: an unknown key, or a value of the wrong kind.
    """
    data: dict[str, Any] = msgspec.to_builtins(card.training) if isinstance(card.training, Training) else {}
    for key, value in changes.items():
        *sections, last = key.split(".")
        inner = data
        for name in sections:
            inner = inner.setdefault(name, {})
            if not isinstance(inner, dict):
                raise ScantlingInputError(f"{where}: {shown(key)} names a key inside {name}, which is no mapping")
        inner[last] = value
    _check_keys(data, Training, "training", where)
    try:
        return msgspec.convert({"training": data}, _Alone, strict=True).training
    except msgspec.ValidationError as error:
        raise ScantlingInputError(f"{where}: {_explain(str(error), {'training': data})}") from None


def _with_patterns(data: Any) -> Any:
    """Each section of a pattern or a side laid over the card's own, where both are of one kind."""
    if not isinstance(data, Mapping):
        return data
    merged = dict(data)
    if isinstance(data.get("pattern"), list):
        merged["pattern"] = [_laid_over(data, x) if isinstance(x, Mapping) else x for x in data["pattern"]]
    for side in SIDES:
        if isinstance(data.get(side), Mapping):
            merged[side] = _laid_over(data, data[side])
    return merged


def _laid_over(card: Mapping[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """A layer's or a side's sections with the keys of the card's own under them; `cross` lies over attention."""
    merged = dict(layer)
    # The decoder's attention is laid over the card's first: cross lies on the result.
    for key, section in sorted(layer.items(), key=lambda item: item[0] == "cross"):
        base = merged.get("attention", card.get("attention")) if key == "cross" else card.get(key)
        if isinstance(section, Mapping) and isinstance(base, Mapping):
            same = section.get("kind", base.get("kind")) == base.get("kind")
            merged[key] = {**base, **section} if same else section
    return merged


def to_yaml(card: Card) -> str:
    """The card as YAML, a section a line; keys at their fixed defaults are left out."""
    lines = [f"{key}: {flow(value)}\n" for key, value in _stated(card).items()]
    if card.pattern:
        layers = ", ".join(flow(_differences(card, layer)) for layer in card.pattern)
        lines.append(f"pattern: [{layers}]\n")
    for name in SIDES:
        if (side := getattr(card, name)) is not None:
            lines.append(f"{name}: {flow(_differences(card, side))}\n")
    return "".join(lines)


def _differences(card: Card, layer: Layer | Side) -> dict[str, Any]:
    """A layer of a pattern, or a side, without what the card says already."""
    stated: dict[str, Any] = {}
    for field in _fields(type(layer)):
        key, section = field.name, getattr(layer, field.name)
        if not isinstance(section, msgspec.Struct):
            stated |= {} if section == field.default else {key: section}
            continue
        base = (layer.attention or card.attention) if isinstance(layer, Side) and key == "cross" else getattr(card, key)
        if type(section) is not type(base):
            stated[key] = _stated(section)
            continue
        kind: Any = type(section)
        fields = [field.name for field in _fields(kind)]
        pairs = {name: getattr(section, name) for name in fields if getattr(section, name) != getattr(base, name)}
        stated[key] = {k: _stated(v) if isinstance(v, msgspec.Struct) else v for k, v in pairs.items()}
    return stated


def _stated(section: msgspec.Struct) -> dict[str, Any]:
    """The section without what its fixed defaults say anyway."""
    stated: dict[str, Any] = {}
    tag = section.__struct_config__
    if tag.tag_field is not None:
        stated[tag.tag_field] = tag.tag
    for field in _fields(type(section)):
        value = getattr(section, field.name)
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        if value != default and field.name not in ("pattern", *SIDES):
            stated[field.name] = _plain(value)
    return stated


def _plain(value: Any) -> Any:
    """A value as YAML takes it."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return _stated(value) if isinstance(value, msgspec.Struct) else value


class _Representer(SafeRepresenter):
    """Quotes every text that could be misread: the library writes ``? a`` and U+0085 as they stand."""

    def represent_str(self, data: Any) -> Any:
        plain = data.isprintable() and data[:1].isalnum()
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=None if plain else '"')


_Representer.add_representer(str, _Representer.represent_str)


def flow(value: Any) -> str:
    """A value as YAML on one line."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = True
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.width = 65536
    yaml.Representer = _Representer
    out = io.StringIO()
    yaml.dump(value, out)
    return out.getvalue().removesuffix("...\n").rstrip("\n")


def _members(kind: Any) -> list[Any]:
    return [a for arg in get_args(kind) for a in _members(arg)] if get_origin(kind) in (Union, UnionType) else [kind]


def _check_keys(data: Any, struct: Any, path: str, where: str) -> None:
    """Name an unknown key together with the keys that are known there."""
    if not isinstance(data, Mapping):
        raise ScantlingInputError(
            f"{where}: {path or 'the card'} is {shown(data)}; a mapping of keys to values is needed"
        )
    tag = struct.__struct_config__.tag_field
    fields = {field.name: field.type for field in _fields(struct)}
    known = [*fields, tag] if tag else list(fields)
    for key, value in data.items():
        at = f"{path}.{key}" if path else str(key)
        if key not in known:
            raise ScantlingInputError(
                f"{where}: unknown key {shown(at)}; known here: {', '.join(known)}{nearest(str(key), known)}"
            )
        element = _element(fields.get(key))
        if element is not None and isinstance(value, list):
            for i, item in enumerate(value):
                _check_keys(item, element, f"{at}[{i}]", where)
            continue
        structs = [m for m in _members(fields.get(key)) if isinstance(m, type) and issubclass(m, msgspec.Struct)]
        words = [word for m in _members(fields.get(key)) if get_origin(m) is Literal for word in get_args(m)]
        if structs and value is not None and value not in words:
            _check_keys(value, _choose(structs, value, at, where), at, where)


def _element(kind: Any) -> Any:
    """The section that a list is made of, or None."""
    inner = get_args(kind)[0] if get_origin(kind) is list else None
    return inner if isinstance(inner, type) and issubclass(inner, msgspec.Struct) else None


def _choose(structs: list[Any], value: Any, at: str, where: str) -> Any:
    """The section that `kind` names."""
    tags = {s.__struct_config__.tag: s for s in structs if s.__struct_config__.tag}
    if not tags or not isinstance(value, Mapping):
        return structs[0]
    if "kind" not in value:
        raise ScantlingInputError(f"{where}: {at}.kind is missing; one of {', '.join(tags)}")
    kind = value["kind"]
    if not isinstance(kind, str) or kind not in tags:
        if isinstance(kind, str) and kind in REFUSED_KINDS:
            raise ScantlingInputError(
                f"{where}: {at}.kind is {shown(kind)}: {REFUSED_KINDS[kind]}; use {', '.join(tags)}"
            )
        raise ScantlingInputError(
            f"{where}: {at}.kind is {shown(kind)}; allowed: {', '.join(tags)}{nearest(str(kind), tags)}"
        )
    return tags[kind]


def _explain(message: str, data: Any) -> str:
    """msgspec's message with the value at its path, and the allowed values where there is a list of them."""
    match = re.fullmatch(r"(?s)(.*?)(?: - at `\$(.*)`)?", message)
    assert match is not None
    problem, path = match[1], (match[2] or "").lstrip(".")
    if missing := re.search(r"missing required field `(\w+)`", problem):
        at = f"{path}.{missing[1]}" if path else missing[1]
        return f"{at} is missing"
    value, kind = _at(data, path), _type_at(path)
    if allowed := _literals(kind):
        return f"{path} is {shown(value)}; allowed: {', '.join(allowed)}{nearest(str(value), allowed)}"
    if not problem.startswith("Expected"):
        return f"{path} is {shown(value)}: {problem.lower()}"
    wanted = re.sub(r"^Expected |`|, got .*$", "", problem).replace("object", "mapping").replace("array", "list")
    return f"{path} is {shown(value)}; expected {wanted}"


def _at(data: Any, path: str) -> Any:
    for name in re.findall(r"[^.\[\]]+", path):
        if isinstance(data, Mapping):
            data = data.get(name)
        elif isinstance(data, list) and name.isdigit():
            data = data[int(name)]
    return data


def _type_at(path: str) -> Any:
    kinds: list[Any] = [Card]
    for name in re.findall(r"[^.\[\]]+", path):
        if name.isdigit() or name == "...":
            kinds = [arg for kind in kinds for arg in get_args(kind)]
            continue
        structs = [k for k in kinds if isinstance(k, type) and issubclass(k, msgspec.Struct)]
        kinds = [m for s in structs for f in _fields(s) if f.name == name for m in _members(f.type)]
    return kinds


def _literals(kinds: list[Any]) -> list[str]:
    return list(dict.fromkeys(str(v) for kind in kinds if get_origin(kind) is Literal for v in get_args(kind)))
