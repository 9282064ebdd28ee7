"""Masked words: the counts of BERT, the shares of 80, 10 and 10 %, and whole words as transformers finds them."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data_room.made import BOS, ENCODER, EOS, MASK, PLAIN, corpus, numbered
from tokenizers import Tokenizer as Library
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

from scantling.data import Batch, MaskedLM, Sources, batches, byte_tokenizer, one_pass, prepare
from scantling.data.corpus import Marks
from scantling.data.masked import chosen_words
from scantling.data.words import continues
from scantling.errors import ScantlingInputError
from scantling.text.tokenizer import Tokenizer

WORDS = Path(__file__).parents[1] / "data" / "cpython-license.txt"


def run(objective: MaskedLM, mode: str = "padded", steps: int = 50, seed: int = 0) -> list[Batch]:
    data = corpus(numbered(*[62] * 40, first=1000), ENCODER, vocab_size=8000)
    return list(islice(batches(data, objective, 8, 64, mode, seed), steps))


def judgements(found: list[Batch]) -> list[tuple[int, int]]:
    """Of each judged place what is read there, and the label."""
    return [(int(b.ids[at]), int(b.labels[at])) for b in found for at in zip(*np.nonzero(b.labels >= 0), strict=True)]


@pytest.mark.parametrize(("tokens", "judged"), [(1, 1), (3, 1), (10, 2), (20, 3), (62, 9), (126, 19)])
def test_the_number_of_judged_tokens_is_that_of_bert(tokens: int, judged: int) -> None:
    """max(1, round(0.15 n)), as in create_pretraining_data.py: 62 -> 9.3, 126 -> 18.9."""
    (batch,) = one_pass(corpus(numbered(tokens), ENCODER).train, "masked", 1, tokens + 2, "padded")
    assert batch.scored == judged
    hidden = batch.labels[0] != -100
    assert np.where(hidden, batch.labels[0], batch.ids[0]).tolist() == [BOS, *numbered(tokens)[0], EOS]


def test_special_tokens_are_never_judged_and_labels_are_not_shifted() -> None:
    for batch in run(MaskedLM(), steps=10):
        judged = batch.labels != -100
        whole = np.where(judged, batch.labels, batch.ids)
        assert (whole[:, 0] == BOS).all()
        assert (whole[:, -1] == EOS).all()
        assert not (judged[:, 0] | judged[:, -1]).any()
        assert (np.diff(whole[:, 1:-1], axis=1) == 1).all()


def test_80_10_and_10_per_cent() -> None:
    """Of 3600 judged tokens, within 4 standard deviations: 4 * sqrt(576) = 96 and 4 * sqrt(324) = 72."""
    judged = judgements(run(MaskedLM()))
    assert len(judged) == 50 * 8 * 9
    hidden = sum(i == MASK for i, _ in judged)
    kept = sum(i == label for i, label in judged)
    replaced = [i for i, label in judged if i not in (MASK, label)]
    assert abs(hidden - 2880) < 96
    assert abs(kept - 360) < 72
    assert abs(len(replaced) - 360) < 72
    assert min(replaced) >= 4, "special tokens stand for no word"
    assert max(replaced) < 8000
    assert len(set(replaced)) > 300


@pytest.mark.parametrize(("hidden", "replaced"), [(1.0, 0.0), (0.0, 1.0), (0.0, 0.0)])
def test_the_shares_can_be_chosen(hidden: float, replaced: float) -> None:
    judged = judgements(run(MaskedLM(hidden=hidden, replaced=replaced), steps=5))
    assert all((i == MASK) == (hidden == 1.0) for i, _ in judged)
    if replaced == hidden == 0.0:
        assert all(i == label for i, label in judged)
    if replaced == 1.0:
        assert sum(i == label for i, label in judged) < 3


def test_noise_depends_on_seed_step_and_row_only() -> None:
    """A resumed run, and the ranks of another, hide the same words."""
    whole, data = run(MaskedLM(), steps=6), corpus(numbered(*[62] * 40, first=1000), ENCODER, vocab_size=8000)
    rest = list(islice(batches(data, "masked", 8, 64, "padded", 0, whole[2].cursor), 3))
    assert all(np.array_equal(a.ids, b.ids) for a, b in zip(whole[3:], rest, strict=True))
    second = next(batches(data, "masked", 8, 64, "padded", 0, whole[2].cursor, ranks=4, rank=3))
    assert np.array_equal(second.ids, whole[3].ids[6:])
    assert np.array_equal(second.labels, whole[3].labels[6:])
    places = [np.flatnonzero(b.labels[row] != -100).tolist() for b in whole for row in range(8)]
    assert len({tuple(p) for p in places}) == 48
    other = run(MaskedLM(), steps=1, seed=1)[0]
    assert not np.array_equal(other.labels, whole[0].labels)


def test_packed_rows_keep_documents_apart_and_each_between_its_marks() -> None:
    data = corpus(numbered(4, 3, 9), ENCODER)
    found = list(one_pass(data.train, MaskedLM(hidden=0.0, replaced=0.0), 2, 11))
    assert [b.ids.tolist() for b in found] == [
        [[BOS, *numbered(4, 3, 9)[2], EOS], [BOS, 10, 11, 12, 13, EOS, BOS, 14, 15, 16, EOS]]
    ]
    assert found[0].document_ids[1].tolist() == [0] * 6 + [1] * 5
    assert found[0].position_ids[1].tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4]


def test_long_documents_are_cut_into_pieces_that_each_have_the_marks() -> None:
    found = list(one_pass(corpus(numbered(5), ENCODER).train, MaskedLM(hidden=0.0, replaced=0.0), 2, 5, "padded"))
    assert found[0].ids.tolist() == [[BOS, 10, 11, 12, EOS], [BOS, 13, 14, EOS, 0]]


def test_a_stream_is_cut_without_regard_to_documents() -> None:
    data = corpus(numbered(4, 3), ENCODER)
    found = list(one_pass(data.train, MaskedLM(hidden=0.0, replaced=0.0), 2, 6, "concatenated"))
    assert found[0].ids.tolist() == [[BOS, 10, 11, 12, 13, EOS], [BOS, EOS, 14, 15, 16, EOS]]
    assert found[1].ids.tolist()[0] == [BOS, EOS, EOS, 0, 0, 0]


def test_what_it_cannot_learn_from_is_refused() -> None:
    with pytest.raises(ScantlingInputError, match="no mask token"):
        next(batches(corpus(numbered(9), Marks()), "masked", 1, 8))
    with pytest.raises(ScantlingInputError, match="kind text, not pairs"):
        next(batches(corpus(numbered(9), PLAIN, kind="pairs", firsts=[2]), "masked", 1, 8))
    with pytest.raises(ScantlingInputError, match="no room for text"):
        next(batches(corpus(numbered(9), ENCODER), "masked", 1, 2))
    with pytest.raises(ScantlingInputError, match=r"share of masked tokens is 0\.0"):
        MaskedLM(rate=0.0)
    with pytest.raises(ScantlingInputError, match="together at most 1"):
        MaskedLM(hidden=0.9, replaced=0.2)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=40), st.floats(0.01, 1.0), st.integers(0, 99))
def test_words_are_taken_whole_and_fit(sizes: list[int], rate: float, seed: int) -> None:
    words = np.repeat(np.arange(len(sizes)), sizes)
    taken = chosen_words(words, rate, seed)
    wanted = max(1, round(rate * len(words)))
    chosen = set(words[taken].tolist())
    assert taken.tolist() == np.flatnonzero(np.isin(words, list(chosen))).tolist()
    assert 0 < len(taken) <= max(wanted, min(sizes) if min(sizes) > wanted else 0, max(sizes) * (min(sizes) > wanted))
    left = wanted - len(taken)
    assert all(sizes[word] > left for word in range(len(sizes)) if word not in chosen), "a word that fits is taken"


def wordpiece(folder: Path) -> Tokenizer:
    """A small BERT-like vocabulary, learned from the licence text."""
    library = Library(models.WordPiece(unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer()
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    library.train([str(WORDS)], trainers.WordPieceTrainer(vocab_size=400, special_tokens=special, show_progress=False))
    library.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"bos": "[CLS]", "eos": "[SEP]", "mask": "[MASK]", "pad": "[PAD]"}
    return Tokenizer.from_library(library, names)


@pytest.mark.parametrize("kind", ["wordpiece", "bytes"])
def test_words_are_those_of_the_text(tmp_path: Path, kind: str) -> None:
    """Runs of letters and digits of the licence text, by the characters that each token stands for."""
    tokenizer = wordpiece(tmp_path) if kind == "wordpiece" else byte_tokenizer("masked")
    text = "".join(char if char.isalnum() or char in " ,." else " " for char in WORDS.read_text()[:2000])
    source = tmp_path / "text.txt"
    source.write_text(text)
    data = prepare([str(source)], tokenizer, tmp_path / "out", held_out=0.0, workers=1)
    ids, spans = tokenizer.encode_spans(text)
    assert data.train.ids(0).tolist() == ids
    wanted = [
        before == start and text[start].isalnum() and text[start - 1].isalnum()
        for (_, before), (start, _) in zip([(0, -1), *spans], spans, strict=False)
    ]
    assert continues(data, np.array(ids)).tolist() == wanted
    assert sum(wanted) > 100


def test_a_word_ends_with_its_document(tmp_path: Path) -> None:
    """Two documents side by side with nothing between them: the last word of one is not joined to the next one's."""
    library = Library.from_str(byte_tokenizer("masked").files()["tokenizer.json"])
    library.post_processor = None
    tokenizer = Tokenizer.from_library(library, {"mask": "[MASK]"})
    path = tmp_path / "two.jsonl"
    path.write_text('{"text": "abcd"}\n{"text": "efgh"}\n')
    data = prepare([str(path)], tokenizer, tmp_path / "out", held_out=0.0, workers=1)
    seen = set()
    for seed in range(40):
        (batch,) = one_pass(data.train, MaskedLM(rate=0.5, whole_words=True), 1, 8, seed=seed)
        seen.add(tuple((batch.labels[0] != -100).tolist()))
    assert seen == {(True,) * 4 + (False,) * 4, (False,) * 4 + (True,) * 4}


def test_whole_words_of_a_wordpiece_vocabulary_are_those_of_transformers(tmp_path: Path) -> None:
    """The grouping that transformers' collator makes of offsets is ours, where no punctuation stands at a word."""
    tokenizer, source = wordpiece(tmp_path), tmp_path / "text.txt"
    text = re.sub(r"[^a-z ]", " ", WORDS.read_text()[:1500].lower())
    source.write_text(text)
    data = prepare(Sources((str(source),)), tokenizer, tmp_path / "out", held_out=0.0, workers=1)
    path = str(tmp_path / "out" / "tokenizer.json")
    fast = PreTrainedTokenizerFast(tokenizer_file=path, mask_token="[MASK]", pad_token="[PAD]")
    encoded = fast(text, add_special_tokens=False, return_offsets_mapping=True, return_special_tokens_mask=True)
    collator = DataCollatorForLanguageModeling(fast, whole_word_mask=True, mask_replace_prob=1, random_replace_prob=0)
    columns = (np.array([encoded[name]]) for name in ("offset_mapping", "special_tokens_mask"))
    theirs, _ = collator._calc_word_ids_and_prob_mask(*columns)
    ids = data.train.ids(0)
    assert encoded["input_ids"] == ids.tolist()
    ours = np.cumsum(~continues(data, ids))
    assert np.array_equal(ours[1:] == ours[:-1], theirs[0][1:] == theirs[0][:-1])
    assert ours[-1] < 0.8 * len(ids)
    (batch,) = list(one_pass(data.train, MaskedLM(whole_words=True), 1, len(ids) + 2, "padded"))
    judged = batch.labels[0, 1:-1] != -100
    for word in set(ours.tolist()):
        assert len(set(judged[ours == word].tolist())) == 1
    assert 0 < judged.sum() <= round(0.15 * len(ids))
