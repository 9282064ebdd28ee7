"""Jobs side by side on the processor."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scantling.generate.streams import IDLE, division, even, side_by_side


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("sizes", "threads", "expected"),
    [
        ([4] * 16, 2, (2, 16)),
        ([4] * 15, 2, (2, 14)),
        ([4] * 16, 1, (1, 0)),
        ([4], 2, (1, 0)),
        ([], 2, (1, 0)),
        ([9, 4, 4, 1, 7], 2, (2, 4)),
        ([4] * 8, 16, (8, 8)),
        ([100, 3, 3], 2, (1, 0)),
    ],
)
def test_how_jobs_are_divided(sizes: list[int], threads: int, expected: tuple[int, int]) -> None:
    assert division(sizes, threads) == expected


@given(st.lists(st.integers(1, 100), max_size=40), st.integers(2, 8))
def test_streams_end_almost_together(sizes: list[int], streams: int) -> None:
    first = even(sizes, streams)
    ends = [0] * streams
    for size in sizes[:first]:
        ends[min(range(streams), key=lambda i: ends[i])] += size
    assert streams * max(ends) <= (1 + IDLE) * sum(ends)


def test_results_are_in_order_and_each_stream_has_its_share_of_the_threads(two_threads: None) -> None:
    both = threading.Barrier(2, timeout=60)

    def run(job: int) -> tuple[int, int, bool]:
        if job < 4:
            both.wait()  # Only two at once come past it.
        return job, torch.get_num_threads(), threading.current_thread() is threading.main_thread()

    found = list(side_by_side(run, range(5), [7] * 5))
    assert found == [(0, 1, False), (1, 1, False), (2, 1, False), (3, 1, False), (4, 2, True)]
    assert torch.get_num_threads() == 2
    fresh: list[int] = []
    late = threading.Thread(target=lambda: fresh.append(torch.get_num_threads()))
    late.start()
    late.join()
    assert fresh == [2]


def test_an_error_in_a_stream_comes_out_and_the_threads_are_as_before(two_threads: None) -> None:
    done: list[int] = []

    def run(job: int) -> int:
        if job == 1:
            raise ValueError("job 1")
        done.append(job)
        return job

    with pytest.raises(ValueError, match="job 1"):
        list(side_by_side(run, range(200), [1] * 200))
    assert torch.get_num_threads() == 2
    assert 0 in done
