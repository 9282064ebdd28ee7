"""Documents to tokens: what one process does with one part of the sources after the other."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from scantling.data.chat import encode_chats
from scantling.data.reading import Chat, Document, Pair, Part, Text, own_text, read
from scantling.data.shards import Encoded, ShardRecord, write_shard
from scantling.data.sources import Sources
from scantling.text.tokenizer import Tokenizer

_CHATS_AT_ONCE = 256


def encode_parts(
    tokenizer: Tokenizer, parts: Iterable[Part], sources: Sources, folder: Path, name: str, dtype: str
) -> ShardRecord:
    """Write the shard of some parts.

    Text of the sources that spells a special token is text as any other; in conversations the template's are tokens.

    Raises:
        ScantlingInputError: something cannot be read; see `reading.read`.
        OSError: the shard cannot be written.
    """
    literal = tokenizer.literal()
    documents = (document for part in parts for document in read(part, sources))
    encoded = _encode_chats(documents, tokenizer) if sources.kind == "chat" else _encode(documents, literal)
    return write_shard(folder, name, encoded, dtype)


def _encode(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[Encoded]:
    for document in documents:
        if isinstance(document, Text):
            yield _text(document, tokenizer)
        elif isinstance(document, Pair):
            yield _pair(document, tokenizer)


def _text(document: Text, tokenizer: Tokenizer) -> Encoded:
    digest, size, pieces = hashlib.blake2b(digest_size=8), 0, []
    for block in document.blocks:
        data = block.encode()
        digest.update(data)
        size += len(data)
        pieces.append(_ids(tokenizer.encode_bare(block)))
    ids = np.concatenate(pieces) if pieces else _ids([])
    return Encoded(ids, 0, size, int.from_bytes(digest.digest(), "little"))


def _pair(pair: Pair, tokenizer: Tokenizer) -> Encoded:
    source, target = (_ids(tokenizer.encode_bare(text)) for text in (pair.source, pair.target))
    size = len(pair.source.encode()) + len(pair.target.encode())
    return Encoded(np.concatenate([source, target]), len(source), size, _digest(pair))


def _encode_chats(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[Encoded]:
    waiting: list[Chat] = []
    for document in documents:
        assert isinstance(document, Chat)
        waiting.append(document)
        if len(waiting) == _CHATS_AT_ONCE:
            yield from _chats(waiting, tokenizer)
            waiting = []
    if waiting:
        yield from _chats(waiting, tokenizer)


def _chats(chats: list[Chat], tokenizer: Tokenizer) -> Iterator[Encoded]:
    for chat, found in zip(chats, encode_chats(tokenizer, chats), strict=True):
        yield Encoded(_ids(found.ids), 0, len(found.text.encode()), _digest(chat), found.spoken)


def _ids(ids: list[int]) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.array(ids, dtype=np.uint32)


def _digest(document: Pair | Chat) -> int:
    data = "".join(own_text(document)).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
