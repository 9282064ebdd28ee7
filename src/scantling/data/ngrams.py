"""How much of a text to be evaluated stands in the text that was trained on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from scantling.data.corpus import Documents
from scantling.data.mixing import mix, stream
from scantling.errors import ScantlingInputError

N = 13
"""Tokens of an n-gram, as GPT-3 takes words (arXiv:2005.14165, appendix C)."""

_CHUNK_TOKENS = 2**20
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Overlap:
    """What two sets of documents share. N-grams are compared by hashes of 64 bits and do not cross documents.

    Attributes:
        n: tokens of an n-gram.
        ngrams: of the evaluated documents, each place counted.
        shared: those of them that stand somewhere in the training documents.
        documents: that have an n-gram at all.
        touched: those of them that share one.
        shares: (N,) of each evaluated document the share of its n-grams that is shared; NaN where it is too short.
    """

    n: int
    ngrams: int
    shared: int
    documents: int
    touched: int
    shares: NDArray[np.float64] = field(repr=False)

    @property
    def share(self) -> float:
        """Of the n-grams; 0 where there are none."""
        return self.shared / self.ngrams if self.ngrams else 0.0


def overlap(training: Documents, evaluated: Documents, n: int = N) -> Overlap:
    """Compare the n-grams of two sets of documents of the same tokenizer.

    Raises:
        ScantlingInputError: n is no length of an n-gram, or the tokenizers differ.
    """
    if n < 1:
        raise ScantlingInputError(f"n-grams of {n} tokens: at least 1 is needed")
    sides = training.corpus.manifest, evaluated.corpus.manifest
    if sides[0].made_of["tokenizer"] != sides[1].made_of["tokenizer"]:
        raise ScantlingInputError("the two sets of documents are of two tokenizers, so their tokens cannot be compared")
    found = list(_hashes(evaluated, n))
    hashes, owners = (np.concatenate(column) for column in zip(*found, strict=True)) if found else _none()
    wanted, place = np.unique(hashes, return_inverse=True)
    seen = np.zeros(len(wanted), np.bool_)
    for chunk, _ in _hashes(training, n):
        if len(wanted):
            at = np.minimum(np.searchsorted(wanted, chunk), len(wanted) - 1)
            seen[at[wanted[at] == chunk]] = True
    shared = seen[place]
    counts = np.bincount(owners, minlength=len(evaluated))
    hits = np.bincount(owners, weights=shared, minlength=len(evaluated))
    with np.errstate(invalid="ignore"):
        shares = hits / counts
    return Overlap(n, len(hashes), int(shared.sum()), int((counts > 0).sum()), int((hits > 0).sum()), shares)


def _none() -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    return np.zeros(0, np.uint64), np.zeros(0, np.int64)


def _hashes(documents: Documents, n: int) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.int64]]]:
    """Hashes of all n-grams, and the document of each, some documents at a time."""
    values = stream(mix(n), documents.corpus.manifest.vocab_size)
    waiting: list[int] = []
    size = 0
    for document in range(len(documents)):
        waiting.append(document)
        size += int(documents.lengths[document])
        if size >= _CHUNK_TOKENS or document == len(documents) - 1:
            ids = np.concatenate([documents.ids(number) for number in waiting])
            owners = np.repeat(waiting, documents.lengths[waiting])
            yield _windows(values[ids], owners, n)
            waiting, size = [], 0


def _windows(
    values: NDArray[np.uint64], owners: NDArray[np.int64], n: int
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    count = max(len(values) - n + 1, 0)
    hashes = np.zeros(count, np.uint64)
    with np.errstate(over="ignore"):
        for offset in range(n):
            hashes = hashes * _FACTOR + values[offset : offset + count]
    inside = owners[:count] == owners[len(owners) - count :]
    return hashes[inside], owners[:count][inside]
