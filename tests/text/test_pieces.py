"""SentencePiece models: the ids are those of the library itself, which is the reference here."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.train.real_text import topics

from scantling.data import read_tokenizer
from scantling.errors import MissingExtra, ScantlingInputError
from scantling.text.tokenizer import Tokenizer

sentencepiece: Any = pytest.importorskip("sentencepiece")

KINDS: dict[str, dict[str, Any]] = {
    "unigram": {"model_type": "unigram", "pad_id": 3},
    "unigram with bytes": {"model_type": "unigram", "byte_fallback": True, "normalization_rule_name": "identity"},
    "bpe as llama": {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
    },
    "bpe without a first space": {"model_type": "bpe", "add_dummy_prefix": False, "bos_id": -1},
}
TEXTS = [
    "Functions are first-class objects.",
    "  two  spaces, and one behind ",
    "ﬁne ½ naïve Ｗide",
    "line one\nline two\ttabbed",
    "emoji 🦜 and 漢字, unseen",
    "",
    " ",
    "x = {'a': [1, 2.5e-3]}  # comment",
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of each kind, learned from the documentation of Python."""
    folder = tmp_path_factory.mktemp("pieces")
    files = sorted(topics(folder / "texts").glob("*.txt"))[:20]
    found = {}
    for name, options in KINDS.items():
        path = folder / name.replace(" ", "-")
        sentencepiece.SentencePieceTrainer.train(
            input=[str(f) for f in files],
            model_prefix=str(path),
            vocab_size=600,
            minloglevel=2,
            num_threads=1,
            **options,
        )
        found[name] = path.with_suffix(".model")
    return found


@pytest.mark.parametrize("name", list(KINDS))
def test_ids_and_text_are_those_of_sentencepiece(name: str, models: dict[str, Path]) -> None:
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(models[name]))
    ours = read_tokenizer(models[name])
    assert ours.vocab_size == theirs.vocab_size()
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text, add_special=False) == ids, text
        assert ours.decode(ids) == theirs.decode(ids).replace(" ⁇ ", ""), text


def test_a_long_text_has_the_ids_of_sentencepiece(models: dict[str, Path]) -> None:
    from pydoc_data.topics import topics as texts

    theirs = sentencepiece.SentencePieceProcessor(model_file=str(models["unigram"]))
    text = texts["lambda"] + texts["naming"]
    assert len(text) > 5000
    assert read_tokenizer(models["unigram"]).encode(text, add_special=False) == theirs.encode(text)


def test_a_model_without_a_start_has_none_before_a_text(models: dict[str, Path]) -> None:
    ours = read_tokenizer(models["bpe without a first space"])
    assert ours.bos_id is None
    assert ours.encode("a text") == ours.encode("a text", add_special=False)


def test_what_stands_around_a_text(models: dict[str, Path], tmp_path: Path) -> None:
    """BPE begins with BOS and unigram ends with EOS, as in llama.cpp; a folder's config decides otherwise."""
    bpe, unigram = (read_tokenizer(models[name]) for name in ("bpe as llama", "unigram"))
    bare = [one.encode("a text", add_special=False) for one in (bpe, unigram)]
    assert bpe.encode("a text") == [1, *bare[0]]
    assert unigram.encode("a text") == [*bare[1], 2]
    assert (bpe.bos_id, bpe.ends, unigram.pad_id, bpe.pad_id) == (1, (2,), 3, None)
    (tmp_path / "tokenizer.model").write_bytes(models["bpe as llama"].read_bytes())
    config = {"add_bos_token": False, "add_eos_token": True, "chat_template": "{{ messages }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    folder = Tokenizer.from_folder(tmp_path)
    assert folder.encode("a text") == [*bare[0], 2]
    assert folder.chat_template == "{{ messages }}"


def test_it_is_written_as_tokenizer_json(models: dict[str, Path], tmp_path: Path) -> None:
    """What a trained model is saved with reads the same without the library."""
    ours = read_tokenizer(models["unigram"])
    for name, text in ours.files().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    again = Tokenizer.from_folder(tmp_path)
    assert [again.encode(text) for text in TEXTS] == [ours.encode(text) for text in TEXTS]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is no SentencePiece model: 0 pieces"), (b"\xff\xff\xff\xff", "is no SentencePiece model")],
)
def test_another_file_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.model"
    path.write_bytes(content)
    with pytest.raises(ScantlingInputError, match=message):
        read_tokenizer(path)


def test_a_damaged_file_gets_one_sentence(models: dict[str, Path], tmp_path: Path) -> None:
    """120 files with four bytes changed or the end cut off: read all the same, or refused, and never anything else."""
    draw, whole, path = random.Random(0), models["unigram"].read_bytes(), tmp_path / "a.model"
    refused: list[str] = []
    for n in range(120):
        damaged = bytearray(whole[: len(whole) * (60 + n % 60) // 120] if n % 4 == 0 else whole)
        for _ in range(4):
            # Half of them in what the file says of itself, at its end.
            start = 0 if n % 2 else len(damaged) - 500
            damaged[draw.randrange(start, len(damaged))] = draw.randrange(256)
        path.write_bytes(damaged)
        try:
            read_tokenizer(path).encode("some text")
        except ScantlingInputError as error:
            refused.append(str(error))
    assert len(refused) > 30
    assert not any("\n" in sentence for sentence in refused)


def test_words_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one two three four five six seven\n" * 50)
    prefix = str(tmp_path / "words")
    options = {"model_type": "word", "vocab_size": 10, "minloglevel": 2, "num_threads": 1}
    sentencepiece.SentencePieceTrainer.train(input=str(text), model_prefix=prefix, **options)
    with pytest.raises(ScantlingInputError, match="of words or characters; unigram or BPE is needed"):
        read_tokenizer(f"{prefix}.model")


def test_without_the_library_the_command_that_installs_it_is_said(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(
        MissingExtra, match=r"sentencepiece is needed to read .* pip install 'scantling\[sentencepiece\]'"
    ):
        read_tokenizer(models["unigram"])
