"""Which tokens go on with the word of the token before."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scantling.data.corpus import Corpus
from scantling.text.stream import BYTE_OF
from scantling.text.tokenizer import Tokenizer


def continues(corpus: Corpus, ids: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
    """Whether each token goes on with the word of the one before it, (n,).

    A WordPiece token does where it begins with ##. Of other vocabularies a token does that begins with a letter, a
    digit or a part of a character, with no space before it, after a token that ends with one.
    """
    joins, ends = _tables(corpus.tokenizer)
    before = np.concatenate([[False], ends[ids[:-1]]]) if len(ids) else np.zeros(0, np.bool_)
    found: NDArray[np.bool_] = joins[ids] & before
    return found


@lru_cache(maxsize=4)
def _tables(tokenizer: Tokenizer) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Of each id whether it can go on with a word, and whether a word can go on after it."""
    tokens = tokenizer.tokens()
    word_pieces = sum(token is not None and token.startswith("##") for token in tokens) > 1
    joins, ends = (np.zeros(len(tokens), np.bool_) for _ in range(2))
    for number, token in enumerate(tokens):
        if not token or tokenizer.is_special(number):
            continue
        if word_pieces:
            joins[number], ends[number] = token.startswith("##") and len(token) > 2, True
        else:
            text = _text(token)
            joins[number], ends[number] = _of_word(text[:1]), _of_word(text[-1:])
    return joins, ends


def _text(token: str) -> str:
    """A token with spaces as spaces, and parts of characters as U+FFFD."""
    try:
        return bytes(BYTE_OF[char] for char in token).decode(errors="replace")
    except KeyError:
        return "\ufffd" if re.fullmatch("<0x[0-9A-F]{2}>", token) else token.replace("▁", " ")


def _of_word(char: str) -> bool:
    return char.isalnum() or char == "\ufffd"
