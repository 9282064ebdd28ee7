"""The vocabulary of a tokenizer as `tokenizer.*` metadata of a GGUF file: the way back of `gguf_vocab`.

Nothing is guessed: how text is split before merging must be one of the ways that `tokenizer.ggml.pre` has a name for,
and what is written is read back and must cut texts of every kind into the same tokens.

Sources: the GGUF specification (ggml, docs/gguf.md, "Tokenizer") and llama.cpp (conversion/base.py,
src/llama-vocab.cpp).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from scantling.errors import ScantlingInputError
from scantling.text import gguf_vocab
from scantling.text import gguf_wordpiece as wordpiece
from scantling.text.gguf_vocab import BYTE, CONTROL, NORMAL, SPLITS, UNKNOWN, UNUSED, USER_DEFINED, padding

PROBES = (
    "Hello, world! I'm here; WE'LL see it's 1234567 times 3.14",
    "  two  spaces\tand\ttabs\n\n\nnew lines \r\n   end  ",
    "naïve café ÀÉÎ straße 中文字 日本語テスト हिन्दी русский العربية 🙂👍🏽 e\u0301",
    "def f(x):\n    return x**2 + {'a': [1, 2]}  # $100 <tag/> ~`|\\",
    "....!!!??? ---=== ''''\"\" don't DON'T '\u00b2\u00bd\u2167",
    "",
)
"""Texts that every way of splitting cuts differently."""
_SCORE_OF_ADDED = -1000.0
_EOS_NAMES = ("eos", "eot", "eom")


def vocabulary(
    library: Any,
    rows: int,
    *,
    bos: int | None,
    eos: Sequence[int],
    add_bos: bool,
    template: str | None,
    mask: int | None = None,
) -> dict[str, Any]:
    """All `tokenizer.*` keys.

    Args:
        library: the `tokenizers.Tokenizer`.
        rows: of the token table; ids that the tokenizer lacks are filled up.
        bos, eos: what starts and what ends a text; the first three ends can be written.
        template: of chats.
        mask: what stands for a missing word.

    Raises:
        ScantlingInputError: the vocabulary is of no kind that GGUF names, or has more ids than rows.
    """
    data = json.loads(library.to_str())
    model = data["model"]
    if model.get("type") == "WordPiece":
        return _wordpiece(library, data, rows, mask)
    if model.get("type") != "BPE":
        raise _refused(f"its model is {model.get('type')!r}, and only BPE and WordPiece are written")
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise _refused("its BPE marks the parts of words, which GGUF has no key for")
    tokens = _tokens(library, rows)
    byte_level = _is_byte_level(data)
    types = _types(data, tokens, byte_level)
    found: dict[str, Any] = _byte_level(data) if byte_level else _sentencepiece(data, tokens, types)
    found |= {"tokens": tokens, "token_type": types, "add_bos_token": add_bos}
    for name, token_id in [("bos", bos), *zip(_EOS_NAMES, eos, strict=False)]:
        if token_id is not None:
            found[f"{name}_token_id"] = token_id
    if (unknown := model.get("unk_token")) in tokens:
        found["unknown_token_id"] = tokens.index(unknown)
    if eos and library.encode("", add_special_tokens=True).ids[-1:] == [eos[0]]:
        found["add_eos_token"] = True
    metadata = {f"tokenizer.ggml.{key}": value for key, value in found.items()}
    if template is not None:
        metadata["tokenizer.chat_template"] = template
    _check(library, metadata)
    return metadata


def _wordpiece(library: Any, data: Mapping[str, Any], rows: int, mask: int | None) -> dict[str, Any]:
    if (why := wordpiece.fault(data)) is not None:
        raise _refused(why)
    tokens = _tokens(library, rows)
    types = [CONTROL if kind == UNKNOWN else kind for kind in _types(data, tokens, byte_level=True)]
    try:
        found = wordpiece.written(library, data, tokens, [kind == CONTROL for kind in types], mask)
    except ValueError as error:
        raise _refused(str(error)) from None
    metadata = {f"tokenizer.ggml.{key}": value for key, value in {**found, "token_type": types}.items()}
    if gguf_vocab.build(metadata).get_vocab() != library.get_vocab():
        raise _refused("some of its tokens would be others in GGUF's spelling of WordPiece")
    _check(library, metadata)
    return metadata


def _refused(why: str) -> ScantlingInputError:
    return ScantlingInputError(f"the tokenizer cannot be written as GGUF: {why}")


def _tokens(library: Any, rows: int) -> list[str]:
    by_id = {token_id: token for token, token_id in library.get_vocab(with_added_tokens=True).items()}
    if (most := max(by_id, default=-1)) >= rows:
        raise _refused(f"it has the id {most} and the model has {rows} rows of tokens")
    return [by_id.get(token_id, padding(token_id)) for token_id in range(rows)]


def _is_byte_level(data: Mapping[str, Any]) -> bool:
    parts = [part["type"] for part in _parts(data["pre_tokenizer"], "pretokenizers")]
    return "ByteLevel" in parts


def _parts(section: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    """A normalizer or pre-tokenizer as the list of its steps."""
    if section is None:
        return []
    return (
        [step for part in section[inner] for step in _parts(part, inner)]
        if section["type"] == "Sequence"
        else [section]
    )


def _types(data: Mapping[str, Any], tokens: list[str], byte_level: bool) -> list[int]:
    added = {token["content"]: token["special"] for token in data["added_tokens"]}
    unknown = data["model"].get("unk_token")
    bytes_ = set() if byte_level else {f"<0x{byte:02X}>" for byte in range(256)}

    def kind(token_id: int, token: str) -> int:
        if token == unknown:
            return UNKNOWN
        if token in added:
            return CONTROL if added[token] else USER_DEFINED
        if token in bytes_:
            return BYTE
        known = token in data["model"]["vocab"]
        return NORMAL if known or token != padding(token_id) else UNUSED

    return [kind(token_id, token) for token_id, token in enumerate(tokens)]


def _byte_level(data: Mapping[str, Any]) -> dict[str, Any]:
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in data["model"]["merges"]]
    return {"model": "gpt2", "pre": _pre(data), "merges": merges}


def _pre(data: Mapping[str, Any]) -> str:
    """The name of the way in which text is normalised and split."""
    patterns: list[str] = []
    for part in _parts(data["pre_tokenizer"], "pretokenizers"):
        if (pattern := _pattern(part)) is None:
            raise _refused(f"it splits text by {part['type']}, and tokenizer.ggml.pre names no such way")
        patterns += pattern
    normal = [part["type"] for part in _parts(data["normalizer"], "normalizers")]
    whole = bool(data["model"].get("ignore_merges"))
    for name, splits in SPLITS.items():
        usual = ["NFC"] if name == "qwen2" else []
        if list(splits) == patterns and normal == usual and whole == (name == "llama-bpe"):
            return name
    known = ", ".join(SPLITS)
    raise _refused(f"it normalises and splits text in none of the ways that tokenizer.ggml.pre names here ({known})")


def _pattern(part: Mapping[str, Any]) -> list[str] | None:
    """What a pre-tokenizer isolates, as regular expressions; None where it does something else."""
    match part:
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return list(SPLITS["gpt-2"]) if part.get("use_regex", True) else []
        case {"type": "Digits", "individual_digits": True}:
            return [r"\p{N}"]
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
            # The blanks that the words leave over are a piece of their own either way.
            return [pattern.removesuffix(r"|\s+") if pattern.startswith("'s|") else pattern]
    return None


def _sentencepiece(data: Mapping[str, Any], tokens: list[str], types: list[int]) -> dict[str, Any]:
    """SentencePiece BPE merges what has the highest score, so the order of ids must be that of the merges."""
    vocab = data["model"]["vocab"]
    made = [vocab["".join(merge.split(" ") if isinstance(merge, str) else merge)] for merge in data["model"]["merges"]]
    if made != sorted(made):
        raise _refused("its merges are not in the order of its ids, which the scores of GGUF's kind 'llama' stand for")
    plain = (NORMAL, BYTE)
    scores = [-float(i) if kind in plain else _SCORE_OF_ADDED for i, kind in enumerate(types)]
    return {"model": "llama", "pre": "default", "scores": scores, "add_space_prefix": _prefixes(data)}


def _prefixes(data: Mapping[str, Any]) -> bool:
    """Whether a blank is put before a text."""
    for part in _parts(data["normalizer"], "normalizers"):
        if part["type"] == "Prepend":
            return True
    pieces = _parts(data["pre_tokenizer"], "pretokenizers")
    return any(part["type"] == "Metaspace" and part.get("prepend_scheme") != "never" for part in pieces)


def _check(library: Any, metadata: Mapping[str, Any]) -> None:
    """Raise where a text of the probes would be cut otherwise by what is written."""
    written = gguf_vocab.build(metadata)
    for text in PROBES:
        ours = library.encode(text, add_special_tokens=False).ids
        theirs = written.encode(text, add_special_tokens=False).ids
        if ours != theirs:
            raise _refused(f"as GGUF's kind {metadata['tokenizer.ggml.model']!r} it would cut {text[:40]!r} otherwise")
