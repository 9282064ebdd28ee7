"""Tokenizers built from GGUF metadata: the splits, the marks, SentencePiece merges, and what is refused."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from scantling.errors import ScantlingInputError
from scantling.text.tokenizer import Tokenizer

relaxed = settings(max_examples=60, deadline=None)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def gpt2_metadata(**changes: object) -> dict[str, object]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<s>", "</s>", "<tool>", *alphabet, "he", "Ġh", "12", "Ġhe", "Ã©", "the"]
    values: dict[str, object] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3, 3, 4, *[1] * (len(tokens) - 3)],
        "merges": ["h e", "Ġ h", "1 2", "Ġ he"],
        "bos_token_id": 0,
        "eos_token_id": 1,
    } | changes
    return {f"tokenizer.ggml.{name}": value for name, value in values.items() if value is not None}


def split(text: str, pre: str) -> list[str]:
    library = Tokenizer.from_gguf(gpt2_metadata(pre=pre))._library
    return [text[begin:end] for _, (begin, end) in library.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["I", "'m", " here", " 12345", "!?", " \n", " x", "\n\n"]),
        ("smollm", ["I", "'m", " here", " ", "1", "2", "3", "4", "5", "!?", " \n", " x", "\n\n"]),
        ("llama-bpe", ["I", "'m", " here", " ", "123", "45", "!?", " \n", " x", "\n\n"]),
        ("qwen2", ["I", "'m", " here", " ", "1", "2", "3", "4", "5", "!?", " \n", " x", "\n\n"]),
        ("default", ["I", "'", "m", " here", " ", "123", "45", "!?", " \n", " x", "\n\n"]),
    ],
)
def test_pre_tokenizers(pre: str, pieces: list[str]) -> None:
    assert split("I'm here 12345!? \n x\n\n", pre) == pieces


@relaxed
@given(text=texts)
def test_gpt2_pre_tokenizer_is_that_of_gpt2(text: str) -> None:
    ours = Tokenizer.from_gguf(gpt2_metadata())._library.pre_tokenizer.pre_tokenize_str(text)
    assert ours == pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)


def test_gguf_marks() -> None:
    tokenizer = Tokenizer.from_gguf(gpt2_metadata(add_bos_token=True, add_eos_token=True, eot_token_id=2))
    assert tokenizer.encode("<s>he</s>") == [0, tokenizer._library.token_to_id("he"), 1, 1]
    assert tokenizer.encode("") == [0, 1]
    assert tokenizer.eos_ids == {1, 2}
    assert tokenizer.decode(tokenizer.encode("a<tool> he")) == "a<tool> he"
    assert Tokenizer.from_gguf(gpt2_metadata()).encode("") == []
    assert Tokenizer.from_gguf(gpt2_metadata(pre="llama-bpe")).encode("") == [0]
    assert Tokenizer.from_gguf(gpt2_metadata(pre="llama-bpe", add_bos_token=False)).encode("") == []
    assert Tokenizer.from_gguf(gpt2_metadata(pre="qwen2")).encode("e\u0301") == Tokenizer.from_gguf(
        gpt2_metadata(pre="qwen2")
    ).encode("\u00e9")


def test_llama3_takes_whole_words_before_merging() -> None:
    whole = Tokenizer.from_gguf(gpt2_metadata(pre="llama-bpe", add_bos_token=False))
    assert [whole.token(token_id) for token_id in whole.encode("the")] == ["the"]
    merged = Tokenizer.from_gguf(gpt2_metadata(pre="gpt-2"))
    assert [merged.token(token_id) for token_id in merged.encode("the")] == ["t", "he"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model": "t5"}, "model is 't5'; supported are 'gpt2'"),
        ({"model": None}, "model is None"),
        ({"pre": "tekken"}, "pre is 'tekken'; supported are default, gpt-2, llama-bpe, qwen2, smollm"),
        ({"pre": None}, "pre is missing"),
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": "abc"}, "tokens is not an array"),
        ({"tokens": []}, "has 0 entries"),
        ({"tokens": ["a", 7], "token_type": None}, r"tokens\[1\] is 7, not a string"),
        ({"tokens": ["a", "b", "a"], "token_type": None}, "'a' twice, as ids 0 and 2"),
        ({"token_type": [1]}, "token_type must be one integer"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["he"]}, r"merges\[0\] is 'he', not two tokens"),
        ({"merges": ["h e l"]}, r"merges\[0\] is 'h e l'"),
        ({"merges": ["x q"]}, "merges do not fit the tokens"),
        ({"bos_token_id": 10**6}, "bos_token_id is 1000000, not an id below"),
        ({"eos_token_id": True}, "eos_token_id is True"),
        ({"eot_token_id": -1}, "eot_token_id is -1"),
        ({"add_bos_token": 1}, "add_bos_token is 1, not true or false"),
        ({"add_bos_token": True, "bos_token_id": None}, "bos_token_id is missing"),
        ({"add_eos_token": True, "eos_token_id": None}, "eos_token_id is missing"),
        ({"model": "llama"}, "scores is missing"),
        ({"model": "llama", "scores": [0.0]}, "scores must be one number"),
    ],
)
def test_bad_gguf(changes: dict[str, object], told: str) -> None:
    with pytest.raises(ScantlingInputError, match=told):
        Tokenizer.from_gguf(gpt2_metadata(**changes))


def test_bad_gguf_template() -> None:
    with pytest.raises(ScantlingInputError, match=r"tokenizer\.chat_template is not text"):
        Tokenizer.from_gguf(gpt2_metadata() | {"tokenizer.chat_template": 7})


SPM_PIECES = ["ab", "▁a", "cd", "▁b", "abc", "▁ab", "abcd", "bc", "▁abc", "db", "▁abcd", "dab"]


def spm_metadata(**changes: object) -> dict[str, object]:
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *SPM_PIECES, *"▁abcd"]
    values: dict[str, object] = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * 259 + [-float(place) for place in range(len(tokens) - 259)],
        "token_type": [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)],
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | changes
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


def merge_by_score(text: str) -> list[str]:
    """SentencePiece BPE in its plainest form: join the neighbours that make the best piece, the leftmost first."""
    pieces = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        joined = [left + right for left, right in itertools.pairwise(pieces)]
        found = [(SPM_PIECES.index(piece), place) for place, piece in enumerate(joined) if piece in SPM_PIECES]
        if not found:
            break
        _, place = min(found)
        pieces[place : place + 2] = [joined[place]]
    known = {*SPM_PIECES, *"▁abcd"}
    spelt = [[piece] if piece in known else [f"<0x{byte:02X}>" for byte in piece.encode()] for piece in pieces]
    return list(itertools.chain.from_iterable(spelt))


@settings(relaxed, max_examples=300)
@given(text=st.text("abcd é🙂", max_size=20))
def test_sentencepiece_vocabulary(text: str) -> None:
    tokenizer = Tokenizer.from_gguf(spm_metadata())
    ids = tokenizer.encode(text)
    assert ids[0] == 1
    assert [tokenizer.token(token_id) for token_id in ids[1:]] == merge_by_score(text)
    assert tokenizer.decode(ids) == text
    stream = tokenizer.stream()
    assert "".join(stream.push(token_id) for token_id in ids) + stream.flush() == text


def test_sentencepiece_without_prefix_blank() -> None:
    tokenizer = Tokenizer.from_gguf(spm_metadata(add_space_prefix=False, add_bos_token=False))
    assert [tokenizer.token(token_id) for token_id in tokenizer.encode("abc ab")] == ["abc", "▁ab"]
    assert tokenizer.decode(tokenizer.encode(" abc")) == " abc"
