"""Scoring held-out text: every token once, with stated windows, and in bits per byte where bytes are known."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from scantling.errors import ScantlingInputError
from scantling.model import Model
from scantling.train.forward import How, Inputs, forward, inputs
from scantling.train.ranks import ALONE, Ranks
from scantling.train.scoring import IGNORED

if TYPE_CHECKING:
    from scantling.data import Corpus, Documents, Objective

ROWS = 8
"""Windows that run together."""


@dataclass(frozen=True)
class Score:
    """Sums over judged tokens; they add up over texts, so a mean never depends on how texts were batched.

    Attributes:
        nll: negative log-probability, in nats.
        tokens: judged.
        bytes: of the text that the judged tokens make, in UTF-8; None where that has no meaning.
    """

    nll: float = 0.0
    tokens: int = 0
    bytes: float | None = 0.0

    def __add__(self, other: Score) -> Score:
        unknown = self.bytes is None or other.bytes is None
        return Score(
            self.nll + other.nll,
            self.tokens + other.tokens,
            None if unknown else (self.bytes or 0.0) + (other.bytes or 0.0),
        )

    @property
    def loss(self) -> float:
        """Mean over judged tokens, in nats."""
        return self.nll / self.tokens

    @property
    def perplexity(self) -> float:
        """exp of the loss; infinite where that is too large for a float."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """The loss that does not depend on the vocabulary."""
        return self.nll / math.log(2) / self.bytes if self.bytes else None


@dataclass(frozen=True)
class Windows:
    """How a text that is longer than the context is cut.

    Attributes:
        size: tokens of a window, its start token included.
        stride: new tokens of each window after the first; the others are context that was judged before.
        start: an id that every window begins with and that is never judged; None for none.
        half: llama.cpp's way, comparable with nothing else: windows do not overlap, and only the second half of each
            is judged.
    """

    size: int
    stride: int
    start: int | None = None
    half: bool = False

    def __post_init__(self) -> None:
        # One place is the start token's, or that of the one token which the first judged one follows.
        if self.size < 2 or not 1 <= self.stride < self.size:
            raise ScantlingInputError(
                f"windows of {self.size} tokens with a stride of {self.stride}: at least 2 tokens, and a stride of at "
                "least 1 and below the window, are needed"
            )

    def cut(self, ids: Sequence[int] | NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Ids and labels of each window: labels are at the place before their token, -100 where none is judged."""
        whole = np.asarray(ids, np.int64)
        head = np.array([] if self.start is None else [self.start], np.int64)
        room = self.size - len(head)
        done, begin = (0 if len(head) else 1), 0
        while done < len(whole):
            end = min(begin + room, len(whole))
            row = np.concatenate([head, whole[begin:end]])
            first = max(done, begin + room // 2) if self.half else done
            labels = np.full(len(row), IGNORED)
            # Token j stands at j - begin + len(head); its label one place before.
            at = np.arange(first, end) - begin + len(head) - 1
            labels[at] = whole[first:end]
            yield row, labels
            done = end
            begin = end if self.half else begin + self.stride


def windows_for(lm: Model, stride: int | None = None, size: int | None = None, start: int | None = None) -> Windows:
    """Windows as long as the context, each with a half of new tokens unless another stride is given.

    Raises:
        ScantlingInputError: longer than the model's positions, or a stride out of range.
    """
    limit = lm.card.context
    size = limit if size is None else size
    if size > limit:
        raise ScantlingInputError(f"windows of {size} tokens are longer than the context of {lm.card.name}, {limit}")
    return Windows(size, max(1, size // 2) if stride is None else stride, start)


def score(lm: Model, ids: Sequence[int] | NDArray[np.int64], windows: Windows, how: How | None = None) -> Score:
    """Score one text of a decoder. Where there is no start token the first token is not judged.

    Raises:
        ScantlingInputError: no decoder, or nothing to judge.
    """
    found = _score_windows(lm, windows.cut(ids), how or How())
    if not found.tokens:
        raise ScantlingInputError("no token is judged: a text needs two tokens, or one and a start token")
    return found


def score_text(lm: Model, text: str, windows: Windows, how: How | None = None) -> Score:
    """Score one text through the model's tokenizer, whose own start token is not doubled.

    Raises:
        ScantlingInputError: the model has no tokenizer, or as `score`.
    """
    if lm.tokenizer is None:
        raise ScantlingInputError(f"{lm.card.name} has no tokenizer to read a text with")
    ids = lm.tokenizer.encode(text)
    while windows.start is not None and ids and ids[0] == windows.start:
        ids = ids[1:]
    first = 0 if windows.start is not None else _bytes_of(lm, ids[:1])
    return replace(score(lm, ids, windows, how), bytes=len(text.encode()) - first)


def score_documents(
    lm: Model,
    documents: Documents,
    windows: Windows,
    limit: int | None = None,
    how: How | None = None,
    ranks: Ranks = ALONE,
) -> Score:
    """Score the documents of a corpus, each for itself, the first ones up to `limit` tokens; ranks share the windows.

    Raises:
        ScantlingInputError: no decoder, or nothing to judge.
    """
    left = documents.tokens if limit is None else limit
    total_bytes = 0.0

    def rows() -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        nonlocal left, total_bytes
        for i in range(len(documents)):
            if left <= 0:
                return
            ids = documents.ids(i)
            share = min(1.0, left / max(len(ids), 1))
            ids = ids[:left]
            left -= len(ids)
            if len(ids) + (windows.start is not None) < 2:
                continue
            spared = 0 if windows.start is not None else _bytes_of(lm, ids[:1].tolist())
            total_bytes += replace(documents, spans=documents.spans[i : i + 1]).bytes * share - spared
            yield from windows.cut(ids)

    found = _score_windows(lm, rows(), how or How(), ranks)
    if not found.tokens:
        raise ScantlingInputError("no token of the held-out text is judged: documents of two tokens are needed")
    return replace(found, bytes=total_bytes)


@dataclass(frozen=True)
class Rows:
    """How documents are put into rows: so many tokens each, packed, padded or concatenated."""

    tokens: int
    mode: str


def score_objective(
    lm: Model,
    documents: Documents,
    objective: Objective | str,
    rows: Rows,
    limit: int | None,
    how: How,
    ranks: Ranks = ALONE,
) -> Score:
    """Score documents under the objective of a run, with the same noise every time; bytes have no meaning there."""
    from scantling.data import one_pass

    total = Score(bytes=None)
    for batch in one_pass(documents, objective, ROWS, rows.tokens, rows.mode, seed=0):
        if limit is not None and total.tokens >= limit:
            break
        judged = int((batch.labels != IGNORED).sum())
        if judged:
            first, end = _mine(len(batch.ids), ranks)
            given = inputs(batch.rows(first, max(end, first + 1)), lm.parts, lm.device)
            total += Score(_nll(lm, given, how) * (end > first), judged, None)
    if not total.tokens:
        raise ScantlingInputError("no token of the held-out text is judged")
    return _summed(total, lm, ranks)


def start_of(corpus: Corpus) -> int | None:
    """The id that every text of this corpus begins with, or None."""
    return corpus.marks.before[0] if corpus.marks.before else None


def _mine(rows: int, ranks: Ranks) -> tuple[int, int]:
    """The rows of a batch that are this rank's; where there are too few, none, from one on that it may run idly."""
    each = -(-rows // ranks.data)
    first = min(ranks.data_rank * each, rows)
    return (rows - 1, rows - 1) if first == rows else (first, min(first + each, rows))


def _summed(score: Score, lm: Model, ranks: Ranks) -> Score:
    """The losses of all ranks together; every one of them has counted all tokens."""
    return replace(score, nll=ranks.sums([score.nll], lm.device)[0])


def _score_windows(
    lm: Model, rows: Iterable[tuple[NDArray[np.int64], NDArray[np.int64]]], how: How, ranks: Ranks = ALONE
) -> Score:
    if lm.card.family != "decoder":
        raise ScantlingInputError(f"a text is scored by a decoder, and {lm.card.name} is of family {lm.card.family}")
    total, waiting = Score(), list[tuple[NDArray[np.int64], NDArray[np.int64]]]()
    for row in rows:
        waiting.append(row)
        if len(waiting) == ROWS:
            total, waiting = total + _run(lm, waiting, how, ranks), []
    return _summed(total + _run(lm, waiting, how, ranks) if waiting else total, lm, ranks)


def _run(lm: Model, rows: list[tuple[NDArray[np.int64], NDArray[np.int64]]], how: How, ranks: Ranks) -> Score:
    """Rows side by side, filled up behind: what comes later is not seen by a decoder. The loss is of this rank's."""
    longest = max(len(ids) for ids, _ in rows)
    ids = np.zeros((len(rows), longest), np.int64)
    labels = np.full((len(rows), longest), IGNORED)
    for i, (some, wanted) in enumerate(rows):
        ids[i, : len(some)], labels[i, : len(some)] = some, wanted
    judged = int((labels != IGNORED).sum())
    if not judged:
        return Score()
    first, end = _mine(len(rows), ranks)
    own = slice(first, max(end, first + 1))
    batch = Inputs(torch.from_numpy(ids[own]).to(lm.device), torch.from_numpy(labels[own]).to(lm.device), judged)
    return Score(_nll(lm, batch, how) * (end > first), judged)


def _nll(lm: Model, batch: Inputs, how: How) -> float:
    with torch.no_grad():
        return float(forward(lm.net, lm.parts, batch, 1.0, how, training=False).nll)


def _bytes_of(lm: Model, ids: Sequence[int]) -> int:
    """Bytes of the text of these ids."""
    return len(lm.tokenizer.decode(list(ids)).encode()) if lm.tokenizer is not None else 0
