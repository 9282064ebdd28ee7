"""Masked words: some tokens are hidden, and told from what stands on both sides (BERT, arXiv:1810.04805)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from scantling.data.canvas import Canvas
from scantling.data.corpus import Documents, Marks
from scantling.data.layout import Layout
from scantling.data.mixing import mix, permutation, uniform
from scantling.data.objectives import refuse_kind
from scantling.data.rows import Pieces
from scantling.data.words import continues
from scantling.errors import ScantlingInputError


@dataclass(frozen=True)
class MaskedLM:
    """Of each row a share of the tokens is judged; of those 80 % are hidden, 10 % replaced, and 10 % left as they are.

    As in BERT (arXiv:1810.04805, section 3.1, and its `create_pretraining_data.py`) the number is exact: max(1,
    round(rate * n)) of the n tokens that are no special ones; whole words are taken while they fit into that number.
    Every piece stands between the tokenizer's own special tokens, such as [CLS] and [SEP].

    Attributes:
        rate: share of the tokens that is judged.
        hidden, replaced: shares of those that become the mask token, and a random ordinary token.
        whole_words: all pieces of a word are taken together.
    """

    name: ClassVar[str] = "masked"
    ahead: ClassVar[int] = 0

    rate: float = 0.15
    hidden: float = 0.8
    replaced: float = 0.1
    whole_words: bool = False

    def __post_init__(self) -> None:
        if not 0.0 < self.rate <= 1.0:
            raise ScantlingInputError(f"the share of masked tokens is {self.rate}; it must be above 0 and at most 1")
        if min(self.hidden, self.replaced) < 0.0 or self.hidden + self.replaced > 1.0:
            raise ScantlingInputError(
                f"of the masked tokens {self.hidden} are hidden and {self.replaced} replaced: together at most 1"
            )

    def check(self, documents: Documents, layout: Layout) -> None:
        """Refuse a tokenizer without a mask token."""
        refuse_kind(self.name, documents, ("text",))
        if documents.corpus.marks.mask is None:
            raise ScantlingInputError("the tokenizer has no mask token, which the objective 'masked' needs")

    def units(self, documents: Documents, streamed: bool) -> NDArray[np.int64]:
        """Tokens; in a stream each document with what ends it."""
        return documents.lengths + (len(documents.corpus.marks.after) if streamed else 0)

    def room(self, tokens: int, marks: Marks) -> int:
        """What the special tokens leave."""
        return tokens - self.overhead(marks)

    def overhead(self, marks: Marks) -> int:
        """The special tokens around a piece."""
        return len(marks.before) + len(marks.after)

    def needs(self, documents: Documents, tokens: int) -> NDArray[np.int64]:
        """Tokens with the special ones."""
        return documents.lengths + self.overhead(documents.corpus.marks)

    def fill(
        self, documents: Documents, rows: Sequence[Pieces], tokens: int, seeds: Sequence[int], streamed: bool
    ) -> dict[str, Any]:
        """Rows with some tokens hidden, and what was there; see `Objective`."""
        marks = documents.corpus.marks
        before, after = (np.array(ids, np.int64) for ids in (marks.before, marks.after))
        canvas = Canvas(len(rows), tokens, marks.pad)
        for row, pieces in enumerate(rows):
            texts = [self._piece(documents, streamed, *piece) for piece in pieces.tolist()]
            if streamed:
                texts = [np.concatenate(texts)] if texts else []
            at = 0
            for number, text in enumerate(texts):
                at = canvas.put(row, at, np.concatenate([before, text, after]), number).stop
            self._hide(documents, canvas, row, seeds[row])
        return canvas.arrays()

    @staticmethod
    def _piece(documents: Documents, streamed: bool, document: int, start: int, end: int) -> NDArray[np.int64]:
        length = int(documents.lengths[document])
        ids = documents.ids(document, min(start, length), min(end, length))
        if not streamed:
            return ids
        after = documents.corpus.marks.after
        return np.concatenate([ids, np.array(after[max(start - length, 0) : max(end - length, 0)], np.int64)])

    def _hide(self, documents: Documents, canvas: Canvas, row: int, seed: int) -> None:
        marks, ids = documents.corpus.marks, canvas.ids[row]
        assert marks.mask is not None
        open_to_choice = np.flatnonzero(canvas.attention_mask[row] & ~documents.corpus.is_special[ids])
        if len(open_to_choice) == 0:
            return
        if self.whole_words:
            starts = ~continues(documents.corpus, ids)[open_to_choice]
            # A word ends with its document, also where nothing stands between two of them.
            starts |= canvas.position_ids[row, open_to_choice] == 0
            words = np.cumsum(starts) - 1
        else:
            words = np.arange(len(open_to_choice))
        chosen = open_to_choice[chosen_words(words, self.rate, mix(seed, 1))]
        canvas.labels[row, chosen] = ids[chosen]
        fate = uniform(mix(seed, 2), len(chosen))
        ordinary = documents.corpus.ordinary_ids
        random = ordinary[(uniform(mix(seed, 3), len(chosen)) * len(ordinary)).astype(np.int64)]
        kept = np.where(fate < self.hidden + self.replaced, random, ids[chosen])
        ids[chosen] = np.where(fate < self.hidden, marks.mask, kept)


def chosen_words(words: NDArray[np.int64], rate: float, seed: int) -> NDArray[np.int64]:
    """Places of the tokens of whole words, drawn at random while they fit into max(1, round(rate * n)) tokens.

    Where no word fits, the first one drawn is taken all the same, as a row without a label teaches nothing.

    Args:
        words: (n,) number of the word of each token, 0, 0, 1, ...
        seed: of the draw.

    Returns:
        Sorted places in `words`.
    """
    wanted = max(1, round(rate * len(words)))
    sizes = np.bincount(words)
    order = permutation(seed, len(sizes))
    if sizes.max() == 1:
        return np.sort(order[:wanted])
    taken, left = [], wanted
    for word in order:
        if sizes[word] <= left:
            taken.append(word)
            left -= int(sizes[word])
        if left == 0:
            break
    return np.flatnonzero(np.isin(words, taken or order[:1]))
