"""What is learned from a row: the ids that go in, and the labels that are judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from scantling.data.canvas import IGNORED, Canvas, framed
from scantling.data.corpus import Documents, Marks
from scantling.data.layout import Layout
from scantling.data.mixing import uniform
from scantling.data.rows import Pieces
from scantling.errors import ScantlingInputError


class Objective(Protocol):
    """One way to learn from documents.

    A document is measured in units, of which a piece takes some: `units` of each document, `room` for those of one
    piece in a row, `overhead` tokens beside them.
    """

    name: ClassVar[str]
    """As the command line knows it."""
    ahead: ClassVar[int]
    """Units of the next row of a stream that a row reads, too."""

    def check(self, documents: Documents, layout: Layout) -> None:
        """Refuse documents and layouts that this objective cannot learn from."""

    def units(self, documents: Documents, streamed: bool) -> NDArray[np.int64]:
        """Of each document, (N,)."""

    def room(self, tokens: int, marks: Marks) -> int:
        """Units of a piece that fills a row of so many tokens."""

    def overhead(self, marks: Marks) -> int:
        """Tokens beside the units of a piece."""

    def needs(self, documents: Documents, tokens: int) -> NDArray[np.int64]:
        """Of each document, (N,), the length of a row that holds it whole; `tokens` is that of the rows there are."""

    def fill(
        self, documents: Documents, rows: Sequence[Pieces], tokens: int, seeds: Sequence[int], streamed: bool
    ) -> dict[str, Any]:
        """The arrays of a batch, by the names of its fields.

        Args:
            rows: pieces of each row.
            seeds: of each row, for noise.
            streamed: the pieces of a row are one stream, with `ahead` units of the next row.
        """


def around(documents: Documents) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What stands before and after a document that is continued: nothing beside what a chat template wrote."""
    if documents.corpus.manifest.kind == "chat":
        return (), ()
    return documents.corpus.marks.before, documents.corpus.marks.ends


def refuse_mode(name: str, layout: Layout, known: Sequence[str]) -> None:
    """Refuse a layout that an objective cannot use."""
    if layout.mode not in known:
        raise ScantlingInputError(
            f"the objective {name!r} makes batches that are {' or '.join(known)}, not {layout.mode}"
        )


def refuse_kind(name: str, documents: Documents, known: Sequence[str]) -> None:
    """Refuse data that an objective cannot learn from."""
    kind = documents.corpus.manifest.kind
    if kind not in known:
        raise ScantlingInputError(f"the objective {name!r} learns from data of kind {' or '.join(known)}, not {kind}")


def refuse_split(name: str, layout: Layout) -> None:
    """Refuse to cut pairs."""
    if layout.long == "split":
        raise ScantlingInputError(
            f"the objective {name!r} cannot split a pair over rows: choose to refuse, truncate or drop long ones"
        )


@dataclass(frozen=True)
class Causal:
    """The next token. Of pairs the target's tokens are judged, of conversations the assistant's, of texts all.

    Attributes:
        everything: judge all tokens of pairs and conversations, too.
    """

    name: ClassVar[str] = "causal"
    ahead: ClassVar[int] = 1

    everything: bool = False

    def check(self, documents: Documents, layout: Layout) -> None:
        """Refuse documents in which nothing can be predicted."""
        before, after = around(documents)
        if int((documents.lengths + len(before) + len(after)).max()) < 2:
            raise ScantlingInputError("no document has a second token that could be predicted from a first one")

    def units(self, documents: Documents, streamed: bool) -> NDArray[np.int64]:
        """Tokens that go in: an end token goes in only where a stream goes on after it."""
        before, after = around(documents)
        return documents.lengths + len(before) + (len(after) if streamed else max(len(after) - 1, 0))

    def room(self, tokens: int, marks: Marks) -> int:
        """As many as the row."""
        return tokens

    def overhead(self, marks: Marks) -> int:
        """None."""
        return 0

    def needs(self, documents: Documents, tokens: int) -> NDArray[np.int64]:
        """As many as go in."""
        return self.units(documents, streamed=False)

    def fill(
        self, documents: Documents, rows: Sequence[Pieces], tokens: int, seeds: Sequence[int], streamed: bool
    ) -> dict[str, Any]:
        """Ids and what follows each; see `Objective`."""
        canvas = Canvas(len(rows), tokens, documents.corpus.marks.pad)
        for row, pieces in enumerate(rows):
            if streamed:
                self._stream(documents, canvas, row, pieces)
                continue
            at = 0
            for number, (document, start, end) in enumerate(pieces.tolist()):
                ids, labels = self._read(documents, document, start, end + 1)
                there = canvas.put(row, at, ids[: end - start], number)
                canvas.labels[row, at : at + len(labels) - 1] = labels[1:]
                at = there.stop
        return canvas.arrays()

    def _stream(self, documents: Documents, canvas: Canvas, row: int, pieces: Pieces) -> None:
        if len(pieces) == 0:
            return
        found = [self._read(documents, *piece) for piece in pieces.tolist()]
        ids, labels = (np.concatenate(column) for column in zip(*found, strict=True))
        tokens = canvas.ids.shape[1]
        canvas.put(row, 0, ids[:tokens], 0)
        canvas.labels[row, : len(labels) - 1] = labels[1:]

    def _read(
        self, documents: Documents, document: int, start: int, end: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Ids of a part of a framed document, and the same with those that are not judged left out."""
        before, after = around(documents)
        ids = framed(documents, document, before, after, start, end)
        kind = documents.corpus.manifest.kind
        if self.everything or kind == "text":
            return ids, ids
        if kind == "chat":
            judged = documents.spoken(document, start, start + len(ids))
        else:
            judged = np.arange(start, start + len(ids)) >= len(before) + documents.firsts[document]
        return ids, np.where(judged, ids, IGNORED)


@dataclass(frozen=True)
class PrefixLM(Causal):
    """A prefix that is read both ways, and the next token after it (T5, arXiv:1910.10683, section 3.2.1).

    The prefix of a pair is its source; that of a text ends anywhere, uniformly, by the row's seed.
    """

    name: ClassVar[str] = "prefix"

    def check(self, documents: Documents, layout: Layout) -> None:
        """Refuse rows of several documents, as a row has one prefix."""
        super().check(documents, layout)
        pairs = documents.corpus.manifest.kind == "pairs"
        refuse_mode(self.name, layout, ("padded",) if pairs else ("padded", "concatenated"))
        if pairs:
            refuse_split(self.name, layout)
        refuse_kind(self.name, documents, ("text", "pairs"))

    def fill(
        self, documents: Documents, rows: Sequence[Pieces], tokens: int, seeds: Sequence[int], streamed: bool
    ) -> dict[str, Any]:
        """As for the next token, with `prefix_lengths`; see `Objective`."""
        arrays = super().fill(documents, rows, tokens, seeds, streamed)
        lengths = np.zeros(len(rows), np.int64)
        before, _ = around(documents)
        for row, pieces in enumerate(rows):
            real = int(arrays["attention_mask"][row].sum())
            if documents.corpus.manifest.kind == "pairs":
                lengths[row] = len(before) + documents.firsts[pieces[0, 0]] if len(pieces) else 0
            elif real > 1:
                lengths[row] = 1 + int(uniform(seeds[row], 1)[0] * (real - 1))
            arrays["labels"][row, : max(int(lengths[row]) - 1, 0)] = IGNORED
        return {**arrays, "prefix_lengths": lengths}
