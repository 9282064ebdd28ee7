"""The arrays of one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scantling.data.canvas import IGNORED


@dataclass(frozen=True)
class Batch:
    """Rows for one step, B rows of T tokens; labels are shifted already, -100 is not judged.

    Attributes:
        ids: (B, T) int64; of an encoder-decoder the source's.
        labels: (B, T) int64: what follows each token, or for masked words what was there; of an encoder-decoder (B, U).
        document_ids: (B, T) int64: the documents of a row are 0, 1, ...; its padding is one more.
        position_ids: (B, T) int64, from 0 in each document.
        attention_mask: (B, T) bool, False at padding.
        cursor: where to go on after this batch; plain JSON.
        row_documents: (B,) int64: how many documents, or pieces of one, stand in each row.
        prefix_lengths: (B,) int64 for a prefix language model, else None.
        decoder_ids: (B, U) int64: the target, shifted right, of an encoder-decoder, else None.
        decoder_mask: (B, U) bool beside it.
    """

    ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    document_ids: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    attention_mask: NDArray[np.bool_]
    cursor: Mapping[str, Any]
    row_documents: NDArray[np.int64]
    prefix_lengths: NDArray[np.int64] | None = None
    decoder_ids: NDArray[np.int64] | None = None
    decoder_mask: NDArray[np.bool_] | None = None

    @property
    def documents(self) -> int:
        """Documents, or pieces of one, in these rows."""
        return int(self.row_documents.sum())

    @property
    def tokens(self) -> int:
        """What is no padding in these rows; of an encoder-decoder with the target's."""
        target = 0 if self.decoder_mask is None else int(self.decoder_mask.sum())
        return int(self.attention_mask.sum()) + target

    @property
    def scored(self) -> int:
        """Labels that are judged: what a mean loss over these rows is divided by."""
        return int((self.labels != IGNORED).sum())

    @property
    def utilisation(self) -> float:
        """Share of the places that hold real tokens."""
        places = self.ids.size + (0 if self.decoder_ids is None else self.decoder_ids.size)
        return self.tokens / places

    def rows(self, start: int, end: int) -> Batch:
        """Some rows of it, as for a micro-batch; the cursor is still that of the whole."""
        cut: dict[str, Any] = {}
        for column in fields(self):
            value = getattr(self, column.name)
            cut[column.name] = value[start:end] if isinstance(value, np.ndarray) else value
        return Batch(**cut)
