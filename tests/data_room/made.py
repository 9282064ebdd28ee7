"""Corpora for the tests: from lists of ids in memory, or from texts on the disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scantling.data.corpus import Corpus, Manifest, Marks
from scantling.data.mixing import mix
from scantling.data.shards import RECORD, Shard

BOS, EOS, PAD, MASK = 1, 2, 0, 3
PLAIN = Marks(special=(0, 1, 2, 3), eos=EOS, mask=MASK)
FRAMED = Marks(before=(BOS,), special=(0, 1, 2, 3), eos=EOS, mask=MASK)
ENCODER = Marks(before=(BOS,), after=(EOS,), special=(0, 1, 2, 3), eos=EOS, mask=MASK)
BARE = Marks()


def corpus(
    documents: Sequence[Sequence[int]],
    marks: Marks = PLAIN,
    *,
    kind: str = "text",
    firsts: Sequence[int] | None = None,
    spoken: Sequence[Sequence[bool]] | None = None,
    held_out: float = 0.0,
    vocab_size: int = 100_000,
    folder: Path = Path("nowhere"),
    shards: int = 1,
) -> Corpus:
    """A corpus of ids, in so many shards."""
    cuts = np.array_split(np.arange(len(documents)), shards)
    made = []
    for cut in cuts:
        rows = [(len(documents[n]), firsts[n] if firsts else 0, len(documents[n]), mix(n)) for n in cut]
        flat = [i for n in cut for i in documents[n]]
        mask = None if spoken is None else np.array([s for n in cut for s in spoken[n]], np.uint8)
        made.append(Shard(np.array(flat, np.uint32), np.array(rows, RECORD), mask))
    key = f"{mix(*(i for d in documents for i in (len(d), *d))):016x}"
    plan: dict[str, Any] = {"sources": [], "tokenizer": "", "options": {}}
    return Corpus(folder, Manifest(key, kind, plan, vocab_size, "uint32", marks, ()), made, held_out)  # type: ignore[arg-type]


def numbered(*lengths: int, first: int = 10) -> list[list[int]]:
    """Documents of these lengths, all of whose tokens are different."""
    found, at = [], first
    for length in lengths:
        found.append(list(range(at, at + length)))
        at += length
    return found
