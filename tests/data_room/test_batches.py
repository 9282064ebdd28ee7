"""Batches: every token once, labels right, documents apart, any cursor and any ranks give the same."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data_room.made import BARE, BOS, EOS, FRAMED, PAD, PLAIN, corpus, numbered

from scantling.data import Batch, Layout, batches, one_pass
from scantling.data.corpus import Corpus, Documents, Marks
from scantling.errors import ScantlingInputError

ARRAYS = ("ids", "labels", "document_ids", "position_ids", "attention_mask")
shapes = st.lists(st.integers(1, 30), min_size=1, max_size=12)
framings = st.sampled_from([BARE, PLAIN, FRAMED])
seeds = st.integers()
modes = st.sampled_from(["packed", "padded", "concatenated"])


def equal(one: Batch, other: Batch) -> bool:
    return one.cursor == other.cursor and all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in ARRAYS
    )


def rows(batch: Batch) -> list[list[tuple[list[int], list[int], list[int]]]]:
    """Of each row its documents: ids, labels and positions."""
    found = []
    for row in range(len(batch.ids)):
        real = batch.attention_mask[row]
        cells = []
        for number in range(int(batch.document_ids[row][real].max(initial=-1)) + 1):
            mine = real & (batch.document_ids[row] == number)
            assert (np.diff(np.flatnonzero(mine)) == 1).all()
            columns = batch.ids[row], batch.labels[row], batch.position_ids[row]
            cells.append(tuple(column[mine].tolist() for column in columns))
        found.append(cells)
    return found  # type: ignore[return-value]


class TestOneRowByHand:
    """Rows of 8 worked out on paper."""

    def test_packed_with_both_marks(self) -> None:
        """[BOS, A, B] gives [A, B, EOS]; padding is a document of its own."""
        (batch,) = one_pass(corpus([[10, 11, 12, 13], [20, 21]], FRAMED).train, "causal", 1, 9)
        assert batch.ids.tolist() == [[BOS, 10, 11, 12, 13, BOS, 20, 21, PAD]]
        assert batch.labels.tolist() == [[10, 11, 12, 13, EOS, 20, 21, EOS, -100]]
        assert batch.document_ids.tolist() == [[0, 0, 0, 0, 0, 1, 1, 1, 2]]
        assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 0]]
        assert batch.attention_mask.tolist() == [[True] * 8 + [False]]
        assert (batch.documents, batch.tokens, batch.scored) == (2, 8, 8)
        assert batch.utilisation == 8 / 9

    def test_without_marks_the_last_token_of_a_document_predicts_nothing(self) -> None:
        (batch,) = one_pass(corpus([[10, 11, 12], [20, 21]], BARE).train, "causal", 1, 6)
        assert batch.ids.tolist() == [[10, 11, 12, 20, 21, PAD]]
        assert batch.labels.tolist() == [[11, 12, -100, 21, -100, -100]]

    def test_a_long_document_goes_on_in_another_row(self) -> None:
        """The last token of the first piece still predicts the first of the next one: no label is lost."""
        (batch,) = one_pass(corpus([[10, 11, 12, 13, 14]], FRAMED).train, "causal", 2, 4)
        assert batch.ids.tolist() == [[BOS, 10, 11, 12], [13, 14, PAD, PAD]]
        assert batch.labels.tolist() == [[10, 11, 12, 13], [14, EOS, -100, -100]]
        assert batch.position_ids.tolist() == [[0, 1, 2, 3], [0, 1, 0, 1]]

    def test_padded(self) -> None:
        (batch,) = one_pass(corpus([[10, 11], [20]], PLAIN).train, "causal", 2, 3, "padded")
        assert batch.ids.tolist() == [[10, 11, PAD], [20, PAD, PAD]]
        assert batch.labels.tolist() == [[11, EOS, -100], [EOS, -100, -100]]
        assert batch.attention_mask.tolist() == [[True, True, False], [True, False, False]]

    def test_concatenated_crosses_borders_and_says_so(self) -> None:
        (batch,) = one_pass(corpus([[10, 11], [20, 21, 22]], PLAIN).train, "causal", 2, 4, "concatenated")
        assert batch.ids.tolist() == [[10, 11, EOS, 20], [21, 22, EOS, PAD]]
        assert batch.labels.tolist() == [[11, EOS, 20, 21], [22, EOS, -100, -100]]
        assert batch.document_ids.tolist() == [[0, 0, 0, 0], [0, 0, 0, 1]]
        assert (batch.documents, batch.tokens) == (3, 7)

    def test_only_the_target_of_a_pair_is_judged(self) -> None:
        data = corpus([[10, 11, 20, 21]], FRAMED, kind="pairs", firsts=[2])
        (batch,) = one_pass(data.train, "causal", 1, 6)
        assert batch.ids.tolist() == [[BOS, 10, 11, 20, 21, PAD]]
        assert batch.labels.tolist() == [[-100, -100, 20, 21, EOS, -100]]

    def test_only_what_the_assistant_says_is_judged(self) -> None:
        """A conversation is as the template wrote it: nothing is put around it."""
        spoken = [[False, False, True, True, False, True]]
        data = corpus([[10, 11, 12, 13, 14, 15]], FRAMED, kind="chat", spoken=spoken)
        (batch,) = one_pass(data.train, "causal", 1, 7)
        assert batch.ids.tolist() == [[10, 11, 12, 13, 14, 15, PAD]]
        assert batch.labels.tolist() == [[-100, 12, 13, -100, 15, -100, -100]]

    def test_the_prefix_of_a_pair_is_its_source(self) -> None:
        data = corpus([[10, 11, 20, 21]], FRAMED, kind="pairs", firsts=[2])
        (batch,) = one_pass(data.train, "prefix", 1, 6, "padded")
        assert batch.prefix_lengths is not None
        assert batch.prefix_lengths.tolist() == [3]
        assert batch.labels.tolist() == [[-100, -100, 20, 21, EOS, -100]]


def epoch(data: Corpus, batch: int, tokens: int, mode: str, seed: int) -> list[Batch]:
    """Batches up to the one in which the second epoch begins."""
    found = []
    for one in batches(data, "causal", batch, tokens, mode, seed):
        found.append(one)
        if one.cursor["epoch"] >= 1:
            return found
    raise AssertionError


class TestInvariants:
    @settings(max_examples=60, deadline=None)
    @given(
        shapes, framings, st.integers(1, 12), st.integers(1, 4), st.sampled_from(["packed", "padded"]), st.integers()
    )
    def test_an_epoch_has_every_token_once_and_every_label_is_the_next_token(
        self, lengths: list[int], marks: Marks, tokens: int, batch: int, mode: str, seed: int
    ) -> None:
        data = corpus(numbered(*lengths), marks)
        if marks is BARE and max(lengths) < 2:
            return
        wholes = [[*marks.before, *document, *marks.ends] for document in numbered(*lengths)]
        follows = {(d, i): ids[i + 1] for d, ids in enumerate(wholes) for i in range(len(ids) - 1)}
        document_of = {token: d for d, ids in enumerate(numbered(*lengths)) for token in ids}
        seen: Counter[int] = Counter()
        judged: Counter[tuple[int, int]] = Counter()
        taken = 0
        inputs = sum(len(ids) - len(marks.ends) for ids in wholes)
        for one in epoch(data, batch, tokens, mode, seed):
            for row in rows(one):
                assert sum(len(ids) for ids, _, _ in row) <= tokens
                assert mode == "packed" or len(row) == 1
                for ids, labels, positions in row:
                    assert positions == list(range(len(ids)))
                    known = [document_of[token] for token in (*ids, *labels) if token in document_of]
                    assert len(set(known)) == 1, "a document of its own"
                    start = wholes[known[0]].index(ids[0])
                    if taken < inputs:
                        taken += len(ids)
                        seen.update(token for token in ids if token in document_of)
                        judged.update((known[0], start + n) for n, label in enumerate(labels) if label != -100)
                    for n, label in enumerate(labels):
                        assert label == follows.get((known[0], start + n), -100)
        assert taken == inputs
        assert seen == Counter(document_of.keys())
        assert judged == Counter(follows.keys())

    @settings(max_examples=60, deadline=None)
    @given(shapes, framings, st.integers(1, 12), st.integers(1, 3), st.integers(0, 9))
    def test_a_stream_has_every_token_once_and_labels_cross_borders(
        self, lengths: list[int], marks: Marks, tokens: int, batch: int, seed: int
    ) -> None:
        if marks is BARE and max(lengths) < 2:
            return
        data = corpus(numbered(*lengths), marks)
        found = list(islice(batches(data, "causal", batch, tokens, "concatenated", seed), 40))
        ids = np.concatenate([one.ids.ravel() for one in found])
        labels = np.concatenate([one.labels.ravel() for one in found])
        assert np.array_equal(labels[:-1], ids[1:])
        whole = sum(lengths) + len(lengths) * (len(marks.before) + len(marks.ends))
        for start in range(0, len(ids) - whole, whole):
            assert Counter(t for t in ids[start : start + whole].tolist() if t >= 10) == Counter(
                t for d in numbered(*lengths) for t in d
            )

    @settings(max_examples=60, deadline=None)
    @given(shapes, framings, modes, st.integers(1, 12), st.integers(0, 9), st.integers(0, 12))
    def test_a_run_resumed_from_any_cursor_is_the_uninterrupted_one(
        self, lengths: list[int], marks: Marks, mode: str, tokens: int, seed: int, at: int
    ) -> None:
        if marks is BARE and max(lengths) < 2:
            return
        data = corpus(numbered(*lengths), marks)
        schedule = [(0, tokens), (3, tokens + 2), (7, tokens + 5)]
        whole = list(islice(batches(data, "causal", 2, schedule, mode, seed), 20))
        cursor = json.loads(json.dumps(whole[at].cursor))
        rest = list(islice(batches(data, "causal", 2, schedule, mode, seed, cursor), 19 - at))
        assert all(equal(one, other) for one, other in zip(whole[at + 1 :], rest, strict=True))
        assert [one.ids.shape[1] for one in whole] == [tokens] * 3 + [tokens + 2] * 4 + [tokens + 5] * 13

    @settings(max_examples=40, deadline=None)
    @given(shapes, modes, st.integers(2, 12), st.integers(0, 9), st.sampled_from([2, 3, 6]))
    def test_the_ranks_together_have_the_rows_of_one(
        self, lengths: list[int], mode: str, tokens: int, seed: int, ranks: int
    ) -> None:
        data = corpus(numbered(*lengths), FRAMED)
        alone = list(islice(batches(data, "causal", 6, tokens, mode, seed), 8))
        each = [
            list(islice(batches(data, "causal", 6, tokens, mode, seed, None, ranks, rank), 8)) for rank in range(ranks)
        ]
        for step, whole in enumerate(alone):
            parts = [run[step] for run in each]
            for name in ARRAYS:
                assert np.array_equal(getattr(whole, name), np.concatenate([getattr(part, name) for part in parts]))
            assert all(part.cursor == whole.cursor for part in parts)
            assert sum(part.tokens for part in parts) == whole.tokens
            assert sum(part.documents for part in parts) == whole.documents
            assert sum(part.scored for part in parts) == whole.scored
            size = 6 // ranks
            assert all(equal(part, whole.rows(r * size, r * size + size)) for r, part in enumerate(parts))
            assert [(p.tokens, p.documents) for p in parts] == [
                (whole.rows(r * size, r * size + size).tokens, whole.rows(r * size, r * size + size).documents)
                for r in range(ranks)
            ]

    @settings(max_examples=40, deadline=None)
    @given(shapes, st.integers(1, 6), st.integers(2, 12), st.lists(st.integers(2, 12), min_size=1, max_size=4))
    def test_a_length_that_changes_inside_an_epoch_loses_nothing(
        self, lengths: list[int], batch: int, first: int, later: list[int]
    ) -> None:
        """Every token once in the first epoch, at whatever step the rows become longer or shorter."""
        data = corpus(numbered(*lengths), BARE)
        if max(lengths) < 2:
            return
        schedule = [(0, first), *((2 * n + 2, tokens) for n, tokens in enumerate(later))]
        wanted = Counter(token for document in numbered(*lengths) for token in document)
        seen: Counter[int] = Counter()
        for one in batches(data, "causal", batch, schedule):
            for row in rows(one):
                if seen.total() < wanted.total():
                    seen.update(token for ids, _, _ in row for token in ids)
            if seen.total() >= wanted.total():
                break
        assert seen == wanted


def test_what_is_left_of_a_document_is_cut_anew_for_longer_rows() -> None:
    """16 tokens, of which one row of 4 is read before rows have 12: the other 12 fill one such row."""
    data, (document,) = corpus(numbered(16), BARE), numbered(16)
    found = 0
    for seed in range(20):
        first, second = islice(batches(data, "causal", 1, [(0, 4), (1, 12)], seed=seed), 2)
        if first.ids[0].tolist() == document[:4]:
            found += 1
            assert second.ids[0].tolist() == document[4:]
    assert found > 0


class TestOrder:
    def test_epochs_differ_and_seeds_differ_and_nothing_else_counts(self) -> None:
        data = corpus(numbered(*[3] * 40), BARE)

        def first_tokens(seed: int, shards: int = 1) -> list[int]:
            source = corpus(numbered(*[3] * 40), BARE, shards=shards)
            return [int(one.ids[0, 0]) for one in islice(batches(source, "causal", 1, 3, "padded", seed), 80)]

        order = first_tokens(0)
        starts = [document[0] for document in numbered(*[3] * 40)]
        assert sorted(order[:40]) == sorted(order[40:]) == starts
        assert order[:40] != order[40:]
        assert order[:40] != starts
        assert first_tokens(1) != order
        assert first_tokens(0, shards=7) == order
        assert len(data.train) == 40

    def test_the_order_of_a_seed_is_fixed_for_good(self) -> None:
        """A recorded order: a run that is resumed with a later version must read on where it stopped."""
        data = corpus(numbered(*[2] * 10), BARE)
        found = [int(one.ids[0, 0]) for one in islice(batches(data, "causal", 1, 2, "padded", 5), 10)]
        assert found == [24, 18, 10, 20, 14, 12, 16, 28, 26, 22]

    def test_a_stream_is_in_the_same_order_of_documents(self) -> None:
        data = corpus(numbered(*[4] * 9), BARE)
        stream = [one.ids[0].tolist() for one in islice(batches(data, "causal", 1, 4, "concatenated", 3), 18)]
        assert sorted(stream[:9]) == sorted(stream[9:]) == numbered(*[4] * 9)
        assert stream[:9] != stream[9:]


class TestUtilisation:
    def test_packing_fills_rows_that_padding_leaves_empty(self) -> None:
        """Lengths 6, 5, 3, 2 into rows of 8: two full rows instead of four that are half empty."""
        data = corpus(numbered(6, 5, 3, 2), BARE)
        packed = list(one_pass(data.train, "causal", 2, 8))
        assert [one.utilisation for one in packed] == [1.0]
        assert [one.utilisation for one in one_pass(data.train, "causal", 4, 8, "padded")] == [0.5]

    def test_rows_of_padding_fill_the_last_batch_of_a_pass(self) -> None:
        found = list(one_pass(corpus(numbered(3, 3, 3), BARE).train, "causal", 2, 3, "padded"))
        assert [one.ids.shape for one in found] == [(2, 3), (2, 3)]
        assert found[1].attention_mask.tolist() == [[True] * 3, [False] * 3]
        assert found[1].labels[1].tolist() == [-100] * 3
        assert (found[1].documents, found[1].tokens) == (1, 3)

    def test_a_pass_over_ranks(self) -> None:
        data = corpus(numbered(3, 3, 3, 3, 3), BARE).train
        alone = list(one_pass(data, "causal", 4, 3))
        shares = [list(one_pass(data, "causal", 4, 3, ranks=2, rank=rank)) for rank in range(2)]
        for step, whole in enumerate(alone):
            assert np.array_equal(whole.ids, np.concatenate([share[step].ids for share in shares]))
        assert sum(one.scored for one in alone) == 10


class TestPrefix:
    def test_prefixes_end_anywhere_and_what_is_in_them_is_not_judged(self) -> None:
        data = corpus(numbered(*[9] * 200), BARE)
        lengths = []
        for one in islice(batches(data, "prefix", 8, 9, "padded"), 25):
            assert one.prefix_lengths is not None
            for row, prefix in enumerate(one.prefix_lengths.tolist()):
                lengths.append(prefix)
                assert one.labels[row].tolist() == [-100] * (prefix - 1) + [
                    *one.ids[row, prefix:].tolist(),
                    -100,
                ]
        assert set(lengths) == set(range(1, 9))
        # 200 draws from 8 values: chi-squared with 7 degrees of freedom, 24.3 is its 99.9 % point.
        assert sum((lengths.count(n) - 25) ** 2 / 25 for n in range(1, 9)) < 24.3


def assert_refused(message: str, **changes: Any) -> None:
    plain: dict[str, Any] = {"corpus": corpus(numbered(9, 4)), "objective": "causal", "batch": 4, "tokens": 6}
    with pytest.raises(ScantlingInputError, match=message):
        next(batches(**{**plain, **changes}))


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("'paked'.*did you mean 'packed'", {"mode": "paked"}),
        ("no objective 'casual'.*did you mean 'causal'", {"objective": "casual"}),
        ("batch of 4 rows cannot be shared by 3 ranks", {"ranks": 3}),
        ("rank 2 of 2", {"ranks": 2, "rank": 2}),
        ("batch is 0; at least 1", {"batch": 0}),
        ("tokens is 0; at least 1", {"tokens": 0}),
        (r"tokens change at steps \[5\]: they must begin with 0", {"tokens": [(5, 8)]}),
        (r"tokens change at steps \[0, 4, 2\]", {"tokens": [(0, 8), (4, 9), (2, 10)]}),
        (r"batch change at steps \[\]", {"batch": []}),
        ("no second token|no document has a second", {"corpus": corpus([[7]], BARE)}),
        ("half 'held_out' of the data has no document", {"corpus": corpus(numbered(3)).held_out}),
        ("1 of 2 documents are longer than a row of 6 .*needs 9", {"mode": Layout("padded", "refuse")}),
        ("every document is longer", {"mode": Layout("padded", "drop"), "tokens": 2}),
        ("split, not with drop", {"mode": Layout("packed", "drop"), "tokens": [(0, 6), (4, 8)]}),
        ("long documents are 'cut'", {"mode": ("padded", "cut")}),
        ("padded or concatenated, not packed", {"objective": "prefix"}),
        ("of other data, or of another seed", {"cursor": {"of": "0" * 16}}),
    ],
)
def test_what_does_not_go_together_is_refused(message: str, changes: dict[str, Any]) -> None:
    if changes.get("mode") == ("padded", "cut"):
        with pytest.raises(ScantlingInputError, match=message):
            Layout("padded", "cut")  # type: ignore[arg-type]
        return
    assert_refused(message, **changes)


def test_policies_for_long_documents() -> None:
    data = corpus(numbered(9, 4), BARE)

    def ids(long: Any) -> list[list[int]]:
        found = one_pass(data.train, "causal", 1, 5, Layout("padded", long))
        return [one.ids[0][one.attention_mask[0]].tolist() for one in found]

    long, short = numbered(9, 4)
    assert ids("split") == ids(None) == [long[:5], long[5:], short]
    assert ids("truncate") == [long[:5], short]
    assert ids("drop") == [short]
    (first, _) = one_pass(data.train, "causal", 1, 5, Layout("padded", "truncate"))
    assert first.labels.tolist() == [long[1:6]]


@pytest.mark.parametrize("change", [{"seed": 1}, {"mode": "padded"}, {"corpus": corpus(numbered(9, 5))}])
def test_a_cursor_of_something_else_is_refused(change: dict[str, Any]) -> None:
    plain: dict[str, Any] = {"corpus": corpus(numbered(9, 4)), "objective": "causal", "batch": 1, "tokens": 6}
    cursor = next(batches(**plain)).cursor
    assert_refused("of other data, or of another seed", **{**plain, **change, "cursor": cursor})


def test_pairs_are_not_cut_unless_asked() -> None:
    data = corpus(numbered(9), PLAIN, kind="pairs", firsts=[4])
    with pytest.raises(ScantlingInputError, match="1 of 1 documents are longer"):
        next(batches(data, "causal", 1, 6))
    (*_, last) = one_pass(data.train, "causal", 1, 6, Layout("packed", "split"))
    assert last.ids[0, 0] == 16


def test_a_subset_of_documents_is_a_half_of_its_own() -> None:
    data = corpus(numbered(3, 4, 5), BARE)
    some = data.train.take(2)
    assert isinstance(some, Documents)
    assert sum(one.tokens for one in one_pass(some, "causal", 1, 8)) == 7
    with pytest.raises(ScantlingInputError, match="of other data"):
        next(batches(data, "causal", 1, 8, cursor=next(batches(some, "causal", 1, 8)).cursor))
