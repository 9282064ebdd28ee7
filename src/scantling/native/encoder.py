"""An encoder over packed weights: any number of texts, of any lengths, side by side without padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from scantling.native.decoder import Decoder
from scantling.native.packed import Packed
from scantling.native.program import Outline
from scantling.native.tiles import ROWS, padded
from scantling.native.weights import OfNet

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_TOKENS = 256
"""Of a pass with more than one text: enough for products to be fast, and few enough for their rows to stay near."""


class Encoder:
    """The last hidden states of texts.

    Attributes:
        longest: tokens that a text may have.
    """

    def __init__(self, outline: Outline, tensors: Mapping[str, Any], longest: int, threads: int | None = None) -> None:
        """Pack the weights of a state dict and make room for texts.

        Raises:
            ScantlingInputError: no compiler, or too little memory.
        """
        self.longest, rows = longest, max(longest, MOST_TOKENS)
        packed = Packed(outline, OfNet(_with_types(outline, tensors)))
        # Every text begins a page, so there may be as many as there are texts of one token.
        self._pass = Decoder(packed, slots=rows, capacity=longest, pages=rows, rows=rows, threads=threads)

    def states(self, texts: Sequence[list[int]]) -> Iterator[tuple[range, NDArray[np.float32]]]:
        """Which texts ran together, and their states one behind the other, (tokens, d); to be copied if kept.

        Raises:
            ScantlingInputError: a token is outside the vocabulary, or a text longer than `longest`.
        """
        start = 0
        while start < len(texts):
            end, tokens = start + 1, len(texts[start])
            while end < len(texts) and tokens + len(texts[end]) <= MOST_TOKENS:
                tokens += len(texts[end])
                end += 1
            yield range(start, end), self._run(texts[start:end])
            start = end

    def _run(self, texts: Sequence[list[int]]) -> NDArray[np.float32]:
        lengths = [len(text) for text in texts]
        ids = [token for text in texts for token in text]
        slots = np.repeat(np.arange(len(texts)), lengths)
        positions = np.concatenate([np.arange(length) for length in lengths])
        page = 0
        for slot, length in enumerate(lengths):
            count = padded(length, ROWS) // ROWS
            self._pass.pages[slot, :count] = np.arange(page, page + count)
            page += count
        self._pass.run(ids, slots, positions, np.zeros(len(ids), bool))
        return self._pass.logits[: len(ids)]


def _with_types(outline: Outline, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every token is of the first type, so its vector may stand in the table of positions."""
    if outline.stack.types is None:
        return tensors
    places = f"{outline.path}.position.table.weight"
    first = tensors[f"{outline.path}.types.table.weight"][0]
    return {**tensors, places: tensors[places].float() + first.float()}
