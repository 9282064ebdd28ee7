"""Pairs with teacher forcing, and T5's span corruption with the published lengths."""

from __future__ import annotations

import math
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data_room.made import PLAIN, corpus, numbered

from scantling.data import Batch, Layout, Seq2Seq, SpanCorruption, batches, one_pass
from scantling.data.corpus import Marks
from scantling.errors import ScantlingInputError

END = 1
T5 = Marks(after=(END,), special=(0, END), eos=END, sentinels=tuple(range(99_999, 99_899, -1)))


def pairs(batch: Batch) -> list[tuple[list[int], list[int], list[int]]]:
    """Of each row the source, what the decoder reads, and what is judged, without padding."""
    assert batch.decoder_ids is not None
    assert batch.decoder_mask is not None
    found = []
    for row in range(len(batch.ids)):
        real, decoded = batch.attention_mask[row], batch.decoder_mask[row]
        assert (batch.labels[row][~decoded] == -100).all()
        columns = (batch.ids[row][real], batch.decoder_ids[row][decoded], batch.labels[row][decoded])
        found.append(tuple(column.tolist() for column in columns))
    return found  # type: ignore[return-value]


class TestPairs:
    data = corpus([[5, 6, 7, 8, 9], [20, 30]], T5, kind="pairs", firsts=[2, 1])

    def test_the_decoder_reads_the_target_shifted_right(self) -> None:
        (batch,) = one_pass(self.data.train, "seq2seq", 2, 6, "padded")
        assert pairs(batch) == [([5, 6, END], [0, 7, 8, 9], [7, 8, 9, END]), ([20, END], [0, 30], [30, END])]
        assert batch.ids.shape == batch.labels.shape == (2, 6)
        assert (batch.documents, batch.tokens, batch.scored) == (2, 11, 6)
        assert batch.utilisation == 11 / 24

    def test_the_cards_start_token_and_another_length_of_the_target(self) -> None:
        (batch,) = one_pass(self.data.train, Seq2Seq(start_id=77, target_tokens=4), 2, 6, "padded")
        assert pairs(batch)[0] == ([5, 6, END], [77, 7, 8, 9], [7, 8, 9, END])
        assert batch.labels.shape == (2, 4)

    def test_an_end_token_that_is_also_padding_is_judged(self) -> None:
        """Labels are left out by length, and not by id: else a model never learns to stop."""
        marks = Marks(after=(0,), special=(0,), eos=0, pad=0)
        data = corpus([[5, 6, 7, 8, 9], [20, 30]], marks, kind="pairs", firsts=[2, 1])
        (batch,) = one_pass(data.train, "seq2seq", 2, 4, "padded")
        assert batch.labels.tolist() == [[7, 8, 9, 0], [30, 0, -100, -100]]

    def test_pairs_that_are_too_long(self) -> None:
        with pytest.raises(ScantlingInputError, match=r"1 of 2 documents .*needs 4"):
            next(batches(self.data, "seq2seq", 1, 3, "padded"))
        with pytest.raises(ScantlingInputError, match="1 of 2 documents"):
            next(batches(self.data, Seq2Seq(target_tokens=3), 1, 6, "padded"))
        (cut, _) = one_pass(self.data.train, Seq2Seq(target_tokens=2), 1, 2, Layout("padded", "truncate"))
        assert pairs(cut) == [([5, END], [0, 7], [7, 8])], "a source is closed, a target that goes on is not"
        (kept,) = one_pass(self.data.train, "seq2seq", 1, 3, Layout("padded", "drop"))
        assert pairs(kept) == [([20, END], [0, 30], [30, END])]

    def test_what_it_cannot_learn_from(self) -> None:
        with pytest.raises(ScantlingInputError, match="kind pairs, not text"):
            next(batches(corpus(numbered(5), T5), "seq2seq", 1, 8, "padded"))
        with pytest.raises(ScantlingInputError, match="padded, not packed"):
            next(batches(self.data, "seq2seq", 1, 8))
        for objective in ("seq2seq", "prefix"):
            with pytest.raises(ScantlingInputError, match="cannot split a pair"):
                next(batches(self.data, objective, 1, 8, Layout("padded", "split")))

    def test_rows_of_padding_at_the_end(self) -> None:
        (batch,) = one_pass(self.data.train, "seq2seq", 3, 6, "padded")
        assert pairs(batch)[2] == ([], [], [])


class TestSpans:
    @pytest.mark.parametrize(
        ("density", "mean", "tokens", "text", "target"),
        [
            # The figure of T5's own training: sources of 512, targets of 114 (TASK_FEATURE_LENGTHS of its recipes).
            (0.15, 3.0, 512, 568, 114),
            # By hand for 16: 16 tokens have 2 out in 1 span: 14 + 1 + 1 = 16; 17 have 3 out in 1: 14 + 1 + 1 = 16.
            # 18 have 3 out: 15 + 1 + 1 = 17, too long. The target is 3 + 1 + 1.
            (0.15, 3.0, 16, 17, 5),
            # 11 tokens have 6 out in 2 spans: a source of 8 and a target of 9, and where half is out T5 takes one less.
            (0.5, 3.0, 8, 10, 8),
        ],
    )
    def test_lengths_are_the_published_ones(
        self, density: float, mean: float, tokens: int, text: int, target: int
    ) -> None:
        objective = SpanCorruption(density, mean)
        assert objective.room(tokens, T5) == text
        assert objective.lengths(text, T5)[1] == target

    @settings(max_examples=200, deadline=None)
    @given(st.integers(7, 700), st.sampled_from([0.15, 0.1, 0.3]), st.sampled_from([3.0, 2.0, 8.0]))
    def test_lengths_are_those_of_the_published_search(self, tokens: int, density: float, mean: float) -> None:
        """T5's search, which begins at the row's length less its end token, over lengths with at least one span."""

        def source(length: int) -> int:
            noise = round(length * density)
            return length - noise + round(noise / mean) + 1

        length = tokens - 1
        while source(length + 1) <= tokens:
            length += 1
        noise = round(length * density)
        if noise < 1 or round(noise / mean) < 1:
            return
        objective = SpanCorruption(density, mean)
        many = Marks(after=(END,), sentinels=tuple(range(1000)))
        assert objective.room(tokens, many) == length
        assert objective.lengths(length, many) == (source(length), noise + round(noise / mean) + 1)

    @settings(max_examples=200, deadline=None)
    @given(st.integers(1, 300), st.sampled_from([0.15, 0.5, 0.9]), st.sampled_from([1.0, 3.0, 10.0]), st.integers())
    def test_noise_has_exactly_its_numbers_and_text_comes_first(
        self, length: int, density: float, mean: float, seed: int
    ) -> None:
        noise = SpanCorruption(density, mean).noise(length, seed)
        wanted, spans = SpanCorruption(density, mean).spans(length)
        assert len(noise) == length
        assert not noise[0]
        if length > 1:
            assert noise[-1]
            assert noise.sum() == wanted
            assert int((noise[1:] & ~noise[:-1]).sum()) == spans

    def test_all_ways_to_cut_are_equally_likely(self) -> None:
        """Text of 6 with 3 out in 2 spans: 2 ways for each kind, so 4 masks; chi-squared, 3 degrees of freedom."""
        objective = SpanCorruption(0.5, 1.5)
        assert objective.spans(6) == (3, 2)
        counts = Counter(tuple(objective.noise(6, seed).tolist()) for seed in range(4000))
        assert len(counts) == 4
        assert sum((count - 1000) ** 2 / 1000 for count in counts.values()) < 16.3

    @settings(max_examples=40, deadline=None)
    @given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(8, 40), st.sampled_from([0, 1]))
    def test_source_and_target_together_are_the_text(self, lengths: list[int], tokens: int, streamed: int) -> None:
        """Each sentinel of the source stands for what follows it in the target."""
        data = corpus(numbered(*lengths), T5)
        mode = ("padded", "concatenated")[streamed]
        texts = []
        for batch in one_pass(data.train, "spans", 2, tokens, mode):
            for source, decoded, labels in pairs(batch):
                if not source:
                    continue
                assert decoded == [0, *labels[:-1]]
                assert source[-1] == labels[-1] == END
                spans: dict[int, list[int]] = {}
                for token in labels[:-1]:
                    if token > 99_899:
                        spans[token] = []
                        last = token
                    else:
                        spans[last].append(token)
                used = [token for token in source if token > 99_899]
                assert used == [token for token in spans if spans[token]] == list(T5.sentinels[: len(used)])
                texts.append([t for token in source[:-1] for t in spans.get(token, [token])])
        assert sorted(t for text in texts for t in text) == [t for d in numbered(*lengths) for t in d]
        if streamed:
            room = SpanCorruption().room(tokens, T5)
            assert [len(text) for text in texts[:-1]] == [room] * (math.ceil(sum(lengths) / room) - 1)

    def test_full_rows_of_a_stream_need_no_padding(self) -> None:
        data = corpus(numbered(5000), T5)
        for batch in islice(batches(data, "spans", 4, 512, "concatenated"), 2):
            assert batch.labels.shape == (4, 114)
            assert batch.utilisation == 1.0

    def test_noise_is_fixed_by_seed_step_and_row(self) -> None:
        data = corpus(numbered(900), T5)
        whole = list(islice(batches(data, "spans", 4, 32, "concatenated", 1), 4))
        again = list(islice(batches(data, "spans", 4, 32, "concatenated", 1, whole[1].cursor, 2, 1), 2))
        for one, other in zip(whole[2:], again, strict=True):
            assert np.array_equal(one.ids[2:], other.ids)
            assert np.array_equal(one.labels[2:], other.labels)
        assert not np.array_equal(whole[0].labels > 99_899, whole[1].labels > 99_899)

    def test_what_it_cannot_learn_from(self) -> None:
        with pytest.raises(ScantlingInputError, match="<extra_id_0>"):
            next(batches(corpus(numbered(9), PLAIN), "spans", 1, 8, "padded"))
        with pytest.raises(ScantlingInputError, match="padded or concatenated, not packed"):
            next(batches(corpus(numbered(9), T5), "spans", 1, 8))
        few = Marks(after=(END,), sentinels=(90, 91))
        with pytest.raises(ScantlingInputError, match="rows of 64 tokens need 3 sentinels, and the tokenizer has 2"):
            next(batches(corpus(numbered(900), few), "spans", 1, 64, "padded"))
        with pytest.raises(ScantlingInputError, match="density between 0 and 1"):
            SpanCorruption(1.0)
