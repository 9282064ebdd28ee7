"""Tokenizers for training: made from the text itself, of plain bytes, or those of others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from scantling.data.corpus import Marks
from scantling.errors import ScantlingInputError, need
from scantling.text.tokenizer import Tokenizer

Purpose = Literal["causal", "chat", "masked", "seq2seq"]
N_SENTINELS = 100
"""As T5 has them (arXiv:1910.10683; `extra_ids` of its vocabulary)."""

_ROLES: Mapping[str, Mapping[str, str]] = {
    "causal": {"pad": "<|pad|>", "bos": "<|bos|>", "eos": "<|eos|>"},
    "chat": {"pad": "<|pad|>", "bos": "<|bos|>", "eos": "<|im_end|>", "turn": "<|im_start|>"},
    "masked": {"pad": "[PAD]", "bos": "[CLS]", "eos": "[SEP]", "mask": "[MASK]"},
    "seq2seq": {"pad": "<pad>", "eos": "</s>"},
}
_AROUND: Mapping[str, tuple[str, str]] = {
    "causal": ("<|bos|>", ""),
    "chat": ("<|bos|>", ""),
    "masked": ("[CLS]", "[SEP]"),
    "seq2seq": ("", "</s>"),
}
_CHAT_TEMPLATE = """{{ bos_token }}{% for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}
{% else %}{{ message.content }}<|im_end|>{% endif %}{{ '\\n' }}
{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""ChatML, with the assistant's words marked."""


def roles(purpose: Purpose) -> Mapping[str, str]:
    """The special tokens of a tokenizer that is made here, by role.

    Raises:
        ScantlingInputError: no such purpose.
    """
    if purpose not in _ROLES:
        raise ScantlingInputError(f"a tokenizer for {purpose!r}: use one of {', '.join(_ROLES)}")
    return _ROLES[purpose]


def byte_tokenizer(purpose: Purpose = "causal", *, sentinels: int = 0) -> Tokenizer:
    """A tokenizer of plain bytes: id b is the byte b, and the special tokens follow from 256 on.

    Raises:
        ScantlingInputError: no such purpose.
        MissingExtra: the `tokenizers` library is not installed.
    """
    tokenizers = need("tokenizers", "make a tokenizer")
    from scantling.text.stream import BYTE_OF

    library = tokenizers.Tokenizer(tokenizers.models.BPE(BYTE_OF, []))
    return _finished(tokenizers, library, purpose, sentinels, use_regex=False)


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, purpose: Purpose = "causal", *, sentinels: int = 0
) -> Tokenizer:
    """A byte-level BPE tokenizer (as GPT-2's: Radford and others 2019, section 2.2) learned from texts.

    Any text can be written in it, as each byte is a token of its own. The special tokens have the first ids. It may
    have fewer tokens than asked for, where the texts have no more pairs to join.

    Args:
        texts: to learn from.
        vocab_size: tokens in all, special ones included.
        purpose: which special tokens there are, and which stand around a text.
        sentinels: `<extra_id_0>` and so on, for span corruption.

    Raises:
        ScantlingInputError: no text, or fewer tokens asked for than bytes and special tokens need.
        MissingExtra: the `tokenizers` library is not installed.
    """
    tokenizers = need("tokenizers", "make a tokenizer")
    special = [*roles(purpose).values(), *_sentinels(sentinels)]
    least = 256 + len(special)
    if vocab_size < least:
        raise ScantlingInputError(
            f"a byte-level vocabulary needs at least {least} tokens (256 bytes and {len(special)} special ones), and "
            f"{vocab_size} are asked for"
        )
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    library.train_from_iterator(iter(texts), trainer)
    return _finished(tokenizers, library, purpose, sentinels, use_regex=True)


def _sentinels(count: int) -> list[str]:
    return [f"<extra_id_{number}>" for number in range(count)]


def _finished(tokenizers: Any, library: Any, purpose: Purpose, sentinels: int, *, use_regex: bool) -> Tokenizer:
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    library.decoder = tokenizers.decoders.ByteLevel()
    names = roles(purpose)
    library.add_special_tokens([*names.values(), *_sentinels(sentinels)])
    before, after = _AROUND[purpose]
    around = [token for token in (before, after) if token]
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single=" ".join(part for part in (before, "$A", after) if part),
        pair=" ".join(part for part in (before, "$A", after, "$B:1", after and f"{after}:1") if part),
        special_tokens=[(token, library.token_to_id(token)) for token in around],
    )
    return Tokenizer.from_library(library, names, _CHAT_TEMPLATE if purpose == "chat" else None)


def read_tokenizer(path: str | Path) -> Tokenizer:
    """A tokenizer that exists: a folder with tokenizer.json, that file itself, a GGUF file, or a SentencePiece model.

    Raises:
        ScantlingInputError: there is none, or it cannot be read.
    """
    path = Path(path)
    if not path.exists():
        raise ScantlingInputError(f"{path}: no such file or folder to read a tokenizer from")
    if path.suffix == ".gguf":
        from scantling.checkpoint.gguf import read_gguf

        return Tokenizer.from_gguf(read_gguf(path).metadata)
    if path.suffix in (".model", ".spm"):
        return Tokenizer.from_sentencepiece(path)
    if path.is_file() and path.name != "tokenizer.json":
        raise ScantlingInputError(
            f"{path}: a tokenizer is a tokenizer.json, the folder that has one, a .gguf file or a SentencePiece .model"
        )
    return Tokenizer.from_folder(path.parent if path.name == "tokenizer.json" else path)


def check_size(tokenizer: Tokenizer, vocab_size: int, name: str) -> None:
    """Refuse a tokenizer that has ids for which a card has no rows.

    Raises:
        ScantlingInputError: it has.
    """
    if tokenizer.vocab_size > vocab_size:
        raise ScantlingInputError(
            f"the tokenizer has {tokenizer.vocab_size:,} tokens, and vocab_size of {name} is {vocab_size:,}: take a "
            "smaller tokenizer, or a card with more rows"
        )


def fingerprint(tokenizer: Tokenizer) -> str:
    """The sha256 of all that decides what a tokenizer does."""
    return hashlib.sha256(json.dumps(tokenizer.files(), sort_keys=True).encode()).hexdigest()


def marks_of(tokenizer: Tokenizer) -> Marks:
    """The ids that mean something."""
    before, after = _around(tokenizer)
    sentinels: list[int] = []
    while (found := tokenizer.id_of(f"<extra_id_{len(sentinels)}>")) is not None:
        sentinels.append(found)
    return Marks(
        before=before,
        after=after,
        eos=tokenizer.ends[0] if tokenizer.ends else None,
        pad=0 if tokenizer.pad_id is None else tokenizer.pad_id,
        mask=tokenizer.mask_id,
        special=tokenizer.special_ids,
        sentinels=tuple(sentinels),
    )


def _around(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the tokenizer puts before and after a text."""
    bare, whole = tokenizer.encode("a", add_special=False), tokenizer.encode("a")
    for start in range(len(whole) - len(bare) + 1):
        if bare and whole[start : start + len(bare)] == bare:
            return tuple(whole[:start]), tuple(whole[start + len(bare) :])
    raise ScantlingInputError(
        "the tokenizer changes a text when it adds its special tokens, so they cannot be told apart"
    )
