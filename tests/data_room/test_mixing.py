"""Random numbers that are the same everywhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scantling.data.mixing import mix, permutation, stream, uniform


def test_the_published_outputs_of_splitmix64() -> None:
    """The first five outputs for seed 1234567, as the reference implementation gives them (Rosetta Code)."""
    assert stream(1234567, 5).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@given(st.integers(0, 2**64 - 1), st.integers(0, 60))
def test_the_stream_is_that_of_the_plain_algorithm(seed: int, count: int) -> None:
    """Against the algorithm step by step in whole numbers."""
    state, wanted = seed, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        wanted.append(z ^ (z >> 31))
    assert stream(seed, count).tolist() == wanted


@given(st.integers(-(2**65), 2**65), st.integers(0, 2**64 - 1))
def test_mixing_takes_outputs_of_the_stream(first: int, second: int) -> None:
    assert mix(first) == stream(first % 2**64, 1)[0]
    assert mix(first, second) == stream(mix(first) ^ second, 1)[0]


@given(st.integers(-(2**70), 2**70), st.integers(0, 200))
def test_a_permutation_has_every_number_once(seed: int, count: int) -> None:
    assert sorted(permutation(seed, count).tolist()) == list(range(count))


def test_numbers_are_spread_evenly() -> None:
    found = uniform(7, 100_000)
    assert found.min() >= 0.0
    assert found.max() < 1.0
    # 100 bins of 1000 expected each: the sum is chi-squared with 99 degrees of freedom, and 149 its 99.9 % point.
    counts = np.bincount((found * 100).astype(int), minlength=100)
    assert ((counts - 1000) ** 2 / 1000).sum() < 149


@pytest.mark.parametrize("other", [(1, 2, 4), (2, 1, 3), (1, 2), (1, 2, 3, 0)])
def test_every_number_and_their_order_count(other: tuple[int, ...]) -> None:
    assert mix(1, 2, 3) == mix(1, 2, 3)
    assert mix(1, 2, 3) != mix(*other)
