"""Exponents, and the memory of a pass against its length."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.cases.small import built, card

from scantling.errors import ScantlingInputError
from scantling.measure import Asked
from scantling.measure.memory import growth, memory, peak
from scantling.measure.slope import slope, student

# The 97.5 % points of Student's t that statistical tables print, for 1 to 10 degrees of freedom.
PRINTED = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
WIDE = Asked(lengths=(192, 256, 384, 512))
HEADS = {"n_layers": 1, "attention": {"n_heads": 16, "n_kv_heads": 16, "d_head": 2}}


@pytest.mark.parametrize(("free", "printed"), [*enumerate(PRINTED, 1)])
def test_students_t_equals_the_printed_table(free: int, printed: float) -> None:
    assert student(0.95, free) == pytest.approx(printed, abs=5e-4)


@given(st.floats(-3, 3), st.floats(0.01, 100))
def test_a_power_law_has_its_exponent(exponent: float, factor: float) -> None:
    x = (10, 20, 50, 100)
    found = slope(x, [factor * n**exponent for n in x])
    assert found.exponent == pytest.approx(exponent, abs=1e-9)
    assert found.low <= found.high
    assert found.high - found.low < 1e-6


def test_scatter_widens_the_interval_around_the_line() -> None:
    # By hand: log2 y = 1, 2, 4, 5 at log2 x = 0, 1, 2, 3: slope 1.4, residual squares 0.2, sum of squares of x 5.
    found = slope((1, 2, 4, 8), (2, 4, 16, 32))
    half = 4.3027 * (0.2 / 2 / 5) ** 0.5
    assert (found.exponent, found.low, found.high) == pytest.approx((1.4, 1.4 - half, 1.4 + half), abs=1e-4)


def test_two_points_leave_nothing_to_judge_by() -> None:
    found = slope((1, 2), (1, 4))
    assert found.exponent == pytest.approx(2)
    assert found.high == float("inf")
    with pytest.raises(ScantlingInputError, match="two different lengths"):
        slope((3, 3), (1, 2))


def test_a_peak_is_what_is_held_at_once() -> None:
    def work() -> None:
        first = torch.empty(1000)
        second = torch.empty(3000)
        del first
        third = torch.empty(500)
        del second, third

    found = peak(work, torch.device("cpu"))
    assert (found.bytes, found.largest) == (16000, 12000)


def test_scores_are_stored_by_the_plain_kernel_and_not_by_the_fused_one() -> None:
    lm = built(card(**HEADS, context=512))
    plain, fused = growth(lm, WIDE, "reference"), growth(lm, WIDE, "fused")
    assert plain.materialised
    assert not fused.materialised
    assert plain.measured.exponent == pytest.approx(2, abs=0.1)
    assert fused.measured.exponent == pytest.approx(1, abs=0.02)
    # 16 heads of 512 x 512 float32, and no single allocation of the fused kernel comes near it.
    assert plain.peaks[-1].largest == 16 * 512 * 512 * 4
    assert fused.peaks[-1].largest < plain.peaks[-1].largest / 20
    for got, said in zip(plain.peaks, plain.predicted, strict=True):
        assert got.bytes == pytest.approx(said, rel=0.1)


def test_a_window_needs_no_square_either() -> None:
    lm = built(card(n_layers=1, context=2048, attention={"window": 64}))
    grown = growth(lm, Asked(lengths=(512, 1024, 2048)), "fused")
    assert not grown.materialised


def test_the_figure_says_both_verdicts() -> None:
    figure = memory(built(card(**HEADS, context=512)), WIDE)
    assert "no T x T matrix is stored" in figure.notes[0]
    assert "a T x T matrix IS stored" in figure.notes[1]
    assert figure.data["kernels"]["reference"]["t_by_t_materialised"] is True
    assert len(figure.rows) == 2 * len(WIDE.lengths)
