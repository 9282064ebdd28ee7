"""Documents, an objective and a layout put together: what rows are read, and how they become a batch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scantling.data.batch import Batch
from scantling.data.corpus import Corpus, Documents
from scantling.data.layout import Layout, Schedule
from scantling.data.mixing import mix
from scantling.data.named import objective_named
from scantling.data.objectives import Objective
from scantling.data.rows import Cutting, Pieces, Place, Reader, RowReader, StreamReader
from scantling.errors import ScantlingInputError

_ORDER, _NOISE = 1, 2


class Feed:
    """What `batches` and `one_pass` share.

    Args:
        corpus: a corpus, of which the half to train on is read, or some of its documents.
        tokens: of a row.

    Raises:
        ScantlingInputError: settings that do not go together, no documents, or documents that are too long.
    """

    def __init__(
        self, corpus: Corpus | Documents, objective: Objective | str, mode: Layout | str, seed: int, tokens: Schedule
    ) -> None:
        documents = corpus.train if isinstance(corpus, Corpus) else corpus
        self._layout = Layout(mode) if isinstance(mode, str) else mode
        self._objective = objective_named(objective) if isinstance(objective, str) else objective
        self._seed = seed
        if len(documents) == 0:
            raise ScantlingInputError(f"the half {documents.name!r} of the data has no document")
        self._objective.check(documents, self._layout)
        name = f"{self._objective.name} {self._layout.mode} {self._layout.long}".encode()
        tag = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
        self._identity = f"{mix(documents.identity, seed, tag):016x}"
        lengths = [tokens] if isinstance(tokens, int) else sorted({value for _, value in tokens})
        self.documents, self._units = self._within(documents, lengths)

    def reader(self, place: Place, epochs: int | None) -> Reader:
        """A reader that stands at a place; it shuffles where it reads without end."""
        marks = self.documents.corpus.marks
        cutting = Cutting(
            self._units,
            lambda tokens: self._objective.room(tokens, marks),
            self._objective.overhead(marks),
            self._layout.mode == "packed",
            mix(self._seed, _ORDER) if epochs is None else None,
        )
        if self._layout.mode == "concatenated":
            return StreamReader(cutting, place, epochs, self._objective.ahead)
        return RowReader(cutting, place, epochs)

    def resumed(self, cursor: Mapping[str, Any] | None) -> tuple[int, Place]:
        """Steps done, and the place to go on from.

        Raises:
            ScantlingInputError: the cursor is of other data or settings.
        """
        if cursor is None:
            return 0, Place()
        if cursor.get("of") != self._identity:
            raise ScantlingInputError(
                "the place in the data is of other data, or of another seed, objective or way of making batches: "
                "resume with those of the run, or begin anew"
            )
        served = tuple((int(length), int(rows)) for length, rows in cursor["served"])
        return cursor["step"], Place(cursor["epoch"], cursor["document"], served, cursor["offset"])

    def batch(self, rows: Sequence[Pieces], tokens: int, step: int, place: Place, share: tuple[int, int]) -> Batch:
        """One rank's part of the rows of a step.

        Args:
            step: counted from 1.
            place: after these rows.
            share: ranks, and which of them this is.
        """
        ranks, rank = share
        room = self._objective.room(tokens, self.documents.corpus.marks)
        each = len(rows) // ranks
        mine = range(rank * each, (rank + 1) * each)
        arrays = self._objective.fill(
            self.documents,
            [rows[number] for number in mine],
            tokens,
            [mix(self._seed, _NOISE, step, number) for number in mine],
            self._layout.mode == "concatenated",
        )
        return Batch(
            **arrays,
            cursor={"of": self._identity, "step": step, **place.plain()},
            row_documents=np.array([_begun(rows[number], room) for number in mine], np.int64),
        )

    def _within(self, documents: Documents, lengths: Sequence[int]) -> tuple[Documents, NDArray[np.int64]]:
        """The documents that are read, and their units, by the policy for long ones."""
        marks, streamed = documents.corpus.marks, self._layout.mode == "concatenated"
        room = self._objective.room(lengths[0], marks)
        if room < 1:
            raise ScantlingInputError(f"rows of {lengths[0]} tokens have no room for text beside the special tokens")
        units = self._objective.units(documents, streamed)
        if streamed:
            return documents, units
        pairs = documents.corpus.manifest.kind == "pairs"
        long = self._layout.long or ("refuse" if pairs else "split")
        needs = self._objective.needs(documents, lengths[0])
        too_long = needs > lengths[0]
        if long == "split" or not too_long.any():
            return documents, units
        if long == "refuse":
            raise ScantlingInputError(
                f"{int(too_long.sum()):,} of {len(units):,} documents are longer than a row of {lengths[0]} tokens "
                f"(the longest needs {int(needs.max())}): take longer rows, or choose to split, truncate or drop them"
            )
        if len(lengths) > 1:
            raise ScantlingInputError(f"rows that grow over the steps go with long documents split, not with {long}")
        if long == "truncate":
            return documents, np.minimum(units, room)
        if too_long.all():
            raise ScantlingInputError(f"every document is longer than a row of {lengths[0]} tokens, so all are dropped")
        kept = Documents(documents.corpus, documents.name, documents.spans[~too_long])
        return kept, units[~too_long]


def _begun(pieces: Pieces, room: int) -> int:
    """Documents that stand in a row; those of a stream that only the next row holds are not counted."""
    sizes = pieces[:, 2] - pieces[:, 1]
    return int((np.cumsum(sizes) - sizes < room).sum())
