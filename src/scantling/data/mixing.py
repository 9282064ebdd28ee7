"""Random numbers that depend on nothing but their seed: the same on every machine, library version and rank.

The generator is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014,
figure 16): output i is a fixed function of seed + i * GAMMA, so any part of a stream can be made at once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GAMMA = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = 2**64 - 1


def stream(seed: int, count: int) -> NDArray[np.uint64]:
    """The first `count` outputs of SplitMix64 from `seed`, (count,) uint64."""
    with np.errstate(over="ignore"):
        z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GAMMA) + np.uint64(seed & _MASK)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(_FIRST)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(_SECOND)
    return z ^ (z >> np.uint64(31))


def mix(*numbers: int) -> int:
    """One seed of 64 bits from several numbers, whose order counts."""
    seed = 0
    for number in numbers:
        # One output of the stream, in whole numbers: an array of one element is ten times slower.
        z = ((seed ^ (int(number) & _MASK)) + _GAMMA) & _MASK
        z = ((z ^ (z >> 30)) * _FIRST) & _MASK
        z = ((z ^ (z >> 27)) * _SECOND) & _MASK
        seed = z ^ (z >> 31)
    return seed


def uniform(seed: int, count: int) -> NDArray[np.float64]:
    """`count` numbers in [0, 1), multiples of 2^-53."""
    return (stream(seed, count) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(seed: int, count: int) -> NDArray[np.int64]:
    """The numbers 0 .. count - 1 in an order that the seed decides."""
    return np.argsort(stream(seed, count), kind="stable").astype(np.int64)
