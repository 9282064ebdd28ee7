"""The number of a tokenizer's ids, counted in the bytes of its file, is what its library says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.conftest import DATA
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE, Unigram, WordLevel, WordPiece

from scantling.checkpoint.find import default_encoder, default_model
from scantling.checkpoint.gguf import read_gguf
from scantling.checkpoint.inspect.tokens import gguf_ids, tokenizer_ids

WORDS = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20), st.none(), min_size=1
)
CALM = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def ids_of(library: Tokenizer) -> int:
    return 1 + max(library.get_vocab(with_added_tokens=True).values())


@CALM
@given(words=WORDS, added=st.lists(st.text(min_size=1, max_size=9), max_size=4), pretty=st.booleans())
def test_any_vocabulary_is_counted_as_the_library_counts_it(
    tmp_path: Path, words: dict[str, None], added: list[str], pretty: bool
) -> None:
    vocab = {word: i for i, word in enumerate(words)}
    for model in (WordLevel(vocab, next(iter(vocab))), WordPiece(vocab), BPE(vocab, [])):
        library = Tokenizer(model)
        library.add_tokens([AddedToken(word, normalized=False) for word in added])
        library.save(str(tmp_path / "tokenizer.json"), pretty=pretty)
        assert tokenizer_ids(tmp_path) == ids_of(library)


@CALM
@given(words=WORDS, score=st.floats(-1e9, 0, allow_nan=False))
def test_a_vocabulary_with_scores(tmp_path: Path, words: dict[str, None], score: float) -> None:
    library = Tokenizer(Unigram([(word, score) for word in words], 0))
    library.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer_ids(tmp_path) == len(words)


@pytest.mark.parametrize("name", ["tok-bytelevel", "tok-metaspace"])
def test_recorded_tokenizers(name: str) -> None:
    library = tokenizers.Tokenizer.from_file(str(DATA / name / "tokenizer.json"))
    assert tokenizer_ids(DATA / name) == ids_of(library)


def test_real_tokenizers() -> None:
    library = tokenizers.Tokenizer.from_file(str(default_encoder() / "tokenizer.json"))
    assert tokenizer_ids(default_encoder()) == ids_of(library) == 30_522
    assert gguf_ids(read_gguf(default_model())) == 49_152


@pytest.mark.parametrize(
    "text",
    ["{}", "[]", "", "\0", '{"model": {"vocab": {"a": -1}}}', '{"model": {"vocab": {"a": 1', '{"model": {"vocab": {}}}',
     '{"model": {"vocab": [["a", 1], 5]}}', '{"model": {"vocab": "none"}}', '"vocab": {' + '"a\\' * 20_000],
)  # fmt: skip
def test_what_is_no_vocabulary_has_no_number(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text or " ")
    assert tokenizer_ids(tmp_path) is None
    assert tokenizer_ids(tmp_path / "nowhere") is None


def test_a_token_that_looks_like_the_vocabulary_is_not_taken_for_it(tmp_path: Path) -> None:
    added = [{"id": 9, "content": '"vocab": {"x": 99}', "special": True}]
    data = {"added_tokens": added, "normalizer": None, "model": {"type": "BPE", "vocab": {"a": 0, '"id": 77': 1}}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    assert tokenizer_ids(tmp_path) == 10
