"""The rows of a batch put in another way that must give the same gradient, or labels left out where it shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from scantling.data import Batch
from scantling.train.scoring import IGNORED


def uneven(batch: Batch) -> Batch:
    """Most labels of the first half are left out, so that a mean of means would be another loss."""
    thinned, half = batch.labels.copy(), max(1, len(batch.ids) // 2)
    later = (thinned[:half] != IGNORED).cumsum(1) > 2
    thinned[:half][later] = IGNORED
    return replace(batch, labels=thinned)


def halves(batch: Batch) -> Batch:
    """Rows that hold the beginnings of two documents each, where no row of the data holds two."""
    half = batch.ids.shape[1] // 2

    def paired(array: Any) -> Any:
        return np.concatenate([array[:, :half], np.roll(array, 1, 0)[:, :half]], 1)

    labels = paired(batch.labels)
    labels[:, [half - 1, -1]] = IGNORED
    documents = np.repeat(np.array([[0, 1]]), half, 1).repeat(len(batch.ids), 0)
    return replace(
        batch,
        ids=paired(batch.ids),
        labels=labels,
        position_ids=paired(batch.position_ids),
        attention_mask=paired(batch.attention_mask),
        document_ids=documents,
    )


def separate(batch: Batch) -> Batch:
    """Each document of the rows in a row of its own."""
    rows = [
        (row, np.flatnonzero((batch.document_ids[row] == number) & batch.attention_mask[row]))
        for row in range(len(batch.ids))
        for number in np.unique(batch.document_ids[row][batch.attention_mask[row]])
    ]
    shape = (len(rows), max(len(places) for _, places in rows))
    ids, labels = np.zeros(shape, np.int64), np.full(shape, IGNORED)
    mask, at = np.zeros(shape, np.bool_), np.broadcast_to(np.arange(shape[1]), shape).copy()
    for i, (row, places) in enumerate(rows):
        ids[i, : len(places)], labels[i, : len(places)] = batch.ids[row, places], batch.labels[row, places]
        mask[i, : len(places)] = True
    documents = np.where(mask, 0, 1)
    return replace(batch, ids=ids, labels=labels, attention_mask=mask, position_ids=at, document_ids=documents)
