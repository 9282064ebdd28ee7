"""Whose names a checkpoint uses: the table of names that fits a file, and what each of its tensors is by it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from scantling.checkpoint.families.gguf.rope import BESIDE
from scantling.checkpoint.inspect.tables import HOLE, Hit, Naming, Role, collapsed_names, looked_up, promising
from scantling.checkpoint.matching import WRAPPERS, wrapper_of
from scantling.checkpoint.names import Shape, Transform

Reading = Mapping[str, tuple[Role, ...]]
_OWN = re.compile(r"(embed|target_embed|widen|encoder|decoder|head)\.")


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


def named(shapes: Mapping[str, Shape], *, gguf: bool) -> Named:
    """Find the families whose names these are.

    The table wins that knows most tensors, and of equals the one that has the fewest names that the file lacks.
    """
    groups, twice, wrappers = _groups(shapes)
    own = _own_groups(groups)
    if own is not None:
        reading = {group.pattern: group.roles for group in own}
        return Named(None, ("scantling",), ("scantling",), own, (reading,), twice, wrappers)
    scored: list[tuple[int, int, int, Naming, dict[str, Hit | None]]] = []
    for naming in promising(groups, gguf):
        found = {pattern: looked_up(naming, pattern) for pattern in groups}
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


def _spare(naming: Naming, found: Iterable[Hit | None]) -> int:
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
    plain, wrappers = _unwrapped(shapes)
    for (name, shape), (pattern, numbers) in zip(shapes.items(), collapsed_names(plain), strict=True):
        group = groups.get(pattern)
        if group is None:
            group = groups[pattern] = Group(pattern)
        if numbers in group.names:
            twice.append((name, group.names[numbers]))
        group.members[numbers], group.names[numbers] = shape, name
    return groups, tuple(twice), wrappers


def _unwrapped(names: Iterable[str]) -> tuple[list[str], tuple[str, ...]]:
    """The names without wrappers, and those wrappers."""
    plain = list(names)
    wrappers: dict[str, None] = {}
    for i, name in enumerate(plain):
        while name.startswith(WRAPPERS):
            wrapper = wrapper_of(name)
            wrappers[wrapper] = None
            name = plain[i] = name[len(wrapper) :]
    return plain, tuple(wrappers)


def _own_groups(groups: dict[str, Group]) -> tuple[Group, ...] | None:
    """Our own names are themselves; None where these are others."""
    if "embed.weight" not in groups or not all(_OWN.match(pattern) for pattern in groups):
        return None
    for group in groups.values():
        ours = group.pattern.replace(HOLE, "{i}", 1)
        group.roles = (Role((ours,), Transform(), ("i",) if HOLE in group.pattern else ()),)
    return tuple(groups.values())


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
