"""Every choice that a card offers, read from the schema, and which of them a card makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec.structs import replace

from scantling.cards.rules import complete
from scantling.cards.schema import Card, Section
from scantling.errors import ScantlingInputError

NOTES = frozenset({"name", "dtype", "training", "inference", "source", "published"})
"""Keys of the card that no part of the model depends on."""


@dataclass(frozen=True)
class Choice:
    """One key, or one value of a key.

    Attributes:
        owner: the section that has the key.
        path: of the section where it first stands in a card, with the kind of each section that has kinds.
        value: the value that is chosen; None where any value other than the default is.
    """

    owner: type[Section]
    path: str
    key: str
    value: Any = None

    def __str__(self) -> str:
        where = f"{self.path}.{self.key}" if self.path else self.key
        if self.value is None:
            return where
        shown = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return f"{where}: {shown}"


def choices() -> list[Choice]:
    """All of them, in the order of the schema; a section's keys are listed where it first stands."""
    seen: set[type] = set()
    return list(_of(Card, "", seen))


def _of(owner: type[Section], path: str, seen: set[type]) -> Iterator[Choice]:
    seen.add(owner)
    for field in msgspec.structs.fields(owner):
        if owner is Card and field.name in NOTES:
            continue
        members = _members(field.type)
        optional = NoneType in members
        inner = [m for member in members for m in _members(_element(member))]
        at = f"{path}.{field.name}" if path else field.name
        sections = [m for m in inner if isinstance(m, type) and issubclass(m, Section)]
        words = [value for m in inner if get_origin(m) is Literal for value in get_args(m)]
        if sections:
            kinds = [m for m in sections if m.__struct_config__.tag is not None]
            if not kinds and (optional or get_origin(field.type) is list):
                yield Choice(owner, path, field.name)
            for section in sections:
                tag = section.__struct_config__.tag
                if tag is not None:
                    yield Choice(owner, path, f"{field.name}.kind", tag)
                if section not in seen:
                    yield from _of(section, at if tag is None else f"{at} ({tag})", seen)
        elif words:
            yield from (Choice(owner, path, field.name, word) for word in words)
        elif bool in members:
            yield from (Choice(owner, path, field.name, v) for v in (False, True) if optional or v is not field.default)
        elif not field.required:
            yield Choice(owner, path, field.name)


def _members(kind: Any) -> list[Any]:
    """The types that a value may have, annotations and unions taken apart."""
    if get_origin(kind) is Annotated:
        return _members(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [m for member in get_args(kind) for m in _members(member)]
    return [kind]


def _element(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is list else kind


def made(card: Card) -> set[Choice]:
    """The choices of a complete card: a key counts where the card would be another one without it."""
    return {choice for section, rebuilt in _sections(card, lambda same: same) for choice in _made(section, rebuilt)}


_BY_OWNER: dict[type, list[Choice]] = {}


def _made(section: Section, rebuilt: Callable[[Any], Card]) -> Iterator[Choice]:
    if not _BY_OWNER:
        for choice in choices():
            _BY_OWNER.setdefault(choice.owner, []).append(choice)
    defaults = {field.name: _default(field) for field in msgspec.structs.fields(type(section))}
    for choice in _BY_OWNER.get(type(section), []):
        key, _, kind = choice.key.partition(".")
        value = getattr(section, key)
        if kind:
            held = value if isinstance(value, list) else [value]
            chosen = any(v is not None and type(v).__struct_config__.tag == choice.value for v in held)
        elif isinstance(value, list) and choice.value is not None:
            chosen = choice.value in value
        elif choice.value is not None:
            chosen = value == choice.value
        else:
            chosen = value != defaults[key] and _matters(section, key, defaults[key], rebuilt)
        if chosen:
            yield choice


def _default(field: Any) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return None if field.default is msgspec.NODEFAULT else field.default


def _matters(section: Section, key: str, default: Any, rebuilt: Callable[[Any], Card]) -> bool:
    """Whether the card changes when the key is left out: not where the value is what follows from the others."""
    try:
        return complete(rebuilt(replace(section, **{key: default}))) != rebuilt(section)
    except ScantlingInputError:
        return True


def _sections(section: Section, rebuilt: Callable[[Any], Card]) -> Iterator[tuple[Section, Callable[[Any], Card]]]:
    """The section and all below it, each with the way to put another in its place."""
    yield section, rebuilt
    for field in msgspec.structs.fields(type(section)):
        value = getattr(section, field.name)
        if isinstance(value, Section):
            yield from _sections(value, lambda new, name=field.name: rebuilt(replace(section, **{name: new})))
        elif isinstance(value, list):
            for i, item in enumerate(value):
                if isinstance(item, Section):

                    def put(new: Any, name: str = field.name, i: int = i) -> Card:
                        items = [*getattr(section, name)]
                        return rebuilt(replace(section, **{name: [*items[:i], new, *items[i + 1 :]]}))

                    yield from _sections(item, put)
