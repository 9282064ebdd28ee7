"""Empty rows, and documents written into them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from scantling.data.corpus import Documents

IGNORED = -100
"""The label of a place that is not judged."""


class Canvas:
    """Rows of `tokens` places, all padding at first: id `pad`, label -100, document 0, position 0."""

    def __init__(self, rows: int, tokens: int, pad: int) -> None:
        shape = (rows, tokens)
        self.ids = np.full(shape, pad, np.int64)
        self.labels = np.full(shape, IGNORED, np.int64)
        self.document_ids = np.zeros(shape, np.int64)
        self.position_ids = np.zeros(shape, np.int64)
        self.attention_mask = np.zeros(shape, np.bool_)

    def put(self, row: int, at: int, ids: NDArray[np.int64], document: int) -> slice:
        """Write a document's ids from place `at` on; what follows in the row is the next document's, or padding's."""
        there = slice(at, at + len(ids))
        self.ids[row, there] = ids
        self.document_ids[row, there] = document
        self.document_ids[row, there.stop :] = document + 1
        self.position_ids[row, there] = np.arange(len(ids))
        self.position_ids[row, there.stop :] = np.arange(self.ids.shape[1] - there.stop)
        self.attention_mask[row, there] = True
        return there

    def arrays(self) -> dict[str, Any]:
        """The fields of a batch."""
        return dict(vars(self))


def framed(
    documents: Documents, document: int, before: tuple[int, ...], after: tuple[int, ...], start: int, end: int
) -> NDArray[np.int64]:
    """Places start .. end - 1 of a document with `before` and `after` around it; places past its end are left out."""
    first = len(before)
    last = first + int(documents.lengths[document])
    inner = documents.ids(document, max(start - first, 0), max(min(end, last) - first, 0))
    tail = after[max(start - last, 0) : max(end - last, 0)]
    return np.concatenate([np.array(before[start:end], np.int64), inner, np.array(tail, np.int64)])
