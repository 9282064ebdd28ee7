"""How many ids a tokenizer gives, from its file's bytes alone."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

from scantling.checkpoint.files import open_regular
from scantling.checkpoint.gguf import GGUFHeader
from scantling.checkpoint.gguf_types import GGUFArray

MAX_BYTES = 256 * 2**20
"""Of a tokenizer.json; a larger one is not looked at."""
_VOCAB = re.compile(rb'"vocab"\s*:\s*([\[{])')
_STRING = rb'"[^"\\]{0,4096}(?:\\.[^"\\]{0,4096}){0,4096}"'
_TOKEN_ID = re.compile(rb"\s*" + _STRING + rb"\s*:\s*(\d{1,9})\s*([,}])", re.DOTALL)
_TOKEN_SCORE = re.compile(rb"\s*\[\s*" + _STRING + rb"\s*,\s*[-+.\deE]{1,40}\s*\]\s*([,\]])", re.DOTALL)
_ADDED = re.compile(rb'"added_tokens"\s*:')
_AFTER = re.compile(rb'"(?:normalizer|pre_tokenizer|post_processor|decoder|model)"\s*:')
_ID = re.compile(rb'"id"\s*:\s*(\d{1,9})')


def tokenizer_ids(folder: Path) -> int | None:
    """One more than the largest id of tokenizer.json; None where there is none, or none that is understood.

    The vocabulary is counted entry by entry in the mapped file: a parsed one would take some hundred megabytes.

    Raises:
        ScantlingInputError: the file cannot be read.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    file, size = open_regular(path)
    with file:
        if size > MAX_BYTES:
            return None
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            found = _ids(data)
    return found


def _ids(data: mmap.mmap) -> int | None:
    start = _VOCAB.search(data)
    if start is None:
        return None
    largest = _mapped(data, start.end()) if start[1] == b"{" else _listed(data, start.end())
    if largest is None:
        return None
    return max(largest, _added(data, start.start())) + 1


def _added(data: mmap.mmap, end: int) -> int:
    """The largest id of the tokens that were added, which stand before the model; -1 where there are none."""
    added = _ADDED.search(data, 0, end)
    after = _AFTER.search(data, added.end(), end) if added else None
    if added is None or after is None:
        return -1
    return max((int(number[1]) for number in _ID.finditer(data, added.end(), after.start())), default=-1)


def _mapped(data: mmap.mmap, at: int) -> int | None:
    """The largest id of a mapping of tokens to ids."""
    largest, entry = -1, _TOKEN_ID.match(data, at)
    while entry is not None:
        largest = max(largest, int(entry[1]))
        if entry[2] == b"}":
            return largest
        entry = _TOKEN_ID.match(data, entry.end())
    return None


def _listed(data: mmap.mmap, at: int) -> int | None:
    """The last number of a list of tokens with their scores."""
    count, entry = 0, _TOKEN_SCORE.match(data, at)
    while entry is not None:
        count += 1
        if entry[1] == b"]":
            return count - 1
        entry = _TOKEN_SCORE.match(data, entry.end())
    return None


def gguf_ids(header: GGUFHeader) -> int | None:
    """Tokens in a GGUF file's own vocabulary."""
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, GGUFArray) else None
