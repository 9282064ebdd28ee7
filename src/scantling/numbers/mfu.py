"""Model FLOPs utilisation (arXiv:2204.02311, appendix B): what share of the dense peak the model's own FLOPs reach."""

from __future__ import annotations

from collections.abc import Mapping

from scantling.errors import ScantlingInputError
from scantling.numbers.hardware import Device

GOOD = (0.40, 0.55)
"""What well-run training at scale reaches, in 16 bits."""
LOW = 0.30
"""Below it the machine waits for something other than arithmetic."""
EXACT = 0.01
"""Rounding of data sheets: two printed figures this near are the same."""


def mfu(flops: float, seconds: float, devices: int, peak: float) -> float:
    """Share of the peak that `flops` in `seconds` on `devices` of `peak` FLOP/s each is.

    Raises:
        ScantlingInputError: above 1, which no machine does; the message says what is probably wrong.
    """
    return checked(flops / (seconds * devices * peak), peak)


def seconds(flops: float, share: float, devices: int, peak: float) -> float:
    """The time that a share of the peak takes: the inverse of `mfu`.

    Raises:
        ScantlingInputError: the share is above 1.
    """
    return flops / (checked(share, peak) * devices * peak)


def checked(share: float, peak: float) -> float:
    """The share, if a machine can reach it.

    Raises:
        ScantlingInputError: above 1.
    """
    if share > 1:
        raise ScantlingInputError(
            f"MFU would be {100 * share:.4g} % of a dense peak of {peak / 1e12:.4g} TFLOP/s, and nothing exceeds 100 %:"
            " a rate with sparsity over a dense peak, the peak of another dtype, time or devices miscounted, FLOPs per"
            " token counted twice (causal attention as a full square, recomputation), or all of a mixture's"
            " parameters instead of the active ones"
        )
    return share


def verdict(share: float) -> str:
    """One sentence about a share of the peak in training."""
    low, high = (round(100 * x) for x in GOOD)
    if share < LOW:
        return f"low: under {100 * LOW:.0f} % is a problem of the system (input, communication, small shapes)"
    if share < GOOD[0]:
        return f"fair: {low}-{high} % is good at scale"
    if share <= GOOD[1]:
        return f"good at scale ({low}-{high} %)"
    return f"high: above the {low}-{high} % of good runs at scale; check dtype, peak and the FLOPs counted"


def checked_peak(peak: float, dtype: str, device: Device | None, known: Mapping[str, Device]) -> float:
    """A user's own peak in FLOP/s, unless a data sheet gives that figure another meaning.

    Args:
        device: the device it is for, if one is named; else every device of `known` is compared.

    Raises:
        ScantlingInputError: it is a figure with sparsity, or the named device's peak in another dtype.
    """
    rows = [device] if device is not None else list(known.values())
    dense = [row.peak(dtype) for row in rows if dtype in row.dense_tflops]
    if any(_near(peak, value) for value in dense):
        return peak
    for row in rows:
        for other, tflops in row.dense_tflops.items():
            if other == dtype and row.sparsity and _near(peak, 2e12 * tflops):
                raise ScantlingInputError(
                    f"a peak of {peak / 1e12:.4g} TFLOP/s is that of {row.name} in {dtype} with sparsity, and training"
                    f" multiplies dense matrices: the dense peak is {tflops:g}"
                )
            if device is not None and other != dtype and _near(peak, 1e12 * tflops):
                raise ScantlingInputError(
                    f"a peak of {peak / 1e12:.4g} TFLOP/s is that of {row.name} in {other}, not in {dtype}"
                )
    return peak


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= EXACT * b
