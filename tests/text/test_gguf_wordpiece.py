"""WordPiece vocabularies as GGUF metadata, there and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from scantling.checkpoint.find import default_encoder
from scantling.errors import ScantlingInputError
from scantling.text.gguf_wordpiece import plain, spelt
from scantling.text.tokenizer import Tokenizer

TEXTS = [
    "A man is eating food.",
    "The girl's carrying a baby, isn't she?",
    "Naïve café ÀÉÎ straße",
    "e\u0301 and é",
    "中文字 日本語テスト",
    "हिन्दी русский العربية",
    "한국어 가나다",
    "🙂👍🏽",
    "$100 #1 50% a+b=c <tag/> ~`|\\^",
    "[CLS] hello [SEP] [MASK] [PAD] [UNK] world",
    "[unused5] [cls]",
    "supercalifragilisticexpialidocious",
    "a" * 100 + " " + "b" * 101,
    "tabs\tand\n\nnew\r\nlines \u00a0 wide\u3000blank",
    "zero\u200bwidth \x00 null \ufffd replaced \x07",
    "İstanbul ǅ ﬁ ½ Ⅷ ²",
    "“quoted” ‘x’ … — –",
    "1234567 3.14 1,000",
    "▁under ##sharp ## #",
    "",
]


def metadata(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "model": "bert",
        "tokens": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "▁he", "llo", "▁the", "▁!", "s", "▁É", "▁e"],
        "token_type": [3] * 5 + [1] * 7,
        "bos_token_id": 2,
        "seperator_token_id": 3,
        "unknown_token_id": 1,
        "mask_token_id": 4,
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


def folder(tmp_path: Path, library: Library) -> Path:
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"mask_token": "[MASK]"}))
    return tmp_path


def library(**changes: Any) -> Library:
    return Library.from_str(Tokenizer.from_gguf(metadata(**changes))._library.to_str())


def test_the_real_vocabulary_goes_there_and_back() -> None:
    tokenizer = Tokenizer.from_folder(default_encoder())
    found, notes = tokenizer.gguf_metadata(30522)
    assert notes == ()
    tokens = found["tokenizer.ggml.tokens"]
    # The lines of BERT's vocab.txt, as llama.cpp's converter rewrites them.
    known = {0: "[PAD]", 1: "▁[unused0]", 100: "[UNK]", 101: "[CLS]", 102: "[SEP]", 103: "[MASK]", 999: "▁!"}
    assert {place: tokens[place] for place in known} == known
    assert (tokens[1996], tokens[2015], tokens[2017]) == ("▁the", "s", "▁you")
    assert [i for i, kind in enumerate(found["tokenizer.ggml.token_type"]) if kind == 3] == [0, 100, 101, 102, 103]
    again = Tokenizer.from_gguf(found)
    assert [again.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert again.decode(ids) == tokenizer.decode(ids)
        assert again.encode(text, add_special=False) == tokenizer.encode(text, add_special=False)
    assert (again.mask_id, again.bos_id, again.eos_ids) == (103, None, frozenset())
    assert again._library.get_vocab() == tokenizer._library.get_vocab()


def test_ids_by_hand() -> None:
    tokenizer = Tokenizer.from_gguf(metadata())
    assert tokenizer.encode("Hello thes! É [MASK] nil") == [2, 5, 6, 7, 9, 8, 11, 4, 1, 3]
    cased = Tokenizer.from_gguf(metadata(**{"normalizer.lowercase": False}))
    assert cased.encode("Hello É") == [2, 1, 10, 3]
    stripped = Tokenizer.from_gguf(metadata(**{"normalizer.lowercase": True, "normalizer.strip_accents": False}))
    assert stripped.encode("É E") == [2, 1, 11, 3]


def test_the_marks_are_those_of_bert_where_no_key_says() -> None:
    tokens = [f"▁w{i}" for i in range(100)] + ["[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    bare = {"bos_token_id": None, "seperator_token_id": None, "unknown_token_id": None, "mask_token_id": None}
    tokenizer = Tokenizer.from_gguf(metadata(tokens=tokens, token_type=None, **bare))
    assert tokenizer.encode("w7 x") == [101, 7, 100, 102]
    with pytest.raises(ScantlingInputError, match="bos_token_id is missing, and BERT's own is no id below 12"):
        Tokenizer.from_gguf(metadata(bos_token_id=None))
    assert Tokenizer.from_gguf(metadata(bos_token_id=None, cls_token_id=2)).encode("") == [2, 3]


@pytest.mark.parametrize(
    ("token", "mark", "written"), [("the", False, "▁the"), ("##s", False, "s"), ("[CLS]", True, "[CLS]")]
)
def test_spellings(token: str, mark: bool, written: str) -> None:
    assert spelt(token, mark) == written
    assert plain(written, mark) == token


@pytest.mark.parametrize("cased", [True, False])
def test_case_and_padding_rows_are_kept(cased: bool, tmp_path: Path) -> None:
    source = library(**{"normalizer.lowercase": not cased})
    found, _ = Tokenizer.from_folder(folder(tmp_path, source)).gguf_metadata(14)
    assert found["tokenizer.ggml.normalizer.lowercase"] is not cased
    assert found["tokenizer.ggml.tokens"][12:] == ["▁[PAD12]", "▁[PAD13]"]
    again = Tokenizer.from_gguf(found)
    assert again.vocab_size == 12
    assert again.encode("Hello É") == Tokenizer.from_folder(tmp_path).encode("Hello É")


def changed(name: str) -> Library:
    source = library()
    if name == "prefix":
        return Library.from_str(
            source.to_str().replace('"continuing_subword_prefix":"##"', '"continuing_subword_prefix":"@@"')
        )
    if name == "longest":
        return Library.from_str(
            source.to_str().replace('"max_input_chars_per_word":100', '"max_input_chars_per_word":50')
        )
    if name == "normalizer":
        source.normalizer = normalizers.Lowercase()
    elif name == "words":
        source.pre_tokenizer = pre_tokenizers.Whitespace()
    elif name == "added":
        source.add_tokens([AddedToken("hello", normalized=False)])
    elif name == "ends":
        source.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 2)])
    return source


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("prefix", "marks what continues a word with '@@', not '##'"),
        ("longest", "its longest word has 50 characters"),
        ("normalizer", "it cleans text in another way than BERT"),
        ("words", "it cuts words by Whitespace"),
        ("added", "'hello' was added to its words"),
        ("ends", "it does not put one mark before a text and one after it"),
    ],
)
def test_what_has_no_key_is_refused(name: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ScantlingInputError, match=told):
        Tokenizer.from_folder(folder(tmp_path, changed(name))).gguf_metadata(13)


def test_a_token_that_would_come_back_as_another_is_refused(tmp_path: Path) -> None:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "▁he", "llo", "▁the", "▁!", "s", "▁É", "▁e"]
    data = json.loads(library(tokens=tokens).to_str())
    data["model"]["vocab"]["##▁x"] = data["model"]["vocab"].pop("##s")
    source = Library.from_str(json.dumps(data))
    with pytest.raises(ScantlingInputError, match="some of its tokens would be others"):
        Tokenizer.from_folder(folder(tmp_path, source)).gguf_metadata(12)


def test_one_token_twice_is_refused() -> None:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "##he", "he"]
    with pytest.raises(ScantlingInputError, match=r"tokenizer.ggml.tokens has '##he' twice, as ids 4 and 5"):
        Tokenizer.from_gguf(metadata(tokens=tokens, token_type=[3] * 5 + [1], mask_token_id=None))
