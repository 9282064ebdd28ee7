"""Which tensor of a file is which of the model that its config describes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from scantling.checkpoint.names import Shape
from scantling.errors import ScantlingInputError

WRAPPERS = ("_orig_mod.", "module.")
"""Prefixes that torch.compile and DistributedDataParallel leave on names."""


@dataclass
class Matched:
    """The tensors of a file beside those of a model.

    Attributes:
        names: the name in the file, by the name in the model's table.
        twice: pairs of names in the file that are one tensor.
        extra: names in the file that the table does not know.
        unread: names in the file that are known to carry no weights of this model.
        missing: names of the table that the file lacks and may not lack.
        misshapen: names of the table whose tensor has another shape in the file.
    """

    names: dict[str, str] = field(default_factory=dict)
    twice: list[tuple[str, str]] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)


def wrapper_of(name: str) -> str:
    """The wrapper that a name begins with; there is one."""
    return next(wrapper for wrapper in WRAPPERS if name.startswith(wrapper))


def bare(name: str, renamed: Sequence[tuple[str, str]] = ()) -> str:
    """A file's name without wrappers, and where the family has two names for it, the one of its table."""
    while name.startswith(WRAPPERS):
        name = name[len(wrapper_of(name)) :]
    for pattern, replacement in renamed:
        name = re.sub(pattern, replacement, name)
    return name


def matched(
    found: Mapping[str, Shape],
    wanted: Mapping[str, Shape],
    prefix: str,
    ignored: Sequence[str],
    renamed: Sequence[tuple[str, str]] = (),
    absent: Sequence[str] = (),
) -> Matched:
    """Put the tensors of the file `found` beside those `wanted`.

    Args:
        found, wanted: names and shapes in the file and in the table.
        prefix: the base model's name, which some files leave out.
        ignored: patterns of names that carry no weights.
        renamed: old spellings, as (pattern, replacement) of `re.sub`.
        absent: patterns of names in the table that the file may lack.
    """
    out = Matched()
    # Where every name is the table's own nothing has to be looked for.
    alike = not renamed and found.keys() <= wanted.keys()
    if alike:
        out.names = dict(zip(found, found, strict=True))
    for name in found if not alike else ():
        plain = bare(name, renamed)
        full = plain if plain in wanted else prefix + plain
        if full in out.names:
            out.twice.append((out.names[full], name))
        elif full in wanted:
            out.names[full] = name
        elif any(re.fullmatch(pattern, plain.removeprefix(prefix)) for pattern in ignored):
            out.unread.append(name)
        else:
            out.extra.append(name)
    lacking = [name for name in wanted if name not in out.names]
    out.missing = [name for name in lacking if not any(re.fullmatch(p, name.removeprefix(prefix)) for p in absent)]
    if found != wanted:
        out.misshapen = [full for full, name in out.names.items() if tuple(found[name]) != tuple(wanted[full])]
    return out


def match(
    found: Mapping[str, Shape],
    wanted: Mapping[str, Shape],
    prefix: str,
    ignored: Sequence[str],
    where: str,
    renamed: Sequence[tuple[str, str]] = (),
    absent: Sequence[str] = (),
) -> tuple[dict[str, str], list[str]]:
    """The same for a file `where` that is to be loaded.

    Returns:
        (table name -> file name, names in the file that the table does not know).

    Raises:
        ScantlingInputError: a tensor is missing, stands under two names, or has another shape.
    """
    beside = matched(found, wanted, prefix, ignored, renamed, absent)
    if beside.twice:
        first, second = beside.twice[0]
        raise ScantlingInputError(f"{where}: {first!r} and {second!r} are one tensor under two names; keep one")
    if missing := beside.missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        unknown = f"; the file has {beside.extra[0]!r}, which the model does not know" if beside.extra else ""
        raise ScantlingInputError(f"{where}: tensor {missing[0]!r}{more} is missing{unknown}")
    for full in beside.misshapen:
        name = beside.names[full]
        raise ScantlingInputError(
            f"{where}: tensor {name!r} has shape {list(found[name])} and the config asks for {list(wanted[full])}"
        )
    return beside.names, beside.extra
