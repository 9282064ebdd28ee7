"""Vocabularies as GGUF metadata: what came from there goes back, what has no name there is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import DATA
from tests.text.test_gguf_tokenizer import gpt2_metadata, spm_metadata
from tokenizers import Tokenizer as Library
from tokenizers import pre_tokenizers

from scantling.checkpoint.find import default_model
from scantling.checkpoint.gguf import read_gguf
from scantling.errors import ScantlingInputError
from scantling.text.tokenizer import Tokenizer

TEXTS = ["the he 12 345", "I'm HERE", "  a\n\n b", "<s>é 中🙂</s>", ""]


def folder(tmp_path: Path, library: Any, **config: Any) -> Path:
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_vocabulary_from_gguf_goes_back_as_it_was() -> None:
    metadata = read_gguf(default_model()).metadata
    wanted = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
    found, notes = Tokenizer.from_gguf(metadata).gguf_metadata(49152)
    assert found == wanted
    assert notes == ()
    with pytest.raises(ScantlingInputError, match="has 49152 tokens and the model has 49280 rows"):
        Tokenizer.from_gguf(metadata).gguf_metadata(49280)


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "default"])
def test_a_byte_level_tokenizer_json_is_recognised_by_how_it_splits(pre: str, tmp_path: Path) -> None:
    original = gpt2_metadata(pre=pre, add_bos_token=True)
    source = Tokenizer.from_gguf(original)
    path = folder(tmp_path, source._library, bos_token="<s>", eos_token="</s>", add_bos_token=True)
    found, _ = Tokenizer.from_folder(path).gguf_metadata(source.vocab_size)
    assert found == original
    again = Tokenizer.from_gguf(found)
    assert [again.encode(text) for text in TEXTS] == [source.encode(text) for text in TEXTS]


@pytest.mark.parametrize(
    ("parts", "pre"),
    [
        ([pre_tokenizers.ByteLevel(add_prefix_space=False)], "gpt-2"),
        ([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)], "smollm"),
    ],
)
def test_the_spellings_of_published_tokenizers(parts: list[Any], pre: str, tmp_path: Path) -> None:
    library = Library.from_str(Tokenizer.from_gguf(gpt2_metadata())._library.to_str())
    library.pre_tokenizer = pre_tokenizers.Sequence(parts) if len(parts) > 1 else parts[0]
    found, _ = Tokenizer.from_folder(folder(tmp_path, library)).gguf_metadata(300)
    assert found["tokenizer.ggml.pre"] == pre


def test_rows_without_a_token_are_filled_up_and_mean_nothing_afterwards() -> None:
    tokenizer = Tokenizer.from_folder(DATA / "tok-bytelevel")
    found, _ = tokenizer.gguf_metadata(310)
    assert found["tokenizer.ggml.tokens"][300:302] == ["[PAD300]", "[PAD301]"]
    assert found["tokenizer.ggml.token_type"][299:301] == [1, 5]
    again = Tokenizer.from_gguf(found)
    assert (again.vocab_size, again.bos_id, again.eos_ids) == (300, 0, {1})
    assert again.chat_template == tokenizer.chat_template
    assert [again.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]
    assert len(again.gguf_metadata(310)[0]["tokenizer.ggml.tokens"]) == 310
    with pytest.raises(ScantlingInputError, match="it has the id 299 and the model has 299 rows"):
        tokenizer.gguf_metadata(299)


def test_sentencepiece_gets_scores_in_the_order_of_its_merges(tmp_path: Path) -> None:
    source = Tokenizer.from_gguf(spm_metadata())
    path = folder(tmp_path, source._library, bos_token="<s>", eos_token="</s>", add_bos_token=True)
    found, _ = Tokenizer.from_folder(path).gguf_metadata(source.vocab_size)
    assert found["tokenizer.ggml.model"] == "llama"
    assert found["tokenizer.ggml.token_type"] == spm_metadata()["tokenizer.ggml.token_type"]
    assert found["tokenizer.ggml.add_space_prefix"] is True
    assert found["tokenizer.ggml.unknown_token_id"] == 0
    again = Tokenizer.from_gguf(found)
    for text in ["abcd abc dab", " ab  cd", "abcé🙂", "db abcd"]:
        assert again.encode(text) == source.encode(text)


def changed(**changes: Any) -> Library:
    data = json.loads(Tokenizer.from_gguf(gpt2_metadata())._library.to_str())
    return Library.from_str(json.dumps(data | changes))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "it normalises and splits text in none of the ways"),
        (
            {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
            "it splits text by ByteLevel, and tokenizer.ggml.pre names no such way",
        ),
        ({"model": {"type": "WordLevel", "vocab": {"<s>": 0}, "unk_token": "<s>"}}, "its model is 'WordLevel'"),
    ],
)
def test_what_gguf_has_no_name_for_is_refused(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder(tmp_path, changed(**changes)))
    with pytest.raises(ScantlingInputError, match=f"the tokenizer cannot be written as GGUF: {told}"):
        tokenizer.gguf_metadata(400)


def test_a_metaspace_that_is_not_sentencepiece_is_found_out() -> None:
    """Its words are cut before merging, so runs of blanks differ."""
    with pytest.raises(ScantlingInputError, match="as GGUF's kind 'llama' it would cut '  two  spaces"):
        Tokenizer.from_folder(DATA / "tok-metaspace").gguf_metadata(332)
