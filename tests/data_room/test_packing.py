"""Best-fit packing against hand-worked examples and a plain search."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scantling.data.packing import best_fit, cut, joined


@pytest.mark.parametrize(
    ("sizes", "capacity", "bins"),
    [
        # By hand: 8, then 4, 4 beside each other, 2 beside the 8, and the ones fill the second bin.
        ([4, 8, 1, 4, 2, 1], 10, [[1, 4], [0, 3, 2, 5]]),
        # The fullest bin that has room, not the first one: 3 goes beside 7, not beside 6.
        ([6, 7, 3], 10, [[1, 2], [0]]),
        ([10, 10, 1], 10, [[0], [1], [2]]),
        ([5], 5, [[0]]),
        ([], 5, []),
    ],
)
def test_examples_worked_by_hand(sizes: list[int], capacity: int, bins: list[list[int]]) -> None:
    assert best_fit(sizes, capacity) == bins


@given(st.integers(1, 60).flatmap(lambda c: st.tuples(st.lists(st.integers(1, c), max_size=60), st.just(c))))
def test_every_choice_is_the_fullest_bin_with_room(case: tuple[list[int], int]) -> None:
    sizes, capacity = case
    wanted: list[list[int]] = []
    for item in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        rooms = [capacity - sum(sizes[n] for n in one) for one in wanted]
        fitting = [place for place, room in enumerate(rooms) if room >= sizes[item]]
        if fitting:
            wanted[min(fitting, key=lambda place: (rooms[place], place))].append(item)
        else:
            wanted.append([item])
    found = best_fit(sizes, capacity)
    assert found == wanted
    assert sorted(item for one in found for item in one) == list(range(len(sizes)))
    # Two bins that are both at most half full would have been one.
    assert len(found) <= 2 * sum(sizes) / capacity + 1


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), max_size=8), st.integers(1, 9))
def test_cutting_and_joining_are_inverse(shapes: list[tuple[int, int]], longest: int) -> None:
    spans = np.array([(n, start, start + size) for n, (start, size) in enumerate(shapes)], np.int64).reshape(-1, 3)
    pieces = cut(spans, longest)
    sizes = pieces[:, 2] - pieces[:, 1]
    assert sizes.sum() == (spans[:, 2] - spans[:, 1]).sum()
    assert ((sizes >= 1) & (sizes <= longest)).all()
    shuffled = pieces[np.random.default_rng(0).permutation(len(pieces))]
    assert joined(shuffled).tolist() == spans.tolist()


def test_pieces_that_do_not_touch_stay_apart() -> None:
    pieces = np.array([(0, 4, 8), (1, 0, 4), (0, 8, 9), (0, 0, 2)], np.int64)
    assert joined(pieces).tolist() == [[0, 0, 2], [0, 4, 9], [1, 0, 4]]
