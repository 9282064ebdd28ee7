"""Overlap of evaluated text with training text, against sets of tuples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data_room.made import corpus

from scantling.data import Sources, byte_tokenizer, overlap, prepare
from scantling.errors import ScantlingInputError

LICENCE = (Path(__file__).parents[1] / "data" / "cpython-license.txt").read_text()
documents = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=6)


@settings(max_examples=100, deadline=None)
@given(documents, documents, st.integers(1, 5))
def test_counts_are_those_of_sets(training: list[list[int]], evaluated: list[list[int]], n: int) -> None:
    def grams(ids: list[int]) -> list[tuple[int, ...]]:
        return [tuple(ids[at : at + n]) for at in range(len(ids) - n + 1)]

    known = {gram for ids in training for gram in grams(ids)}
    hits = [[gram in known for gram in grams(ids)] for ids in evaluated]
    found = overlap(corpus(training).train, corpus(evaluated).train, n)
    assert found.ngrams == sum(map(len, hits))
    assert found.shared == sum(map(sum, hits))
    assert found.documents == sum(len(own) > 0 for own in hits)
    assert found.touched == sum(any(own) for own in hits)
    assert found.share == (found.shared / found.ngrams if found.ngrams else 0.0)
    wanted = [sum(own) / len(own) if own else np.nan for own in hits]
    assert np.array_equal(found.shares, np.array(wanted), equal_nan=True)


def test_chunks_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    sides = [[rng.integers(0, 4, rng.integers(1, 30)).tolist() for _ in range(50)] for _ in range(2)]
    whole = overlap(corpus(sides[0]).train, corpus(sides[1]).train, 5)
    monkeypatch.setattr("scantling.data.ngrams._CHUNK_TOKENS", 40)
    cut = overlap(corpus(sides[0]).train, corpus(sides[1]).train, 5)
    assert (cut.ngrams, cut.shared, cut.touched) == (whole.ngrams, whole.shared, whole.touched)
    assert 0 < whole.shared < whole.ngrams


def test_a_copied_sentence_is_found(tmp_path: Path) -> None:
    """Two texts that share exactly one sentence of 43 bytes: 43 - 13 + 1 = 31 places."""
    sentence = "Pack my box with five dozen liquor jugs now"
    assert len(sentence) == 43
    (tmp_path / "a.txt").write_text("@@@@" + sentence + "@@@@")
    (tmp_path / "b.txt").write_text("####" + sentence + "####")
    sides = [
        prepare([str(tmp_path / f"{name}.txt")], byte_tokenizer(), tmp_path / name, held_out=0.0, workers=1).train
        for name in "ab"
    ]
    found = overlap(*sides)
    assert (found.n, found.ngrams, found.shared, found.touched) == (13, 51 - 13 + 1, 31, 1)


def test_halves_share_nothing_where_every_line_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join(f"{n * 7919:013}" for n in range(300)))
    data = prepare(
        Sources((str(tmp_path / "a.txt"),), separator="\n"), byte_tokenizer(), tmp_path / "out", held_out=0.2
    )
    assert overlap(data.train, data.held_out).shared == 0
    assert overlap(data.train, data.train).share == 1.0


def test_what_cannot_be_compared() -> None:
    data = corpus([[1, 2]]).train
    with pytest.raises(ScantlingInputError, match="n-grams of 0 tokens"):
        overlap(data, data, 0)
    assert overlap(data, corpus([[1]]).held_out, 2).share == 0.0


def test_two_tokenizers_cannot_be_compared(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(LICENCE)
    sides = [
        prepare([str(tmp_path / "a.txt")], byte_tokenizer(purpose), tmp_path / purpose, workers=1).train
        for purpose in ("causal", "masked")
    ]
    with pytest.raises(ScantlingInputError, match="of two tokenizers"):
        overlap(*sides)
