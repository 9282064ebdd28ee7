"""An interpolated byte trigram: what a model must beat to have learned more than letters."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scantling.data import Corpus, Documents

Bytes = NDArray[np.uint8]


def texts_of(corpus: Corpus, documents: Documents, limit: int | None = None) -> list[Bytes]:
    """The texts of documents as bytes, of at most `limit` tokens from the beginning, as an evaluation reads them."""
    tokenizer, left, found = corpus.tokenizer, limit if limit is not None else documents.tokens, []
    for i in range(len(documents)):
        ids = documents.ids(i)[:left].tolist()
        left -= len(ids)
        found.append(np.frombuffer(tokenizer.decode(ids).encode(), np.uint8))
        if left <= 0:
            break
    return found


class Trigram:
    """p(c | a b) = w3 p3 + w2 p2 + w1 p1 + w0 / 256 (Jelinek and Mercer, 1980), the weights by EM on text of their own.

    Counts are of the first nine tenths of the texts, the weights of the last.
    """

    def __init__(self, texts: list[Bytes]) -> None:
        cut = max(1, len(texts) * 9 // 10)
        self.three = np.zeros(256**3, np.int64)
        for text in texts[:cut]:
            wide = text.astype(np.int64)
            np.add.at(self.three, wide[:-2] * 65536 + wide[1:-1] * 256 + wide[2:], 1)
        cube = self.three.reshape(256, 256, 256)
        self.two = cube.sum(0)
        self.one = self.two.sum(0)
        self.weights = np.full(4, 0.25)
        parts = np.concatenate([self._parts(text) for text in texts[cut:] or texts[:1]])
        for _ in range(30):
            shares = parts * self.weights
            self.weights = (shares / shares.sum(1, keepdims=True)).mean(0)

    def _parts(self, text: Bytes) -> NDArray[np.float64]:
        """The four probabilities of each byte from the third on, (n - 2, 4)."""
        a, b, c = (text[i : len(text) - 2 + i].astype(np.int64) for i in range(3))
        cube = self.three.reshape(256, 256, 256)
        three = cube[a, b, c] / np.maximum(cube.sum(2)[a, b], 1)
        two = self.two[b, c] / np.maximum(self.two.sum(1)[b], 1)
        one = self.one[c] / self.one.sum()
        return np.stack([three, two, one, np.full(len(c), 1 / 256)], 1)

    def bits_per_byte(self, texts: list[Bytes]) -> float:
        """Over all bytes from the third of each text on."""
        bits = [-np.log2(self._parts(text) @ self.weights) for text in texts if len(text) > 2]
        return float(np.concatenate(bits).mean())
