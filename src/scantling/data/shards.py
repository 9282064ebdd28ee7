"""Tokens on the disk: shards that are mapped into memory, each written whole and checked by its hash.

A shard NNNNN has the ids of its documents one after the other in NNNNN.bin (little-endian uint16, or uint32 for
vocabularies above 65,536), a record per document in NNNNN.docs, and for conversations a byte per token in NNNNN.mask
(1 where the assistant speaks). Special tokens around a document are not stored: they are added to the rows.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scantling.errors import ScantlingInputError

RECORD = np.dtype([("tokens", "<u8"), ("first", "<u8"), ("bytes", "<u8"), ("hash", "<u8")])
"""Of a document: its tokens, those of its first part (the source of a pair), UTF-8 bytes, and the hash of its text."""

_AGAIN = "delete the folder, and it is made again"


@dataclass(frozen=True)
class Encoded:
    """A document in tokens.

    Attributes:
        ids: (n,) of the whole document.
        first: how many of them are the source of a pair; 0 elsewhere.
        size: bytes of the text in UTF-8.
        digest: 64 bits of the text's hash.
        spoken: (n,) True where the assistant speaks; None elsewhere.
    """

    ids: NDArray[np.integer[Any]]
    first: int
    size: int
    digest: int
    spoken: NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class ShardRecord:
    """What the manifest says of a shard.

    Attributes:
        name: of its files, without the endings.
        documents: that have at least one token.
        empty: documents that had none and are left out.
        tokens: in all.
        bytes: of text.
        sha256: of each file, by its ending.
    """

    name: str
    documents: int
    empty: int
    tokens: int
    bytes: int
    sha256: Mapping[str, str]


def token_dtype(vocab_size: int) -> str:
    """The dtype of the ids: uint16 as far as it reaches, else uint32."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def write_shard(folder: Path, name: str, documents: Iterable[Encoded], dtype: str) -> ShardRecord:
    """Write the files of a shard: first under other names, flushed to the disk, then renamed.

    Raises:
        OSError: a file cannot be written; none of the shard's files is left then.
    """
    endings = (".bin", ".docs", ".mask")
    parts = {ending: folder / f"{name}{ending}.part" for ending in endings}
    digests = {ending: hashlib.sha256() for ending in endings}
    rows, empty = [], 0
    try:
        files = {ending: path.open("wb") for ending, path in parts.items()}
        try:
            for document in documents:
                if len(document.ids) == 0:
                    empty += 1
                    continue
                rows.append((len(document.ids), document.first, document.size, document.digest))
                pieces = {".bin": document.ids.astype(np.dtype(dtype).newbyteorder("<")).tobytes()}
                if document.spoken is not None:
                    pieces[".mask"] = document.spoken.astype(np.uint8).tobytes()
                for ending, piece in pieces.items():
                    digests[ending].update(piece)
                    files[ending].write(piece)
            table = np.array(rows, RECORD)
            digests[".docs"].update(table.tobytes())
            files[".docs"].write(table.tobytes())
            for file in files.values():
                file.flush()
                os.fsync(file.fileno())
        finally:
            for file in files.values():
                file.close()
        kept = [ending for ending in endings if ending != ".mask" or parts[ending].stat().st_size]
        for ending in kept:
            os.replace(parts[ending], folder / f"{name}{ending}")
    finally:
        for path in parts.values():
            path.unlink(missing_ok=True)
    return ShardRecord(
        name,
        len(rows),
        empty,
        int(table["tokens"].sum()),
        int(table["bytes"].sum()),
        {ending: digests[ending].hexdigest() for ending in kept},
    )


@dataclass(frozen=True)
class Shard:
    """An open shard: ids (n,), records (documents,), and where there is one the mask (n,)."""

    ids: NDArray[np.integer[Any]]
    records: NDArray[np.void]
    mask: NDArray[np.uint8] | None


def open_shard(folder: Path, record: ShardRecord, dtype: str, vocab_size: int, *, verify: bool = True) -> Shard:
    """Map a shard into memory.

    Args:
        verify: compare the hashes, which reads the shard once; the sizes are compared in any case.

    Raises:
        ScantlingInputError: a file is missing, cut off or changed.
    """
    sizes = {".bin": record.tokens * np.dtype(dtype).itemsize, ".docs": record.documents * RECORD.itemsize}
    sizes[".mask"] = record.tokens
    for ending, wanted in record.sha256.items():
        path = folder / f"{record.name}{ending}"
        try:
            size = path.stat().st_size
            if size != sizes[ending]:
                raise ScantlingInputError(f"{path}: has {size:,} bytes, not {sizes[ending]:,}: it is cut off; {_AGAIN}")
            if verify:
                with path.open("rb") as file:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
                if found != wanted:
                    raise ScantlingInputError(f"{path}: its bytes are not those that were written; {_AGAIN}")
        except OSError as error:
            raise ScantlingInputError(f"{path}: cannot be read: {error.strerror}; {_AGAIN}") from None
    records = np.fromfile(folder / f"{record.name}.docs", RECORD)
    ids = _mapped(folder / f"{record.name}.bin", np.dtype(dtype).newbyteorder("<"))
    mask = _mapped(folder / f"{record.name}.mask", np.dtype(np.uint8)) if ".mask" in record.sha256 else None
    if int(records["tokens"].sum()) != record.tokens:
        raise ScantlingInputError(f"{folder / record.name}.docs: tells of another number of tokens; {_AGAIN}")
    if verify and record.tokens and int(ids.max()) >= vocab_size:
        raise ScantlingInputError(
            f"{folder / record.name}.bin: has id {int(ids.max())}, and the vocabulary has {vocab_size} tokens; {_AGAIN}"
        )
    return Shard(ids, records, mask)


def _mapped(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    # Nothing can be mapped of an empty file; and a plain array over the mapping is cheaper to slice.
    return np.asarray(np.memmap(path, dtype, mode="r")) if path.stat().st_size else np.zeros(0, dtype)
