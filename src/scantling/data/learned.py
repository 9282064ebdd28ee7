"""A tokenizer learned from the documents that are trained on, and from no others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from scantling.data.corpus import DEFAULT_HELD_OUT, held_out_of
from scantling.data.mixing import mix
from scantling.data.reading import Chat, Document, own_text, parts_of, read
from scantling.data.sources import Source, Sources, find_sources
from scantling.data.vocabulary import Purpose, train_tokenizer
from scantling.text.tokenizer import Tokenizer

ENOUGH_BYTES = 2**28
"""A vocabulary is learned from about this much text at most; of more a sample is taken, document by document."""

_PART_BYTES = 2**26


def learned_tokenizer(
    sources: Sources | Sequence[str],
    vocab_size: int,
    purpose: Purpose = "causal",
    *,
    sentinels: int = 0,
    held_out: float = DEFAULT_HELD_OUT,
) -> Tokenizer:
    """A byte-level BPE tokenizer learned from the sources, without what `prepare` holds out of them.

    Args:
        sources: what is read; names alone are texts.
        vocab_size, purpose, sentinels: see `train_tokenizer`.
        held_out: the share that `prepare` is given.

    Raises:
        ScantlingInputError: bad sources, or too small a vocabulary.
    """
    sources = sources if isinstance(sources, Sources) else Sources(tuple(sources))
    return train_tokenizer(training_texts(sources, held_out), vocab_size, purpose, sentinels=sentinels)


def training_texts(sources: Sources, held_out: float, enough: int = ENOUGH_BYTES) -> Iterator[str]:
    """The text that is trained on, in blocks; of more than `enough` bytes a sample."""
    hashes, sizes, found = [], [], find_sources(sources)[0]
    for document in _documents(found, sources):
        digest, size = hashlib.blake2b(digest_size=8), 0
        for text in own_text(document):
            digest.update(text.encode())
            size += len(text.encode())
        hashes.append(int.from_bytes(digest.digest(), "little"))
        sizes.append(size)
    held = held_out_of(np.array(hashes, np.uint64), held_out)
    share = enough / max(sum(sizes), 1)
    for number, document in enumerate(_documents(found, sources)):
        left = sizes[number] * (1.0 - held_out) if len(sizes) == 1 else float("inf")
        taken = not held[number] and mix(hashes[number]) < share * 2.0**64
        for text in _texts(document):
            if taken and left > 0:
                yield text
                left -= len(text.encode())


def _documents(found: Iterable[Source], sources: Sources) -> Iterator[Document]:
    for source in found:
        for part in parts_of(source, _PART_BYTES):
            yield from read(part, sources)


def _texts(document: Document) -> Iterable[str]:
    if not isinstance(document, Chat):
        return own_text(document)
    contents = (message.get("content") for message in document.messages if isinstance(message, dict))
    return [content for content in contents if isinstance(content, str)]
