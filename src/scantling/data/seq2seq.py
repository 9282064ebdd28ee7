"""Sources and targets for an encoder-decoder: pairs, and texts with spans left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from scantling.data.canvas import IGNORED, Canvas
from scantling.data.corpus import Documents, Marks
from scantling.data.layout import Layout
from scantling.data.mixing import mix, permutation
from scantling.data.objectives import refuse_kind, refuse_mode, refuse_split
from scantling.data.rows import Pieces
from scantling.errors import ScantlingInputError


def two_sides(
    pairs: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]], lengths: tuple[int, int], pad: int, start_id: int
) -> dict[str, Any]:
    """The arrays of a batch with a source and a target in each row.

    The decoder reads the target shifted right by one, with the start token first, and is judged on the target itself:
    labels [7, 8, 9, 1] are read as [start, 7, 8, 9].

    Args:
        pairs: ids of source and target of each row; two empty ones make a row of padding.
        lengths: of the rows of both sides.
    """
    source = Canvas(len(pairs), lengths[0], pad)
    labels = np.full((len(pairs), lengths[1]), IGNORED, np.int64)
    decoder_ids = np.full((len(pairs), lengths[1]), pad, np.int64)
    for row, (first, second) in enumerate(pairs):
        if len(first):
            source.put(row, 0, first, 0)
        labels[row, : len(second)] = second
        if len(second):
            decoder_ids[row, : len(second)] = np.concatenate([[start_id], second[:-1]])
    arrays = source.arrays()
    return {**arrays, "labels": labels, "decoder_ids": decoder_ids, "decoder_mask": labels != IGNORED}


@dataclass(frozen=True)
class Seq2Seq:
    """Pairs of source and target, one a row.

    Attributes:
        start_id: what the decoder reads first; None is the id of padding, as T5 has it.
        target_tokens: length of the target's rows; None is that of the source's.
    """

    name: ClassVar[str] = "seq2seq"
    ahead: ClassVar[int] = 0

    start_id: int | None = None
    target_tokens: int | None = None

    def check(self, documents: Documents, layout: Layout) -> None:
        """Refuse data that are no pairs, and rows that would cut them."""
        refuse_kind(self.name, documents, ("pairs",))
        refuse_mode(self.name, layout, ("padded",))
        refuse_split(self.name, layout)

    def units(self, documents: Documents, streamed: bool) -> NDArray[np.int64]:
        """One: a pair is never cut."""
        return np.ones(len(documents), np.int64)

    def room(self, tokens: int, marks: Marks) -> int:
        """One pair."""
        return 1

    def overhead(self, marks: Marks) -> int:
        """None."""
        return 0

    def needs(self, documents: Documents, tokens: int) -> NDArray[np.int64]:
        """Length of the row that holds the source, or, as far as targets' rows are shorter, the target."""
        marks = documents.corpus.marks
        source = documents.firsts + len(marks.before) + len(marks.after)
        target = documents.lengths - documents.firsts + len(marks.before) + len(marks.ends)
        longer: NDArray[np.int64] = np.maximum(source, target + tokens - (self.target_tokens or tokens))
        return longer

    def fill(
        self, documents: Documents, rows: Sequence[Pieces], tokens: int, seeds: Sequence[int], streamed: bool
    ) -> dict[str, Any]:
        """Sources and targets; what is longer than its row is cut short. See `Objective`."""
        marks, lengths = documents.corpus.marks, (tokens, self.target_tokens or tokens)
        pairs = []
        for pieces in rows:
            if len(pieces) == 0:
                pairs.append((_NOTHING, _NOTHING))
                continue
            document, first = int(pieces[0, 0]), int(documents.firsts[pieces[0, 0]])
            source = _shortened(documents.ids(document, 0, first), marks.before, marks.after, lengths[0], ended=True)
            target = _shortened(documents.ids(document, first), marks.before, marks.ends, lengths[1], ended=False)
            pairs.append((source, target))
        return two_sides(pairs, lengths, marks.pad, marks.pad if self.start_id is None else self.start_id)


_NOTHING = np.zeros(0, np.int64)


def _shortened(
    ids: NDArray[np.int64], before: tuple[int, ...], after: tuple[int, ...], longest: int, *, ended: bool
) -> NDArray[np.int64]:
    """Ids with the special tokens around them, in at most `longest`; one that was cut keeps its end mark if `ended`.

    A source is always closed, as the encoder knows it; a target that goes on must not teach to stop.
    """
    room = longest - len(before) - len(after)
    if len(ids) <= room:
        parts = (before, ids, after)
    elif ended:
        parts = (before, ids[:room], after)
    else:
        parts = (before, ids[: longest - len(before)], ())
    return np.concatenate([np.array(part, np.int64) for part in parts])


@dataclass(frozen=True)
class SpanCorruption:
    """Spans of a text are left out and told by the decoder (T5, arXiv:1910.10683, section 3.1.4).

    A row of T source tokens holds a text that is longer by what the spans save, as T5's `random_spans_helper` reckons:
    512 tokens of 568 with 114 of target. The numbers of noise tokens and spans are fixed by the length, and all ways to
    cut it into such spans are equally likely (`random_spans_noise_mask`).

    Attributes:
        density: share of the tokens that is left out.
        mean_span: mean length of a span.
        start_id: what the decoder reads first; None is the id of padding, as T5 has it.
    """

    name: ClassVar[str] = "spans"
    ahead: ClassVar[int] = 0

    density: float = 0.15
    mean_span: float = 3.0
    start_id: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.density < 1.0 or self.mean_span < 1.0:
            raise ScantlingInputError(
                f"spans of mean length {self.mean_span} with density {self.density}: a length of at least 1 and a "
                "density between 0 and 1 are needed"
            )

    def check(self, documents: Documents, layout: Layout) -> None:
        """Refuse a tokenizer without sentinels."""
        refuse_kind(self.name, documents, ("text",))
        refuse_mode(self.name, layout, ("padded", "concatenated"))
        if not documents.corpus.marks.sentinels:
            raise ScantlingInputError(
                "the tokenizer has no tokens <extra_id_0>, <extra_id_1> and so on, which the objective 'spans' needs"
            )

    def units(self, documents: Documents, streamed: bool) -> NDArray[np.int64]:
        """Tokens; a stream of documents has nothing between them, as in T5."""
        return documents.lengths

    def room(self, tokens: int, marks: Marks) -> int:
        """Tokens of the text that fill a row of so many source tokens."""
        text = _longest(self, tokens, len(marks.ends))
        if self.spans(text)[1] > len(marks.sentinels):
            raise ScantlingInputError(
                f"rows of {tokens} tokens need {self.spans(text)[1]} sentinels, and the tokenizer has "
                f"{len(marks.sentinels)}: take shorter rows, or another tokenizer"
            )
        return text

    def overhead(self, marks: Marks) -> int:
        """None: a row has one piece."""
        return 0

    def needs(self, documents: Documents, tokens: int) -> NDArray[np.int64]:
        """Length of the row that holds each document whole."""
        marks = documents.corpus.marks
        sizes, place = np.unique(documents.lengths, return_inverse=True)
        return np.array([self.lengths(int(size), marks)[0] for size in sizes], np.int64)[place]

    def spans(self, length: int) -> tuple[int, int]:
        """Tokens left out of a text of so many tokens, and in how many spans."""
        length = max(length, 2)
        noise = min(max(round(length * self.density), 1), length - 1)
        return noise, min(max(round(noise / self.mean_span), 1), noise, length - noise)

    def lengths(self, length: int, marks: Marks) -> tuple[int, int]:
        """Tokens of source and target for a text of so many tokens, end marks included."""
        noise, spans = self.spans(length)
        return length - noise + spans + len(marks.ends), noise + spans + len(marks.ends)

    def noise(self, length: int, seed: int) -> NDArray[np.bool_]:
        """(length,) True at what is left out; text comes first, and spans of both kinds take turns."""
        size = max(length, 2)
        noise, spans = self.spans(size)
        cuts = _segments(size - noise, spans, mix(seed, 1)), _segments(noise, spans, mix(seed, 2))
        return np.repeat(np.tile([False, True], spans), np.column_stack(cuts).ravel())[:length]

    def fill(
        self, documents: Documents, rows: Sequence[Pieces], tokens: int, seeds: Sequence[int], streamed: bool
    ) -> dict[str, Any]:
        """What is left of each text, and what was left out; see `Objective`."""
        marks = documents.corpus.marks
        pairs = []
        for pieces, seed in zip(rows, seeds, strict=True):
            if len(pieces) == 0:
                pairs.append((_NOTHING, _NOTHING))
                continue
            text = np.concatenate([documents.ids(*piece) for piece in pieces.tolist()])
            noise = self.noise(len(text), seed)
            ends, sentinels = np.array(marks.ends, np.int64), np.array(marks.sentinels, np.int64)
            source, target = (_marked(text, out, sentinels) for out in (noise, ~noise))
            pairs.append((np.concatenate([source, ends]), np.concatenate([target, ends])))
        lengths = tokens, self.lengths(self.room(tokens, marks), marks)[1]
        return two_sides(pairs, lengths, marks.pad, marks.pad if self.start_id is None else self.start_id)


@cache
def _longest(how: SpanCorruption, tokens: int, ends: int) -> int:
    """Tokens of the longest text whose source has at most `tokens`, with so many end marks."""
    marks = Marks(after=(0,) * ends)
    text = tokens - ends
    while how.lengths(text + 1, marks)[0] <= tokens:
        text += 1
    # T5 makes both sides equally long where half of the text is left out.
    return text - (how.density == 0.5 and how.lengths(text, marks)[1] > tokens)


def _segments(items: int, segments: int, seed: int) -> NDArray[np.int64]:
    """Lengths, each at least 1, of so many segments of `items`; all ways are equally likely."""
    starts = np.sort(permutation(seed, items - 1)[: segments - 1] + 1)
    return np.diff(np.concatenate([[0], starts, [items]]))


def _marked(text: NDArray[np.int64], out: NDArray[np.bool_], sentinels: NDArray[np.int64]) -> NDArray[np.int64]:
    """The text with each run of what is `out` made one sentinel."""
    first = out & ~np.concatenate([[False], out[:-1]])
    replaced: NDArray[np.int64] = np.where(first, sentinels[np.maximum(np.cumsum(first) - 1, 0)], text)
    kept: NDArray[np.int64] = replaced[first | ~out]
    return kept
