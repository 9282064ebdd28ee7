"""Batches of rows for a trainer: the same global batches on any number of ranks, resumed from a small cursor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from scantling.data.batch import Batch
from scantling.data.corpus import Corpus, Documents
from scantling.data.feed import Feed
from scantling.data.layout import Layout, Schedule, at, check_schedule
from scantling.data.objectives import Objective
from scantling.data.rows import Place, Reader
from scantling.errors import ScantlingInputError


def batches(
    corpus: Corpus | Documents,
    objective: Objective | str,
    batch: Schedule,
    tokens: Schedule,
    mode: Layout | str = "packed",
    seed: int = 0,
    cursor: Mapping[str, Any] | None = None,
    ranks: int = 1,
    rank: int = 0,
) -> Iterator[Batch]:
    """Batches without end, epoch after epoch; a batch may begin in one epoch and end in the next.

    Args:
        corpus: a corpus, of which the half to train on is read, or some of its documents.
        objective: what is learned; a name is that objective with its defaults.
        batch: rows of all ranks together; over the steps it may change.
        tokens: of a row, T; over the steps it may change (a context curriculum).
        mode: how documents are put into rows.
        seed: of the order and of the noise.
        cursor: of the last batch that was used; None begins.
        ranks, rank: this rank gets rows rank * batch / ranks on of each batch.

    Raises:
        ScantlingInputError: settings that do not go together, documents that are too long, a batch that the ranks
            cannot share, or a cursor of other data.
    """
    if not 0 <= rank < ranks:
        raise ScantlingInputError(f"rank {rank} of {ranks}: ranks are counted from 0")
    check_schedule(batch, "batch", ranks)
    check_schedule(tokens, "tokens")
    feed = Feed(corpus, objective, mode, seed, tokens)
    step, place = feed.resumed(cursor)
    return _endless(feed, feed.reader(place, epochs=None), batch, tokens, step, (ranks, rank))


def _endless(
    feed: Feed, reader: Reader, batch: Schedule, tokens: Schedule, step: int, share: tuple[int, int]
) -> Iterator[Batch]:
    while True:
        length = at(tokens, step)
        rows = reader.take(at(batch, step), length)
        step += 1
        yield feed.batch(rows, length, step, reader.place, share)


def one_pass(
    documents: Documents,
    objective: Objective | str,
    batch: int,
    tokens: int,
    mode: Layout | str = "packed",
    seed: int = 0,
    ranks: int = 1,
    rank: int = 0,
) -> Iterator[Batch]:
    """Every document once, in order, as for an evaluation.

    The last batch is filled up with rows of padding, whose labels are -100, so all batches have the same shape.
    """
    check_schedule(batch, "batch", ranks)
    check_schedule(tokens, "tokens")
    feed = Feed(documents, objective, mode, seed, tokens)
    return _once(feed, feed.reader(Place(), epochs=1), batch, tokens, (ranks, rank))


def _once(feed: Feed, reader: Reader, batch: int, tokens: int, share: tuple[int, int]) -> Iterator[Batch]:
    step = 0
    while rows := reader.take(batch, tokens):
        step += 1
        rows += [np.zeros((0, 3), np.int64)] * (batch - len(rows))
        yield feed.batch(rows, tokens, step, reader.place, share)
