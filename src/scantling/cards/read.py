"""YAML to Card and back."""

from __future__ import annotations

import io
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec
from ruamel.yaml import YAML
from ruamel.yaml.constructor import ConstructorError, SafeConstructor
from ruamel.yaml.error import YAMLError
from ruamel.yaml.events import AliasEvent, CollectionStartEvent, DocumentStartEvent, ScalarEvent
from ruamel.yaml.representer import SafeRepresenter

from scantling.cards.rules import SIDES, complete, shown
from scantling.cards.schema import REFUSED_KINDS, Card, Layer, Side
from scantling.errors import ScantlingInputError, nearest

MAX_BYTES = 256 * 1024
MAX_DEPTH = 32
MAX_VALUES = 10_000
MAX_SCALAR = 2048


def read_file(path: Path) -> Card:
    """Read a card file.

    Raises:
        ScantlingInputError: no such file, too large, not UTF-8, not YAML, or not a card.
    """
    try:
        info = path.stat()
        if info.st_size > MAX_BYTES:
            raise ScantlingInputError(f"{path}: {info.st_size} bytes; a card has at most {MAX_BYTES}")
        # Asked before opening: opening a pipe would wait for its writer.
        if not stat.S_ISREG(info.st_mode):
            raise ScantlingInputError(f"{path}: not a regular file; a card is a YAML text file")
        text = path.read_text(encoding="utf-8")
    except ScantlingInputError:
        raise
    except UnicodeDecodeError as error:
        raise ScantlingInputError(f"{path}: not UTF-8 at byte {error.start}; a card is a YAML text file") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ScantlingInputError(f"{path}: cannot be read: {reason}") from None
    return read_text(text, str(path))


def read_text(text: str, where: str) -> Card:
    """Read a card from YAML 1.2 text; `where` names it in messages."""
    return from_dict(_parse(text, where), where)


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
    lines = [f"{key}: {_flow(value)}\n" for key, value in _stated(card).items()]
    if card.pattern:
        layers = ", ".join(_flow(_differences(card, layer)) for layer in card.pattern)
        lines.append(f"pattern: [{layers}]\n")
    for name in SIDES:
        if (side := getattr(card, name)) is not None:
            lines.append(f"{name}: {_flow(_differences(card, side))}\n")
    return "".join(lines)


def _differences(card: Card, layer: Layer | Side) -> dict[str, Any]:
    """A layer of a pattern, or a side, without what the card says already."""
    stated: dict[str, Any] = {}
    for field in msgspec.structs.fields(layer):
        key, section = field.name, getattr(layer, field.name)
        if not isinstance(section, msgspec.Struct):
            stated |= {} if section == field.default else {key: section}
            continue
        base = (layer.attention or card.attention) if isinstance(layer, Side) and key == "cross" else getattr(card, key)
        if type(section) is not type(base):
            stated[key] = _stated(section)
            continue
        fields = [field.name for field in msgspec.structs.fields(section)]
        pairs = {name: getattr(section, name) for name in fields if getattr(section, name) != getattr(base, name)}
        stated[key] = {k: _stated(v) if isinstance(v, msgspec.Struct) else v for k, v in pairs.items()}
    return stated


def _stated(section: msgspec.Struct) -> dict[str, Any]:
    """The section without what its fixed defaults say anyway."""
    stated: dict[str, Any] = {}
    tag = section.__struct_config__
    if tag.tag_field is not None:
        stated[tag.tag_field] = tag.tag
    for field in msgspec.structs.fields(section):
        value = getattr(section, field.name)
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        if value != default and field.name not in ("pattern", *SIDES):
            stated[field.name] = _stated(value) if isinstance(value, msgspec.Struct) else value
    return stated


class _Representer(SafeRepresenter):
    """Quotes every text that could be misread: the library writes ``? a`` and U+0085 as they stand."""

    def represent_str(self, data: Any) -> Any:
        plain = data.isprintable() and data[:1].isalnum()
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=None if plain else '"')


_Representer.add_representer(str, _Representer.represent_str)


def _flow(value: Any) -> str:
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = True
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.width = 65536
    yaml.Representer = _Representer
    out = io.StringIO()
    yaml.dump(value, out)
    return out.getvalue().removesuffix("...\n").rstrip("\n")


class _Constructor(SafeConstructor):
    """Says where a value stands that looks like a number or date and is none."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, ArithmeticError) as error:
            raise ConstructorError(None, None, str(error), node.start_mark) from None


def _parse(text: str, where: str) -> Any:
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise ScantlingInputError(f"{where}: longer than {MAX_BYTES} bytes, the limit of a card")
    try:
        _check_events(text, where)
        yaml = YAML(typ="safe", pure=True)
        yaml.Constructor = _Constructor
        return yaml.load(text)
    except YAMLError as error:
        raise ScantlingInputError(f"{where}: not valid YAML{_line(error, text)}: {_problem(error)}") from None
    except RecursionError as error:
        raise ScantlingInputError(f"{where}: not valid YAML: {error}") from None


def _line(error: YAMLError, text: str) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark:
        return f" at line {mark.line + 1}, column {mark.column + 1}"
    position = getattr(error, "position", None)
    return "" if position is None else f" at line {text.count(chr(10), 0, position) + 1}"


def _problem(error: YAMLError) -> str:
    text = getattr(error, "problem", None) or str(error)
    return text.splitlines()[0][:200]


def _check_events(text: str, where: str) -> None:
    """Refuse aliases, tags, other dialects, deep nesting and sheer numbers before anything is built from them."""
    depth = 0
    for n, event in enumerate(YAML(typ="safe", pure=True).parse(text)):
        line = event.start_mark.line + 1
        if n > MAX_VALUES:
            raise ScantlingInputError(f"{where}: line {line} goes on past {MAX_VALUES} keys and values")
        if isinstance(event, DocumentStartEvent) and (event.tags or event.version not in (None, (1, 2))):
            raise ScantlingInputError(f"{where}: line {line} follows a directive; a card is plain YAML 1.2")
        if isinstance(event, AliasEvent) or getattr(event, "anchor", None):
            raise ScantlingInputError(f"{where}: line {line} uses an anchor or alias; write the value out")
        if isinstance(event, ScalarEvent | CollectionStartEvent) and event.tag:
            raise ScantlingInputError(
                f"{where}: line {line} uses the tag {shown(event.tag)}; a card has plain values only"
            )
        if isinstance(event, ScalarEvent) and event.implicit[0] and event.value == "<<":
            raise ScantlingInputError(f"{where}: line {line} uses the merge key <<; write the keys out")
        if isinstance(event, ScalarEvent) and len(event.value) > MAX_SCALAR:
            raise ScantlingInputError(f"{where}: line {line} has a value of more than {MAX_SCALAR} characters")
        depth += isinstance(event, CollectionStartEvent)
        if depth > MAX_DEPTH:
            raise ScantlingInputError(f"{where}: line {line} is nested deeper than {MAX_DEPTH} levels")
        depth -= type(event).__name__ in ("MappingEndEvent", "SequenceEndEvent")


def _field_type(struct: type, name: str) -> Any:
    return next(f.type for f in msgspec.structs.fields(struct) if f.name == name)


def _members(kind: Any) -> list[Any]:
    return [a for arg in get_args(kind) for a in _members(arg)] if get_origin(kind) in (Union, UnionType) else [kind]


def _check_keys(data: Any, struct: Any, path: str, where: str) -> None:
    """Name an unknown key together with the keys that are known there."""
    if not isinstance(data, Mapping):
        raise ScantlingInputError(
            f"{where}: {path or 'the card'} is {shown(data)}; a mapping of keys to values is needed"
        )
    tag = struct.__struct_config__.tag_field
    fields = {field.name: field.type for field in msgspec.structs.fields(struct)}
    known = [*fields, tag] if tag else list(fields)
    for key, value in data.items():
        at = f"{path}.{key}" if path else str(key)
        if key not in known:
            raise ScantlingInputError(
                f"{where}: unknown key {shown(at)}; known here: {', '.join(known)}{nearest(str(key), known)}"
            )
        if fields.get(key) == list[Layer] and isinstance(value, list):
            for i, layer in enumerate(value):
                _check_keys(layer, Layer, f"{at}[{i}]", where)
            continue
        structs = [m for m in _members(fields.get(key)) if isinstance(m, type) and issubclass(m, msgspec.Struct)]
        if structs and value is not None:
            _check_keys(value, _choose(structs, value, at, where), at, where)


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
        kinds = [m for s in structs for f in msgspec.structs.fields(s) if f.name == name for m in _members(f.type)]
    return kinds


def _literals(kinds: list[Any]) -> list[str]:
    return list(dict.fromkeys(str(v) for kind in kinds if get_origin(kind) is Literal for v in get_args(kind)))
