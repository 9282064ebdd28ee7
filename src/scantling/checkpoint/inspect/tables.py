"""Every family's table of names, read without a card: roles by names with holes where their numbers stand."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from typing import Any

from scantling.cards import Card
from scantling.cards.read import from_dict
from scantling.checkpoint.families import FAMILIES
from scantling.checkpoint.families.gguf import ARCHITECTURES
from scantling.checkpoint.families.gguf.bert import BERT
from scantling.checkpoint.names import Row, Transform

HOLE = "{}"
_NUMBER = re.compile(r"(?<![^.])([0-9]{1,9})(?![^.])")
_NUMBER_AFTER_DOT = re.compile(r"\.([0-9]{1,9})(?![^.\n])")


@dataclass(frozen=True)
class Role:
    """What a tensor is by a table of names.

    Attributes:
        ours: our names, the layer as ``{i}``; several where one tensor holds them all.
        indices: of the holes of the foreign name in order: ``i``, ``e``, or a number that must stand there.
    """

    ours: tuple[str, ...]
    transform: Transform
    indices: tuple[str | int, ...]


@dataclass(frozen=True)
class Naming:
    """The names of one or several families that use the same ones.

    Attributes:
        families: model types, or architectures of GGUF.
        gguf: whether they are names of GGUF files.
        rows: their table of names.
        ignored: patterns, without the prefix, of names that carry no weights.
    """

    families: tuple[str, ...]
    gguf: bool
    prefix: str
    rows: tuple[Row, ...]
    ignored: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()

    @cached_property
    def table(self) -> Mapping[str, tuple[Role, ...]]:
        """Roles by foreign name with holes; of two roles of one name the other names of the file decide."""
        return _table(self.rows)


Hit = tuple[str, tuple[Role, ...]]
"""A name of a table and its roles."""


def collapsed(name: str) -> tuple[str, tuple[int, ...]]:
    """A name with its numbers taken out, and those numbers.

    >>> collapsed("h.11.attn.c_attn.weight")
    ('h.{}.attn.c_attn.weight', (11,))
    """
    if "{" in name or "}" in name:
        # No name of a family has braces; with one more this cannot be another name's pattern.
        return name + "{", ()
    pieces = _NUMBER.split(name)
    return HOLE.join(pieces[::2]), tuple(map(int, pieces[1::2]))


def collapsed_names(names: Sequence[str]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The same of many names, in fewer steps."""
    # A dot before each name, so that every number follows one.
    text = "." + "\n.".join(names)
    if "{" in text or "}" in text or text.count("\n") != len(names) - 1:
        yield from map(collapsed, names)
        return
    pieces = _NUMBER_AFTER_DOT.split(text)
    numbers, at = list(map(int, pieces[1::2])), 0
    for pattern in f".{HOLE}".join(pieces[::2]).split("\n"):
        end = at + pattern.count(HOLE)
        yield pattern[1:], tuple(numbers[at:end])
        at = end


def looked_up(naming: Naming, pattern: str) -> Hit | None:
    """The name in the table and its roles."""
    plain = pattern
    for old, new in naming.renamed:
        plain = re.sub(old, new, plain)
    for full in (plain, naming.prefix + plain):
        if full in naming.table:
            return full, naming.table[full]
    return None


def promising(patterns: Collection[str], gguf: bool) -> Iterator[Naming]:
    """The tables of every family whose first one knows any of the names, once for each set that shares a table."""
    found: dict[Naming, list[str]] = {}
    for name in ARCHITECTURES if gguf else FAMILIES:
        first = _first_naming(name, gguf)
        if any(looked_up(first, pattern) for pattern in patterns):
            for naming in _namings(name, gguf):
                found.setdefault(naming, []).append(name)
    for naming, names in found.items():
        yield replace(naming, families=tuple(names))


@cache
def _namings(name: str, gguf: bool) -> tuple[Naming, ...]:
    """The different tables that a family has for different cards."""
    stacks = _stacks(name, gguf)
    return tuple(dict.fromkeys(_naming(name, gguf, card) for card in _cards(stacks)))


@cache
def _first_naming(name: str, gguf: bool) -> Naming:
    return _naming(name, gguf, _first_card(_stacks(name, gguf)))


def _stacks(name: str, gguf: bool) -> str:
    if gguf:
        return "encoder" if ARCHITECTURES[name] is BERT else "decoder"
    return FAMILIES[name].stacks


def _naming(name: str, gguf: bool, card: Card) -> Naming:
    if gguf:
        return Naming((), True, "", tuple(ARCHITECTURES[name].rows(card)))
    family = FAMILIES[name]
    other_heads = family.vocabulary_head if family.stacks == "encoder" else ()
    ignored = (*family.ignored, *other_heads)
    return Naming((), False, family.prefix, tuple(family.rows(card)), ignored, tuple(family.renamed))


Choice = tuple[str, bool, dict[str, Any], str]
"""The head's kind, whether it is tied, norms and residual, the MLP's kind: what a table of names may depend on."""


@cache
def _first_card(stacks: str) -> Card:
    return _probe(stacks, *_choices(stacks)[0])


@cache
def _cards(stacks: str) -> tuple[Card, ...]:
    return tuple(_probe(stacks, *choice) for choice in _choices(stacks))


@cache
def _choices(stacks: str) -> tuple[Choice, ...]:
    heads = ["lm"] if stacks != "encoder" else ["lm", "none", "tokens", "sequence", "replaced"]
    norm = {"kind": "layernorm", "eps": 1e-5}
    residuals: list[dict[str, Any]] = [{"norm": norm}, {"norm": {**norm, "at": ["out"]}}]
    if stacks == "decoder":
        residuals += [{"norm": norm, "residual": {"parallel": True, "shared_norm": shared}} for shared in (False, True)]
    mlps = ["plain", "gated"] if stacks == "encoder-decoder" else ["plain"]
    every = product(heads, (False, True), residuals, mlps)
    return tuple((head, tied, residual, mlp) for head, tied, residual, mlp in every if head == "lm" or not tied)


def _probe(stacks: str, head: str, tied: bool, residual: Mapping[str, Any], mlp: str) -> Card:
    """A small card that is never built."""
    sections = {"kind": head} | ({"n_labels": 2} if head in ("tokens", "sequence") else {})
    sections |= {"pool": "first"} if head == "sequence" else {}
    data = {
        "name": "probe",
        "family": stacks,
        "n_layers": 1,
        "d_model": 4,
        "vocab_size": 4,
        "context": 4,
        "attention": {"kind": "multi_head", "n_heads": 2},
        "position": {"kind": "none"},
        "mlp": {"kind": mlp, "act": "relu", "d_ff": 4},
        "head": sections,
        "tied": tied,
        **residual,
    }
    return from_dict(data, "a probe")


@cache
def _table(rows: tuple[Row, ...]) -> Mapping[str, tuple[Role, ...]]:
    table: dict[str, tuple[Role, ...]] = {}
    for row in rows:
        bases = (row.ours,) if isinstance(row.ours, str) else row.ours
        for their_suffix, suffix in row.suffixes:
            holes = [p for p in row.theirs.split(".") if p in ("{i}", "{e}") or p.isdecimal()]
            indices = tuple(int(p) if p.isdecimal() else p.strip("{}") for p in holes)
            pattern, _ = collapsed(row.theirs.replace("{i}", "0").replace("{e}", "0") + their_suffix)
            role = Role(tuple(base + suffix for base in bases), row.transform, indices)
            table[pattern] = tuple(dict.fromkeys((*table.get(pattern, ()), role)))
    return table
