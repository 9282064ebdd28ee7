"""Build a tokenizer of the `tokenizers` library from the vocabulary inside a GGUF file.

Sources: the GGUF specification (github.com/ggml-org/ggml, docs/gguf.md) for the keys and token types, and the table of
pre-tokenizers of llama.cpp (src/llama-vocab.cpp) for the splits that each `tokenizer.ggml.pre` names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from scantling.errors import ScantlingInputError, need
from scantling.text import gguf_wordpiece as wordpiece

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
MAX_TOKENS = 4_194_304

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CASELESS_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _WORDS, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (_WORDS,),
    "smollm": (r"\p{N}", _WORDS),
    "llama-bpe": (_CASELESS_WORDS % "{1,3}",),
    "qwen2": (_CASELESS_WORDS % "",),
}
_MARKS = (CONTROL, UNKNOWN)
_PREFIX = "tokenizer.ggml."


def build(metadata: Mapping[str, object]) -> Any:
    """A `tokenizers.Tokenizer` with the vocabulary of a GGUF file.

    `tokenizer.ggml.model` may be `gpt2` (byte-level BPE), `llama` (SentencePiece BPE) or `bert` (WordPiece, always with
    [CLS] and [SEP] around a text, as in llama.cpp). The second is turned into ranked merges the way transformers does
    it: equal to SentencePiece save where a piece made in two ways overlaps itself, as in runs of one character. For pre
    `qwen2` text is put into NFC, as in the model's own tokenizer. Tokens `[PAD<id>]` that end the list and are marked
    unused only fill the token table up and are left out.

    Raises:
        ScantlingInputError: a key is missing or malformed, or the model or pre-tokenizer is not supported.
    """
    model = metadata.get(_PREFIX + "model")
    if model not in ("gpt2", "llama", "bert"):
        raise ScantlingInputError(
            f"GGUF metadata: tokenizer.ggml.model is {model!r}; supported are 'gpt2' (byte-level BPE), 'llama' "
            "(SentencePiece BPE) and 'bert' (WordPiece); give a folder with tokenizer.json instead"
        )
    tokens = _strings(metadata, "tokens")
    if not 0 < len(tokens) <= MAX_TOKENS:
        raise ScantlingInputError(
            f"GGUF metadata: tokenizer.ggml.tokens has {len(tokens):,} entries, not 1 to {MAX_TOKENS:,}"
        )
    vocabulary = _by_token(tokens)
    types = _types(metadata, len(tokens))
    if model == "bert":
        types = _marked(metadata, types)
        tokens = [wordpiece.plain(token, kind in _MARKS) for token, kind in zip(tokens, types, strict=True)]
        vocabulary = _by_token(tokens)
    while types and types[-1] == UNUSED and tokens[-1] == padding(len(tokens) - 1):
        del vocabulary[tokens.pop()], types[-1]
    if model == "gpt2":
        library = _byte_level(metadata, vocabulary)
    elif model == "llama":
        library = _sentencepiece(metadata, vocabulary, types)
    else:
        library = _wordpiece(metadata, vocabulary, tokens)
    add_marked(library, tokens, types)
    return library


def _by_token(tokens: list[str]) -> dict[str, int]:
    vocabulary = {token: place for place, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        place = next(place for place, token in enumerate(tokens) if vocabulary[token] != place)
        raise ScantlingInputError(
            f"GGUF metadata: tokenizer.ggml.tokens has {tokens[place]!r} twice, as ids {place} and "
            f"{vocabulary[tokens[place]]}"
        )
    return vocabulary


def padding(token_id: int) -> str:
    """What stands in a GGUF file for an id that the token table has and the tokenizer has not."""
    return f"[PAD{token_id}]"


def adds_bos(metadata: Mapping[str, object]) -> bool:
    """Whether encoding starts with BOS: the file's word, or else what llama.cpp does for this kind of vocabulary."""
    usual = metadata.get(_PREFIX + "model") == "llama" or metadata.get(_PREFIX + "pre") == "llama-bpe"
    return _flag(metadata, "add_bos_token", usual)


def token_id(metadata: Mapping[str, object], name: str) -> int | None:
    """The id under `tokenizer.ggml.<name>_token_id`, or None.

    Raises:
        ScantlingInputError: it is not the id of a token.
    """
    value = metadata.get(f"{_PREFIX}{name}_token_id")
    if value is None:
        return None
    size = len(_array(metadata, "tokens"))
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < size:
        raise ScantlingInputError(f"GGUF metadata: {_PREFIX}{name}_token_id is {value!r}, not an id below {size}")
    return value


def _byte_level(metadata: Mapping[str, object], vocabulary: dict[str, int]) -> Any:
    tokenizers = need("tokenizers", "read text")
    pre = metadata.get(_PREFIX + "pre")
    if not isinstance(pre, str) or pre not in SPLITS:
        what = "is missing" if pre is None else f"is {pre!r}"
        raise ScantlingInputError(
            f"GGUF metadata: tokenizer.ggml.pre {what}; supported are {', '.join(sorted(SPLITS))}; give a folder with "
            "tokenizer.json instead"
        )
    merges = [_pair(merge, place) for place, merge in enumerate(_strings(metadata, "merges"))]
    try:
        model = tokenizers.models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre == "llama-bpe")
    except Exception as error:
        raise ScantlingInputError(f"GGUF metadata: tokenizer.ggml.merges do not fit the tokens: {error}") from None
    library = tokenizers.Tokenizer(model)
    parts = tokenizers.pre_tokenizers
    splits = [parts.Split(tokenizers.Regex(pattern), "isolated") for pattern in SPLITS[pre]]
    library.pre_tokenizer = parts.Sequence([*splits, parts.ByteLevel(add_prefix_space=False, use_regex=False)])
    library.decoder = tokenizers.decoders.ByteLevel()
    if pre == "qwen2":
        library.normalizer = tokenizers.normalizers.NFC()
    _append_eos(library, metadata)
    return library


def _sentencepiece(metadata: Mapping[str, object], vocabulary: dict[str, int], types: list[int]) -> Any:
    tokenizers = need("tokenizers", "read text")
    unknown = [token for token, kind in zip(vocabulary, types, strict=True) if kind == UNKNOWN]
    model = tokenizers.models.BPE(
        vocab=vocabulary,
        merges=_ranked_merges(metadata, vocabulary, types),
        unk_token=unknown[0] if unknown else None,
        fuse_unk=True,
        byte_fallback=BYTE in types,
    )
    library = tokenizers.Tokenizer(model)
    replace = [tokenizers.normalizers.Replace(" ", "▁")]
    restore = [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    if _flag(metadata, "add_space_prefix", True):
        replace.insert(0, tokenizers.normalizers.Prepend("▁"))
        restore.append(tokenizers.decoders.Strip(" ", 1, 0))
    library.normalizer = tokenizers.normalizers.Sequence(replace)
    library.decoder = tokenizers.decoders.Sequence(restore)
    _append_eos(library, metadata)
    return library


def _wordpiece(metadata: Mapping[str, object], vocabulary: dict[str, int], tokens: list[str]) -> Any:
    lowercase = _flag(metadata, "normalizer.lowercase", True)
    strip_accents = _flag(metadata, "normalizer.strip_accents", lowercase)
    marks = {name: tokens[_mark(metadata, name)] for name in wordpiece.MARKS}
    return wordpiece.library(vocabulary, marks, lowercase, strip_accents)


def _mark(metadata: Mapping[str, object], name: str) -> int:
    """The id of a mark of WordPiece: the file's, or else BERT's."""
    key, usual = wordpiece.MARKS[name]
    found = token_id(metadata, key.removesuffix("_token_id"))
    if found is None and name == "cls":
        # The key of older files.
        found = token_id(metadata, "cls")
    if found is not None:
        return found
    if not usual < (size := len(_array(metadata, "tokens"))):
        raise ScantlingInputError(f"GGUF metadata: {_PREFIX}{key} is missing, and BERT's own is no id below {size}")
    return usual


def _marked(metadata: Mapping[str, object], types: list[int]) -> list[int]:
    """The kinds of the tokens, those that a key calls a mark among the marks."""
    marks = [_mark(metadata, name) for name in wordpiece.MARKS]
    marks += [found for name in ("padding", "mask") if (found := token_id(metadata, name)) is not None]
    return [CONTROL if place in marks else kind for place, kind in enumerate(types)]


def _ranked_merges(
    metadata: Mapping[str, object], vocabulary: dict[str, int], types: list[int]
) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, the pieces with the highest score first."""
    scores = list(_array(metadata, "scores"))[: len(vocabulary)]
    if len(scores) != len(vocabulary) or not all(isinstance(s, int | float) and not math.isnan(s) for s in scores):
        raise ScantlingInputError("GGUF metadata: tokenizer.ggml.scores must be one number for each token")
    pieces = [piece for piece, kind in zip(vocabulary, types, strict=True) if kind in (NORMAL, USER_DEFINED)]
    known = set(pieces)
    pieces.sort(key=lambda piece: -scores[vocabulary[piece]])
    merges = []
    for piece in pieces:
        ways = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        possible = [(left, right) for left, right in ways if left in known and right in known]
        merges += sorted(possible, key=lambda way: (vocabulary[way[0]], vocabulary[way[1]]))
    return merges


def add_marked(library: Any, tokens: list[str], types: list[int]) -> None:
    """Tell the library which tokens are marks, and which a user defined."""
    added = need("tokenizers", "read text").AddedToken
    for token, kind in zip(tokens, types, strict=True):
        if kind in (CONTROL, UNKNOWN) and token:
            library.add_special_tokens([added(token, special=True, normalized=False)])
        elif kind == USER_DEFINED and token:
            library.add_tokens([added(token, special=False, normalized=False)])


def _append_eos(library: Any, metadata: Mapping[str, object]) -> None:
    if not _flag(metadata, "add_eos_token", False):
        return
    eos = token_id(metadata, "eos")
    if eos is None:
        raise ScantlingInputError("GGUF metadata: add_eos_token is set, but tokenizer.ggml.eos_token_id is missing")
    name = library.id_to_token(eos)
    processors = need("tokenizers.processors", "read text")
    library.post_processor = processors.TemplateProcessing(single=["$A", name], special_tokens=[(name, eos)])


def _flag(metadata: Mapping[str, object], name: str, usual: bool) -> bool:
    value = metadata.get(_PREFIX + name, usual)
    if not isinstance(value, bool):
        raise ScantlingInputError(f"GGUF metadata: {_PREFIX}{name} is {value!r}, not true or false")
    return value


def _array(metadata: Mapping[str, object], name: str) -> Sequence[Any]:
    value = metadata.get(_PREFIX + name)
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        what = "is missing" if value is None else "is not an array"
        raise ScantlingInputError(f"GGUF metadata: {_PREFIX}{name} {what}")
    return value


def _strings(metadata: Mapping[str, object], name: str) -> list[str]:
    values = list(_array(metadata, name))
    for place, value in enumerate(values):
        if not isinstance(value, str):
            raise ScantlingInputError(f"GGUF metadata: {_PREFIX}{name}[{place}] is {value!r}, not a string")
    return values


def _types(metadata: Mapping[str, object], size: int) -> list[int]:
    if metadata.get(_PREFIX + "token_type") is None:
        return [NORMAL] * size
    types = list(_array(metadata, "token_type"))
    if len(types) != size or not all(isinstance(kind, int) for kind in types):
        raise ScantlingInputError(
            f"GGUF metadata: tokenizer.ggml.token_type must be one integer for each of the {size} tokens"
        )
    return types


def _pair(merge: str, place: int) -> tuple[str, str]:
    left, blank, right = merge.partition(" ")
    if not (left and blank and right) or " " in right:
        raise ScantlingInputError(f"GGUF metadata: tokenizer.ggml.merges[{place}] is {merge!r}, not two tokens")
    return left, right
