"""Texts that grow in the slots of a decoder, each as long as it became."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from scantling.native.decoder import Decoder

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Texts:
    """Text i stands in slot i of a decoder.

    Attributes:
        decoder: its cache and threads.
        lengths: positions of each text.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.lengths = decoder, [0] * decoder.slots

    def read(self, rows: Sequence[tuple[int, int]], wanted: Sequence[bool]) -> NDArray[np.float32]:
        """Tokens as (text, id), those of a text in order, in as many passes as it takes.

        Returns:
            Logits (n, vocabulary) behind each token that is `wanted`.
        """
        found, most = [], self.decoder.most_rows
        for start in range(0, len(rows), most):
            piece, asked = rows[start : start + most], wanted[start : start + most]
            slots = [slot for slot, _ in piece]
            self.decoder.run([token for _, token in piece], slots, self._places(slots), asked)
            if any(asked):
                found.append(self.decoder.logits[: sum(asked)].copy())
        return np.concatenate(found)

    def _places(self, slots: list[int]) -> list[int]:
        places = []
        for slot in slots:
            places.append(self.lengths[slot])
            self.lengths[slot] += 1
        return places

    def select(self, chosen: Sequence[int]) -> None:
        """Make text i what text chosen[i] was; their number may change."""
        self.decoder = self.decoder.select(chosen)
        self.lengths = [self.lengths[row] for row in chosen]
