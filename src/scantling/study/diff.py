"""What changes from one card to another: keys, parts, numbers, and the weights that could be carried over."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from scantling.assembly import assemble
from scantling.cards.rules import complete
from scantling.cards.schema import Card
from scantling.parts.dims import Shape
from scantling.parts.part import Step, Workload
from scantling.parts.transformer import Transformer
from scantling.study.facts import Fact, facts

ABOUT = ("name", "training", "inference", "source", "published")
"""Keys that say where a card is from and change nothing in the model."""
NUMBERS = ("parameters", "FLOPs", "memory", "cost")
FATES = ("same", "other_shape", "new", "gone")


@dataclass(frozen=True)
class Change:
    """A key of the card or a number.

    Attributes:
        old, new: None where there is none.
    """

    what: str
    old: Any
    new: Any


@dataclass(frozen=True)
class PartChange:
    """A row of the parts list of one token.

    Attributes:
        old, new: operation, formula, shape, parameters, repeats; None where there is no such row.
    """

    path: str
    old: Mapping[str, Any] | None
    new: Mapping[str, Any] | None


@dataclass(frozen=True)
class Weights:
    """Stored tensors that share a fate and, but for the layer's number, a name.

    Attributes:
        fate: same (name and shape), other_shape, new (only in the second card) or gone (only in the first).
        name: with {i} for the numbers of layers.
        tensors: how many there are.
        old, new: their shape, None where there is none.
    """

    fate: str
    name: str
    tensors: int
    old: Shape | None
    new: Shape | None

    @property
    def elements(self) -> int:
        """Numbers in all of them, in the card that has them; in the second where both do."""
        return self.tensors * math.prod(self.new or self.old or (0,))


@dataclass(frozen=True)
class Diff:
    """From card A to card B.

    Attributes:
        keys: keys of the card with another value; a list of numbers or words is one value.
        parts: rows of the parts list that are added, removed or changed.
        numbers: parameters by part, FLOPs, memory and cost that are not equal.
        weights: every stored tensor of either card.
    """

    keys: tuple[Change, ...]
    parts: tuple[PartChange, ...]
    numbers: tuple[Change, ...]
    weights: tuple[Weights, ...]

    @property
    def equal(self) -> bool:
        """Whether nothing changes."""
        return not (self.keys or self.parts or self.numbers) and all(w.fate == "same" for w in self.weights)

    def tensors(self, fate: str) -> tuple[int, int]:
        """Tensors of that fate, and numbers in them."""
        of = [w for w in self.weights if w.fate == fate]
        return sum(w.tensors for w in of), sum(w.elements for w in of)


def diff(a: Card, b: Card, w: Workload, w_b: Workload | None = None) -> Diff:
    """What changes from `a` to `b`; the other numbers are those of a prefill `w` (of `b`: `w_b`, where it is given)."""
    a, b = complete(a), complete(b)
    old, new = assemble(a), assemble(b)
    keys = _changes(dict(_leaves(a)), dict(_leaves(b)))
    numbers = _changes(_numbers(facts(a, old, w)), _numbers(facts(b, new, w_b or w)))
    return Diff(keys, _parts(old, new), numbers, _weights(old.named_stored, new.named_stored))


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[Change, ...]:
    return tuple(
        Change(what, old.get(what), new.get(what)) for what in _merged(old, new) if old.get(what) != new.get(what)
    )


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys([*old, *new]))


def _leaves(card: Card) -> Iterator[tuple[str, Any]]:
    """Every key of the card with its path; what is None is as good as absent."""

    def walk(value: Any, path: str) -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict):
            for key, inner in value.items():
                yield from walk(inner, f"{path}.{key}" if path else key)
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            for i, item in enumerate(value):
                yield from walk(item, f"{path}[{i}]")
        elif value is not None and value != []:
            yield path, value

    plain = msgspec.to_builtins(card)
    yield from walk({key: value for key, value in plain.items() if key not in ABOUT}, "")


def _numbers(found: list[Fact]) -> dict[str, Any]:
    kept = [fact for fact in found if fact.section in NUMBERS and not fact.what.endswith(", share")]
    return {f"{fact.section}: {fact.what}": fact.value for fact in kept}


def _parts(old: Transformer, new: Transformer) -> tuple[PartChange, ...]:
    before, after = _rows(old), _rows(new)
    return tuple(
        PartChange(path.partition("#")[0], before.get(path), after.get(path))
        for path in _merged(before, after)
        if before.get(path) != after.get(path)
    )


def _rows(model: Transformer) -> dict[str, Mapping[str, Any]]:
    """The parts list of one token by path; a path that comes again is numbered."""
    seen: Counter[str] = Counter()
    rows = {}
    for step in model.steps(Workload()):
        seen[step.path] += 1
        rows[f"{step.path}#{seen[step.path]}"] = _row(step)
    return rows


def _row(step: Step) -> Mapping[str, Any]:
    return {
        "op": step.op,
        "formula": step.formula,
        "shape": step.shape,
        "params": step.params,
        "repeat": step.repeat,
    }


def _weights(old: Mapping[str, Shape], new: Mapping[str, Shape]) -> tuple[Weights, ...]:
    groups: Counter[tuple[str, str, Shape | None, Shape | None]] = Counter()
    for name in _merged(old, new):
        before, after = old.get(name), new.get(name)
        fate = "new" if before is None else "gone" if after is None else "same" if before == after else "other_shape"
        groups[fate, re.sub(r"(?<=\.)\d+(?=\.)", "{i}", name), before, after] += 1
    rows = [Weights(fate, name, n, before, after) for (fate, name, before, after), n in groups.items()]
    return tuple(sorted(rows, key=lambda row: FATES.index(row.fate)))
