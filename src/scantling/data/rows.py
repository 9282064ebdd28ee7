"""Which pieces of which documents stand in which row, in an order that (seed, epoch) decides and a small state resumes.

The documents of an epoch are permuted and taken in groups. Each group is cut into pieces and packed for itself, and its
rows are permuted. The state is the epoch, the first document of the group, and how many rows were taken at which
length; so the length may change inside a group, and the pieces that are left are packed again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from scantling.data.mixing import mix, permutation
from scantling.data.packing import best_fit, cut, joined

GROUP_DOCUMENTS = 4096
GROUP_UNITS = 2**22

Pieces = NDArray[np.int64]
"""(K, 3): document, start and end, in units of the objective."""


@dataclass(frozen=True)
class Place:
    """Where a reader stands; JSON-able by `plain`.

    Attributes:
        epoch: passes over the documents before this one.
        document: of the epoch's order, where the group begins; of a plain stream the current one.
        served: of the group, pairs of row length and rows taken at it.
        offset: of a plain stream, units of the document that were taken.
    """

    epoch: int = 0
    document: int = 0
    served: tuple[tuple[int, int], ...] = ()
    offset: int = 0

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "epoch": self.epoch,
            "document": self.document,
            "served": [list(pair) for pair in self.served],
            "offset": self.offset,
        }


@dataclass(frozen=True)
class Cutting:
    """How documents become rows.

    Attributes:
        units: of each document, (N,).
        room: units of one piece that a row of so many tokens holds at most.
        overhead: tokens that a piece needs beside its units, such as [CLS] and [SEP].
        packed: several pieces share a row.
        seed: of the order; None reads in the order of the documents.
    """

    units: NDArray[np.int64] = field(repr=False)
    room: Callable[[int], int]
    overhead: int
    packed: bool
    seed: int | None


class Reader(Protocol):
    """Gives rows, and remembers where it stands."""

    place: Place

    def take(self, count: int, tokens: int) -> list[Pieces]:
        """The next rows of so many tokens: `count`, or fewer where the last epoch ends."""


class RowReader:
    """Rows of whole pieces, packed or one by one."""

    def __init__(self, cutting: Cutting, place: Place, epochs: int | None) -> None:
        self.cutting, self.place, self._epochs = cutting, place, epochs
        self._order: tuple[int, NDArray[np.int64]] | None = None
        self._rows: tuple[Pieces, list[list[int]], int] | None = None

    def take(self, count: int, tokens: int) -> list[Pieces]:
        """The next rows; see `Reader`."""
        found: list[Pieces] = []
        while len(found) < count:
            if self._epochs is not None and self.place.epoch >= self._epochs:
                break
            if self._rows is None or self._rows[2] != tokens:
                self._derive(tokens)
            assert self._rows is not None
            pieces, rows, _ = self._rows
            *before, (length, served) = self.place.served
            taken = rows[served : served + count - len(found)]
            found += [pieces[row] for row in taken]
            self.place = replace(self.place, served=(*before, (length, served + len(taken))))
            if served + len(taken) == len(rows):
                self._next_group()
        return found

    def _derive(self, tokens: int) -> None:
        """Pack the group as the place says it was packed, and what is left of it for rows of `tokens`."""
        group = self._group()
        spans = np.column_stack([group, np.zeros_like(group), self.cutting.units[group]])
        served = self.place.served
        if not served or served[-1][0] != tokens:
            served = (*served, (tokens, 0))
        for length, count in served[:-1]:
            pieces, rows = self._packed(spans, length)
            left = [item for row in rows[count:] for item in row]
            spans = joined(pieces[left])
        self._rows = (*self._packed(spans, tokens), tokens)
        self.place = replace(self.place, served=served)

    def _packed(self, spans: Pieces, tokens: int) -> tuple[Pieces, list[list[int]]]:
        cutting, place = self.cutting, self.place
        pieces = cut(spans, cutting.room(tokens))
        if cutting.packed:
            sizes = pieces[:, 2] - pieces[:, 1] + cutting.overhead
            short = np.flatnonzero(sizes < tokens)
            rows = [[int(item)] for item in np.flatnonzero(sizes >= tokens)]
            rows += [[int(short[item]) for item in row] for row in best_fit(sizes[short].tolist(), tokens)]
        else:
            rows = [[item] for item in range(len(pieces))]
        if cutting.seed is not None:
            order = permutation(mix(cutting.seed, place.epoch, place.document, tokens, 1), len(rows))
            rows = [rows[number] for number in order]
        return pieces, rows

    def _group(self) -> NDArray[np.int64]:
        if self._order is None or self._order[0] != self.place.epoch:
            self._order = self.place.epoch, epoch_order(self.cutting, self.place.epoch)
        start = self.place.document
        group = self._order[1][start : start + GROUP_DOCUMENTS]
        reach = np.cumsum(self.cutting.units[group])
        return group[: int(np.searchsorted(reach, GROUP_UNITS)) + 1]

    def _next_group(self) -> None:
        document = self.place.document + len(self._group())
        ended = document >= len(self.cutting.units)
        self.place = Place(self.place.epoch + ended, 0 if ended else document)
        self._rows = None


class StreamReader:
    """Rows of one stream of documents, each where the last ended: borders of documents count for nothing."""

    def __init__(self, cutting: Cutting, place: Place, epochs: int | None, ahead: int) -> None:
        self.cutting, self.place, self._epochs, self._ahead = cutting, place, epochs, ahead
        self._order: tuple[int, NDArray[np.int64]] | None = None

    def take(self, count: int, tokens: int) -> list[Pieces]:
        """The next rows; each reads `ahead` units into the next one. See `Reader`."""
        found = []
        for _ in range(count):
            pieces, self.place = self._walk(self.place, self.cutting.room(tokens))
            if not pieces:
                break
            more, _ = self._walk(self.place, self._ahead)
            found.append(np.array(pieces + more, np.int64))
        return found

    def _walk(self, place: Place, units: int) -> tuple[list[tuple[int, int, int]], Place]:
        pieces = []
        while units and (self._epochs is None or place.epoch < self._epochs):
            if self._order is None or self._order[0] != place.epoch:
                self._order = place.epoch, epoch_order(self.cutting, place.epoch)
            document = int(self._order[1][place.document])
            length = int(self.cutting.units[document])
            end = min(length, place.offset + units)
            pieces.append((document, place.offset, end))
            units -= end - place.offset
            place = replace(place, offset=end)
            if end == length:
                following = place.document + 1
                ended = following == len(self.cutting.units)
                place = Place(place.epoch + ended, 0 if ended else following)
        return pieces, place


def epoch_order(cutting: Cutting, epoch: int) -> NDArray[np.int64]:
    """The documents of an epoch, (N,), in the order in which they are read."""
    if cutting.seed is None:
        return np.arange(len(cutting.units))
    return permutation(mix(cutting.seed, epoch), len(cutting.units))
