"""Any number of cards side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from msgspec.structs import replace

from scantling.assembly import assemble
from scantling.cards.schema import Card, RoPE
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


def equivalences(cards: Sequence[Card]) -> list[str]:
    """A sentence for each two cards that describe one model with its rows in another order.

    RoPE turns channel i with i + n/2, or 2i with 2i + 1: where only that differs, each head's rows of queries and keys
    (and of norms on them), first the even then the odd ones of the turned channels, make one of the other.
    """
    return [
        f"{a.name} and {b.name} are equivalent up to a permutation: with each head's rows of q and k"
        f"{', and of the norms on them,' if getattr(a.attention, 'qk_norm', None) else ''} in the order even then odd "
        "the weights of the one that turns neighbours are those of the one that turns halves; with the same weights "
        "they give different logits"
        for a, b in combinations(cards, 2)
        if _turned_otherwise(a, b)
    ]


def _turned_otherwise(a: Card, b: Card) -> bool:
    if not isinstance(a.position, RoPE) or not isinstance(b.position, RoPE):
        return False
    if a.position.interleaved == b.position.interleaved:
        return False
    return _bare(a) == _bare(replace(b, position=replace(b.position, interleaved=a.position.interleaved)))


def _bare(card: Card) -> Card:
    """What the card says of the function alone."""
    return replace(card, name="", training=None, inference=None, source=None, published=None, dtype="unknown")


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
