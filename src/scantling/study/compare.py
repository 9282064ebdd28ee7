"""Any number of cards side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scantling.assembly import assemble
from scantling.cards.schema import Card
from scantling.errors import ScantlingInputError
from scantling.parts.part import Workload
from scantling.study.facts import Fact, Value, facts


@dataclass(frozen=True)
class Row:
    """One line of the comparison.

    Attributes:
        values: of each card, None where it has no such thing.
    """

    section: str
    what: str
    values: tuple[Value, ...]

    @property
    def differs(self) -> bool:
        """Whether not all cards say the same."""
        return len(set(self.values)) > 1


def compare(cards: Sequence[Card], workloads: Sequence[Workload]) -> list[Row]:
    """The facts of `cards` row by row, each with the numbers of its workload.

    Raises:
        ScantlingInputError: there is no card, or not one workload for each.
    """
    if not cards or len(cards) != len(workloads):
        raise ScantlingInputError(f"{len(cards)} cards and {len(workloads)} workloads: one of each is needed")
    columns = [facts(card, assemble(card), w) for card, w in zip(cards, workloads, strict=True)]
    found = [{(fact.section, fact.what): fact.value for fact in column} for column in columns]
    return [Row(*key, tuple(column.get(key) for column in found)) for key in _order(columns)]


def _order(columns: list[list[Fact]]) -> list[tuple[str, str]]:
    """Every row once, each where it stands in the first card that has it: after the row before it there."""
    order: list[tuple[str, str]] = []
    for column in columns:
        at = 0
        for key in ((fact.section, fact.what) for fact in column):
            if key in order:
                at = order.index(key) + 1
            else:
                order.insert(at, key)
                at += 1
    return order
