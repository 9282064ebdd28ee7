"""WordPiece as GGUF spells it (`tokenizer.ggml.model` `bert`), there and back.

BERT marks the pieces that continue a word with ``##``; GGUF marks those that begin one with U+2581 and leaves marks of
their own, such as [CLS], as they are. The rest of the tokenizer has no keys but two: how text is cleaned and cut into
words is BERT's own way. llama.cpp departs from it in vowel signs that are characters of their own (Hindi, Korean),
which it drops, and in words of over 100 characters, which it cuts.

Sources: llama.cpp, conversion/bert.py (`set_vocab`) and src/llama-vocab.cpp (`llm_tokenizer_wpm`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scantling.errors import need

BEGINS, CONTINUES = "▁", "##"
LONGEST_WORD = 100
"""Characters of a word that is looked up in pieces; a longer one is unknown (BERT)."""
MARKS = {
    "cls": ("bos_token_id", 101),
    "sep": ("seperator_token_id", 102),
    "unk": ("unknown_token_id", 100),
}
"""The key of each mark and its id where the key is missing; GGUF spells the second so."""


def spelt(token: str, mark: bool) -> str:
    """A token as GGUF spells it."""
    if mark:
        return token
    return token.removeprefix(CONTINUES) if token.startswith(CONTINUES) else BEGINS + token


def plain(token: str, mark: bool) -> str:
    """The same token as BERT spells it."""
    if token.startswith(BEGINS):
        return token.removeprefix(BEGINS)
    return token if mark else CONTINUES + token


def library(vocabulary: Mapping[str, int], marks: Mapping[str, str], lowercase: bool, strip_accents: bool) -> Any:
    """The `tokenizers.Tokenizer`.

    Args:
        vocabulary: ids by token as BERT spells it.
        marks: what begins a text (cls), ends it (sep), and stands for an unknown word (unk).
    """
    tokenizers = need("tokenizers", "read text")
    made = tokenizers.Tokenizer(
        tokenizers.models.WordPiece(
            vocab=dict(vocabulary),
            unk_token=marks["unk"],
            max_input_chars_per_word=LONGEST_WORD,
            continuing_subword_prefix=CONTINUES,
        )
    )
    made.normalizer = tokenizers.normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=strip_accents, lowercase=lowercase
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.decoder = tokenizers.decoders.WordPiece(prefix=CONTINUES, cleanup=True)
    cls, sep = marks["cls"], marks["sep"]
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single=[cls, "$A", sep],
        pair=[cls, "$A", sep, "$B:1", f"{sep}:1"],
        special_tokens=[(token, vocabulary[token]) for token in dict.fromkeys((cls, sep))],
    )
    return made


def fault(data: Mapping[str, Any]) -> str | None:
    """Why a WordPiece tokenizer, given as its JSON, cannot be written; None if it can."""
    model, normal, cut = data["model"], data["normalizer"] or {}, data["pre_tokenizer"] or {}
    if model["continuing_subword_prefix"] != CONTINUES:
        return f"its WordPiece marks what continues a word with {model['continuing_subword_prefix']!r}, not '##'"
    if model["max_input_chars_per_word"] != LONGEST_WORD:
        return f"its longest word has {model['max_input_chars_per_word']} characters, and GGUF has no key for that"
    if normal.get("type") != "BertNormalizer" or not (normal["clean_text"] and normal["handle_chinese_chars"]):
        return "it cleans text in another way than BERT, and GGUF has no key for that"
    if cut.get("type") != "BertPreTokenizer":
        return f"it cuts words by {cut.get('type')}, and GGUF's WordPiece does by BertPreTokenizer"
    if words := [token["content"] for token in data["added_tokens"] if not token["special"]]:
        return f"{words[0]!r} was added to its words, and llama.cpp would look for it under another spelling"
    return None


def written(
    library: Any, data: Mapping[str, Any], tokens: Sequence[str], marks: Sequence[bool], mask: int | None
) -> dict[str, Any]:
    """The keys without their prefix, for a tokenizer without `fault`.

    Args:
        tokens: as BERT spells them, by id.
        marks: of each whether it is one of [CLS] and the like.
        mask: the id of what stands for a missing word.

    Raises:
        ValueError: a text does not begin with one mark and end with another; the message says why.
    """
    ends = library.encode("", add_special_tokens=True).ids
    if len(ends) != 2 or not all(marks[token_id] for token_id in ends):
        raise ValueError("it does not put one mark before a text and one after it, as GGUF's WordPiece does")
    normal = data["normalizer"]
    strip = normal["lowercase"] if normal["strip_accents"] is None else normal["strip_accents"]
    found: dict[str, Any] = {
        "model": "bert",
        "pre": "default",
        "tokens": [spelt(token, mark) for token, mark in zip(tokens, marks, strict=True)],
        "normalizer.lowercase": normal["lowercase"],
        "normalizer.strip_accents": strip,
        "bos_token_id": ends[0],
        "seperator_token_id": ends[1],
    }
    unknown = data["model"]["unk_token"]
    if unknown not in tokens or not marks[tokens.index(unknown)]:
        raise ValueError(f"its token for unknown words, {unknown!r}, is none of its marks")
    found["unknown_token_id"] = list(tokens).index(unknown)
    if "[PAD]" in tokens:
        found["padding_token_id"] = list(tokens).index("[PAD]")
    return found if mask is None else found | {"mask_token_id": mask}
