"""Documents in tokens, ready to be read: a corpus and its two halves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from scantling.data.mixing import mix
from scantling.data.shards import RECORD, Shard, ShardRecord, open_shard
from scantling.errors import ScantlingInputError
from scantling.text.tokenizer import Tokenizer

MANIFEST = "manifest.json"
FORMAT = 1
DEFAULT_HELD_OUT = 0.05
_LOOKED_AT = 64
"""Conversations that are looked at for prompts that are judged."""


@dataclass(frozen=True)
class Marks:
    """Ids that mean something.

    Attributes:
        before, after: what the tokenizer puts around a text, such as BOS, or [CLS] and [SEP].
        eos: the id that ends a document; None where there is none.
        pad: the id that fills rows up; 0 where the tokenizer has none, as nothing reads it.
        mask: the id of a hidden word; None where there is none.
        special: all ids that are no pieces of text, sorted.
        sentinels: T5's, `<extra_id_0>` first; empty where there are none.
    """

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    eos: int | None = None
    pad: int = 0
    mask: int | None = None
    special: tuple[int, ...] = ()
    sentinels: tuple[int, ...] = ()

    @property
    def ids(self) -> tuple[int, ...]:
        """All of them."""
        named = tuple(number for number in (self.eos, self.pad, self.mask) if number is not None)
        return (*self.before, *self.after, *named, *self.special, *self.sentinels)

    @property
    def ends(self) -> tuple[int, ...]:
        """What ends a document that is continued token by token: `after`, or EOS."""
        return self.after or (() if self.eos is None else (self.eos,))


@dataclass(frozen=True)
class Manifest:
    """What manifest.json says: all that a corpus was made of, and all that is in it.

    Attributes:
        key: hash of everything that decides the tokens; a corpus is used again where it is the same.
        kind: text, pairs or chat.
        made_of: the sources' hashes by name, the tokenizer's hash, and the options of reading.
        vocab_size: of the tokenizer.
        dtype: of the ids.
        marks: ids that mean something.
        shards: in order.
        notes: what a user should know, such as files that were left out.
    """

    key: str
    kind: str
    made_of: Mapping[str, Any]
    vocab_size: int
    dtype: str
    marks: Marks
    shards: tuple[ShardRecord, ...]
    notes: tuple[str, ...] = ()
    format: int = FORMAT

    @property
    def tokens(self) -> int:
        """In all shards, special ones around documents not counted."""
        return sum(shard.tokens for shard in self.shards)

    def text(self) -> str:
        """As JSON."""
        counts = {
            name: sum(getattr(s, name) for s in self.shards) for name in ("documents", "empty", "tokens", "bytes")
        }
        plain = {"format": self.format, **asdict(self), "counts": counts}
        return json.dumps(plain, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read a manifest.

        Raises:
            ScantlingInputError: it cannot be read, or is none.
        """
        try:
            manifest = msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise ScantlingInputError(f"{path}: cannot be read: {error.strerror}") from None
        except msgspec.MsgspecError as error:
            raise ScantlingInputError(
                f"{path}: is no manifest of tokenised data ({error}); delete its folder, and it is made again"
            ) from None
        if manifest.format != FORMAT:
            raise ScantlingInputError(f"{path}: is of format {manifest.format}, not {FORMAT}; delete its folder")
        if wrong := [number for number in manifest.marks.ids if not 0 <= number < manifest.vocab_size]:
            raise ScantlingInputError(
                f"{path}: names the id {wrong[0]}, and its vocabulary has {manifest.vocab_size} tokens; delete its "
                "folder, and it is made again"
            )
        return manifest


@dataclass(frozen=True)
class Documents:
    """Some documents of a corpus, in a fixed order.

    Attributes:
        corpus: whose they are.
        name: train or held_out.
        spans: (N, 3) of a document in the corpus, and the tokens of it that belong here, start and end.
    """

    corpus: Corpus
    name: str
    spans: NDArray[np.int64] = field(repr=False)

    def __len__(self) -> int:
        return len(self.spans)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document, (N,), special ones around it not counted."""
        return self.spans[:, 2] - self.spans[:, 1]

    @cached_property
    def firsts(self) -> NDArray[np.int64]:
        """Of each pair the tokens of its source, (N,)."""
        return self.corpus.records["first"][self.spans[:, 0]].astype(np.int64)

    @property
    def tokens(self) -> int:
        """In all, special ones around documents not counted."""
        return int(self.lengths.sum())

    @property
    def bytes(self) -> int:
        """Of text, in UTF-8; those of a document that was cut by its share of the tokens."""
        records = self.corpus.records[self.spans[:, 0]]
        return round(float((records["bytes"] * (self.lengths / records["tokens"])).sum()))

    def ids(self, document: int, start: int = 0, end: int | None = None) -> NDArray[np.int64]:
        """The ids of a document, or of a part of it, (n,) int64."""
        return self.corpus.read(*self._range(document, start, end)).astype(np.int64)

    def spoken(self, document: int, start: int = 0, end: int | None = None) -> NDArray[np.bool_]:
        """True where the assistant speaks, (n,); of a corpus of conversations only."""
        return self.corpus.read_mask(*self._range(document, start, end))

    def take(self, count: int) -> Documents:
        """The first `count` documents."""
        return Documents(self.corpus, self.name, self.spans[:count])

    @property
    def identity(self) -> int:
        """64 bits that tell these documents from others."""
        return mix(int(self.corpus.manifest.key[:16], 16), *(int(x) for x in self.spans.sum(0)), len(self))

    def _range(self, document: int, start: int, end: int | None) -> tuple[int, int, int]:
        owner, first, last = (int(number) for number in self.spans[document])
        return owner, first + start, last if end is None else first + end


class Corpus:
    """Tokenised documents in a folder; `train` and `held_out` are its halves.

    A document is held out where the hash of its text says so: the same document always falls on the same side, whatever
    stands around it and whatever the vocabulary, and copies of it fall on that side, too. Where chance leaves a side
    empty, the document with the lowest (highest) hash changes sides; where there is only one document, the last of its
    tokens are held out. Pairs are never cut.
    """

    def __init__(self, folder: Path, manifest: Manifest, shards: Sequence[Shard], held_out: float) -> None:
        self.folder, self.manifest = folder, manifest
        self._shards = shards
        self.records: NDArray[np.void] = (
            np.concatenate([shard.records for shard in shards]) if shards else np.zeros(0, RECORD)
        )
        lengths = self.records["tokens"].astype(np.int64)
        counts = [len(shard.records) for shard in shards]
        self._shard = np.repeat(np.arange(len(shards)), counts)
        ends = np.cumsum(lengths)
        before = np.repeat(np.cumsum([0, *(len(shard.ids) for shard in shards)])[:-1], counts)
        self._start = ends - lengths - before
        train, held = _split(self.records, held_out if manifest.kind == "text" or len(lengths) > 1 else 0.0)
        self.train, self.held_out = Documents(self, "train", train), Documents(self, "held_out", held)

    @property
    def marks(self) -> Marks:
        """Ids that mean something."""
        return self.manifest.marks

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know."""
        notes = [*self.manifest.notes]
        if len(self.records) == 1 and len(self.held_out) == 1:
            notes.append("the one document is cut: its end is held out")
        if self.manifest.kind == "chat" and self._all_spoken(first := self.train.take(_LOOKED_AT)):
            notes.append(
                f"every token of the first {len(first)} conversations is judged as the assistant's, prompts "
                "included: the tag `generation` of the chat template belongs around the assistant's messages alone"
            )
        return tuple(notes)

    @staticmethod
    def _all_spoken(documents: Documents) -> bool:
        return len(documents) > 0 and all(bool(documents.spoken(n).all()) for n in range(len(documents)))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made it."""
        return Tokenizer.from_folder(self.folder)

    @cached_property
    def is_special(self) -> NDArray[np.bool_]:
        """Of each id whether it is no piece of text, (vocab_size,)."""
        table = np.zeros(self.manifest.vocab_size, np.bool_)
        table[list(self.marks.special)] = True
        return table

    @cached_property
    def ordinary_ids(self) -> NDArray[np.int64]:
        """All ids that are pieces of text."""
        return np.flatnonzero(~self.is_special)

    def read(self, document: int, start: int, end: int) -> NDArray[np.integer[Any]]:
        """Ids start .. end - 1 of a document."""
        at = int(self._start[document])
        ids: NDArray[np.integer[Any]] = self._shards[self._shard[document]].ids[at + start : at + end]
        return ids

    def read_mask(self, document: int, start: int, end: int) -> NDArray[np.bool_]:
        """The same of the mask of a conversation."""
        mask, at = self._shards[self._shard[document]].mask, int(self._start[document])
        assert mask is not None
        spoken: NDArray[np.bool_] = mask[at + start : at + end].astype(np.bool_)
        return spoken


def held_out_of(hashes: NDArray[np.uint64], share: float) -> NDArray[np.bool_]:
    """Which documents are held out, by the hashes of their texts, (N,); see `Corpus`."""
    if share == 0.0 or len(hashes) < 2:
        return np.zeros(len(hashes), np.bool_)
    held = hashes < np.uint64(min(int(share * 2**64), 2**64 - 1))
    if not held.any():
        held = hashes == hashes.min()
    if held.all():
        held = hashes != hashes.max()
    return held


def _split(records: NDArray[np.void], share: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Spans of the documents to train on and of those held out."""
    lengths = records["tokens"].astype(np.int64)
    spans = np.column_stack([np.arange(len(records)), np.zeros_like(lengths), lengths])
    if len(records) == 1 and share and lengths[0] > 1:
        n = int(lengths[0])
        cut = n - max(1, round(n * share))
        return np.array([[0, 0, cut]]), np.array([[0, cut, n]])
    held = held_out_of(records["hash"], share)
    return spans[~held], spans[held]


def open_corpus(folder: Path, *, held_out: float = DEFAULT_HELD_OUT, verify: bool = True) -> Corpus:
    """Open a folder that `prepare` made.

    Args:
        held_out: share of the documents that is never trained on, 0 <= held_out < 1.
        verify: compare every shard with its hash, which reads it once.

    Raises:
        ScantlingInputError: no such folder, a broken manifest, or a shard that is missing, cut off or changed.
    """
    if not 0.0 <= held_out < 1.0:
        raise ScantlingInputError(f"the held-out share is {held_out}; it must be at least 0 and below 1")
    manifest = Manifest.read(folder / MANIFEST)
    shards = [open_shard(folder, s, manifest.dtype, manifest.vocab_size, verify=verify) for s in manifest.shards]
    return Corpus(folder, manifest, shards, held_out)
