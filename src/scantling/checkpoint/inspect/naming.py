"""Whose names a checkpoint uses: every family's table of names, read without a card, and the one that fits a file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import product
from typing import Any

from scantling.cards import Card
from scantling.cards.read import from_dict
from scantling.checkpoint.families import FAMILIES
from scantling.checkpoint.families.gguf import ARCHITECTURES
from scantling.checkpoint.families.gguf.bert import BERT
from scantling.checkpoint.families.gguf.rope import BESIDE
from scantling.checkpoint.matching import WRAPPERS
from scantling.checkpoint.names import Row, Shape, Transform

_Hit = tuple[str, tuple["Role", ...]]
Reading = Mapping[str, tuple["Role", ...]]
_OWN = re.compile(r"(embed|target_embed|widen|encoder|decoder|head)\.")
_HOLE = "{}"
_NUMBER = re.compile(r"(?<![^.])[0-9]{1,9}(?![^.])")


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


@dataclass
class Group:
    """Tensors of one name but for their numbers.

    Attributes:
        pattern: the foreign name, numbers as ``{}``, without wrappers.
        members: shapes by those numbers.
        names: full names in the file by the same numbers.
        roles: what they are; none where no table knows them.
        ignored: they are known to carry no weights.
    """

    pattern: str
    members: dict[tuple[int, ...], Shape] = field(default_factory=dict)
    names: dict[tuple[int, ...], str] = field(default_factory=dict)
    roles: tuple[Role, ...] = ()
    ignored: bool = False


NO_LAYER = -1


@dataclass
class Held:
    """Tensors of one role, by layer; `NO_LAYER` outside the layers.

    Attributes:
        shapes: turned as ours are.
        names: in the file, several where each expert has a tensor of its own.
    """

    ours: tuple[str, ...]
    transform: Transform
    shapes: dict[int, Shape] = field(default_factory=dict)
    names: dict[int, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Named:
    """A checkpoint's tensors under the table that fits them best.

    Attributes:
        naming: None where no table knows any of them.
        likely: families that use these very names and have the fewest that the file lacks.
        families: all that know as many of the names.
        groups: every tensor is in exactly one.
        readings: roles by pattern; several where a family names different parts of different models alike.
        twice: names that stand for a tensor which another name stands for too, with that other one.
        wrappers: prefixes that were taken off.
    """

    naming: Naming | None
    likely: tuple[str, ...]
    families: tuple[str, ...]
    groups: tuple[Group, ...]
    readings: tuple[Reading, ...]
    twice: tuple[tuple[str, str], ...]
    wrappers: tuple[str, ...]

    @property
    def known(self) -> int:
        """Tensors that have a role."""
        return sum(len(group.members) for group in self.groups if group.roles)


def collapsed(name: str) -> tuple[str, tuple[int, ...]]:
    """A name with its numbers taken out, and those numbers.

    >>> collapsed("h.11.attn.c_attn.weight")
    ('h.{}.attn.c_attn.weight', (11,))
    """
    if "{" in name or "}" in name:
        # No name of a family has braces; with one more this cannot be another name's pattern.
        return name + "{", ()
    numbers = tuple(map(int, _NUMBER.findall(name)))
    return (_NUMBER.sub(_HOLE, name), numbers) if numbers else (name, ())


def named(shapes: Mapping[str, Shape], *, gguf: bool) -> Named:
    """Find the families whose names these are.

    The table wins that knows most tensors, and of equals the one that has the fewest names that the file lacks.
    """
    groups, twice, wrappers = _groups(shapes)
    own = _own_groups(groups)
    if own is not None:
        reading = {group.pattern: group.roles for group in own}
        return Named(None, ("scantling",), ("scantling",), own, (reading,), twice, wrappers)
    scored: list[tuple[int, int, int, Naming, dict[str, _Hit | None]]] = []
    for naming in _promising(groups, gguf):
        found = {pattern: _looked_up(naming, pattern) for pattern in groups}
        known = sum(len(groups[pattern].members) for pattern, hit in found.items() if hit is not None)
        if known:
            scored.append((-known, _spare(naming, found.values()), len(scored), naming, found))
    if not scored:
        return Named(None, (), (), tuple(groups.values()), ({},), twice, wrappers)
    scored.sort(key=lambda item: item[:3])
    least, spare, _, best, found = scored[0]
    for pattern, group in groups.items():
        hit = found[pattern]
        group.roles = () if hit is None else hit[1]
        plain = pattern.removeprefix(best.prefix)
        group.ignored = hit is None and _is_ignored(best, group, plain)
    fitting = [(more, name) for known, more, _, other, _ in scored if known == least for name in other.families]
    likely = tuple(dict.fromkeys(name for more, name in fitting if more == spare))
    possible = tuple(dict.fromkeys(name for _, name in fitting))
    alike = [hits for known, _, _, other, hits in scored if known == least and set(other.families) & set(best.families)]
    readings = [{p: () if hit is None else hit[1] for p, hit in hits.items()} for hits in alike]
    different = tuple(reading for i, reading in enumerate(readings) if reading not in readings[:i])
    return Named(best, likely, possible, tuple(groups.values()), different, twice, wrappers)


def _spare(naming: Naming, found: Iterable[_Hit | None]) -> int:
    """Names of the table that the file lacks; those of experts count only where it has some of them."""
    hits = {hit[0] for hit in found if hit is not None}
    sparse = any(_is_sparse(naming.table[pattern]) for pattern in hits)
    lacking = (roles for pattern, roles in naming.table.items() if pattern not in hits)
    return sum(sparse or not _is_sparse(roles) for roles in lacking)


def _is_sparse(roles: Sequence[Role]) -> bool:
    return all(re.search(r"\.mlp\.(router|experts|shared)\.", role.ours[0]) for role in roles)


def _groups(shapes: Mapping[str, Shape]) -> tuple[dict[str, Group], tuple[tuple[str, str], ...], tuple[str, ...]]:
    groups: dict[str, Group] = {}
    twice: list[tuple[str, str]] = []
    wrappers: dict[str, None] = {}
    for name, shape in shapes.items():
        plain = name
        while wrapper := next((w for w in WRAPPERS if plain.startswith(w)), None):
            wrappers[wrapper] = None
            plain = plain[len(wrapper) :]
        pattern, numbers = collapsed(plain)
        group = groups.get(pattern)
        if group is None:
            group = groups[pattern] = Group(pattern)
        if numbers in group.names:
            twice.append((name, group.names[numbers]))
        group.members[numbers], group.names[numbers] = tuple(shape), name
    return groups, tuple(twice), tuple(wrappers)


def _own_groups(groups: dict[str, Group]) -> tuple[Group, ...] | None:
    """Our own names are themselves; None where these are others."""
    if "embed.weight" not in groups or not all(_OWN.match(pattern) for pattern in groups):
        return None
    for group in groups.values():
        ours = group.pattern.replace(_HOLE, "{i}", 1)
        group.roles = (Role((ours,), Transform(), ("i",) if _HOLE in group.pattern else ()),)
    return tuple(groups.values())


def _looked_up(naming: Naming, pattern: str) -> _Hit | None:
    """The name in the table and its roles."""
    plain = pattern
    for old, new in naming.renamed:
        plain = re.sub(old, new, plain)
    for full in (plain, naming.prefix + plain):
        if full in naming.table:
            return full, naming.table[full]
    return None


def _is_ignored(naming: Naming, group: Group, plain: str) -> bool:
    if naming.gguf:
        return plain in BESIDE
    numbers = next(iter(group.members))
    example = plain.format(*numbers) if numbers else plain
    return any(re.fullmatch(pattern, example) for pattern in naming.ignored)


def held(named: Named, reading: Reading) -> dict[tuple[str, ...], Held]:
    """The tensors that have a role in a reading, by our names with the layer as ``{i}``."""
    sure = [role for group in named.groups for role in _single(reading.get(group.pattern, ()))]
    places = {_place(role) for role in sure} - {None}
    out: dict[tuple[str, ...], Held] = {}
    for group in named.groups:
        roles = reading.get(group.pattern, ())
        fixed = all(type(index) is str for role in roles for index in role.indices)
        role = _role(roles, next(iter(group.members)), places) if fixed else None
        for numbers, shape in group.members.items():
            role = role if fixed else _role(roles, numbers, places)
            if role is None:
                continue
            one = out.get(role.ours)
            if one is None:
                one = out[role.ours] = Held(role.ours, role.transform)
            layer = numbers[role.indices.index("i")] if "i" in role.indices else NO_LAYER
            if layer not in one.shapes:
                one.shapes[layer] = role.transform.as_ours(shape)
                one.names[layer] = []
            one.names[layer].append(group.names[numbers])
    return out


def _role(roles: Sequence[Role], numbers: tuple[int, ...], places: set[str | None]) -> Role | None:
    """What the tensor with these numbers is.

    Of two roles of one name it is the one at the place where the other norms of the file stand: OLMo 2 calls the norm
    on what attention adds as Llama calls the norm before the MLP.
    """
    fitting = [role for role in roles if _fits(role, numbers)]
    there = [role for role in fitting if _place(role) in places] if len(fitting) > 1 else []
    return next(iter(there or fitting), None)


def _fits(role: Role, numbers: tuple[int, ...]) -> bool:
    same = len(role.indices) == len(numbers)
    return same and all(type(i) is str or i == n for i, n in zip(role.indices, numbers, strict=True))


def _single(roles: Sequence[Role]) -> list[Role]:
    """Roles that no other one shares its name and numbers with."""
    return [a for a in roles if sum(a.indices == b.indices for b in roles) == 1]


def _place(role: Role) -> str | None:
    """Of a norm of a block: in, res or out."""
    found = re.search(r"blocks\.\{i\}\.(?:attn|cross|mlp)(?:_(res|out))?_norm\.", role.ours[0])
    return None if found is None else (found[1] or "in")


def _promising(groups: Mapping[str, Group], gguf: bool) -> Iterator[Naming]:
    """The tables of every family whose first one knows any of the names, once for each set that shares a table."""
    found: dict[Naming, list[str]] = {}
    for name in ARCHITECTURES if gguf else FAMILIES:
        first = _first_naming(name, gguf)
        if any(_looked_up(first, pattern) for pattern in groups):
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
