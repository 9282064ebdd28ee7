"""What is called rounding and what is not, on differences whose size is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from scantling.audits import Abilities, Facts, Feed, Subject, Verdict, draw
from scantling.audits.examine import answers
from scantling.audits.judge import TIMES_ERROR, TIMES_NOISE, gap
from scantling.audits.other_order import OtherOrder
from scantling.audits.planted_subject import planted
from scantling.audits.probes import PROBES


def leaking(size: float, dtype: str = "float32") -> Subject:
    """A sound model to whose logits the next token adds a wave of this size."""
    sound = planted(dtype=dtype, name=f"a leak of {size:g}")

    def run(feed: Feed) -> Tensor:
        out = sound.run(feed)
        ahead = feed.ids.roll(-1, 1).to(out.dtype)
        ahead[:, -1] = 0
        return out + size * (ahead[..., None] + torch.arange(out.shape[-1])).sin()

    return Subject(sound.name, run, sound.facts, Abilities(cast=lambda wanted: leaking(size, wanted)))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.floats(-8.5, 0))
def test_leaks_above_float32s_error_are_found_and_below_a_last_place_are_not(exponent: float) -> None:
    """Float32's own error is some 1e-6 here, for logits up to about 5, whose last place is 2.4e-7."""
    size = 10.0**exponent
    verdicts = {f.verdict for f in answers(PROBES["future"], leaking(size))}
    if size > 1e-4:
        assert Verdict.DEFECT in verdicts
    if size < 1e-7:
        assert Verdict.DEFECT not in verdicts


def test_the_bound_is_the_largest_of_three() -> None:
    """Computed here anew: float32's error against float64, and the last places of the largest logit."""
    single, double = planted(), planted(dtype="float64")

    def measure(subject: Subject) -> tuple[Tensor, Tensor]:
        out = subject.run(draw.feed(subject, draw.ids(subject.facts, 1, 9)))
        return out, out + 1.0

    with torch.no_grad():
        precise = measure(double)
        error = float((measure(single)[0] - precise[0]).abs().max())
    peak = float(torch.cat(precise).abs().max())
    told = gap(single, measure)
    assert told.real
    assert 1 / told.share == pytest.approx(max(TIMES_ERROR * error, TIMES_NOISE * 2.0**-24 * peak), rel=1e-3)
    assert 1e-7 < error < 1e-5
    assert gap(single, measure, positions=160).share == pytest.approx(told.share / 10, rel=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_leak_of_nine_ten_thousandths_is_found(dtype: str) -> None:
    """The smallest that a library has shown in a freshly initialised model: 8.9e-4 of a logit."""
    (found,) = [f for f in answers(PROBES["future"], leaking(8.9e-4, dtype)) if f.verdict is Verdict.DEFECT]
    assert found.size is not None
    assert found.smallest is not None
    assert len(found.smallest["ids"]) == 2
    assert found.smallest["ids"][0] == found.smallest["instead"][0]


def noisy(chance: bool, dtype: str = "float32") -> Subject:
    """Two sums that differ by their order only; or by a small random number."""
    draws = torch.Generator().manual_seed(0)

    def run(feed: Feed) -> Tensor:
        wide: Any = getattr(torch, dtype)
        base = torch.randn(1, feed.tokens, 41, 64, generator=torch.Generator().manual_seed(2)).to(wide)
        if chance:
            return base.sum(-1) + 1e-3 * torch.randn(1, feed.tokens, 41, generator=draws).to(wide)
        return base.sum(-1) if feed.mask is None else base[..., ::2].sum(-1) + base[..., 1::2].sum(-1)

    can = Abilities(takes=frozenset({"mask"}), cast=lambda wanted: noisy(chance, wanted))
    return Subject("noisy", run, Facts(41), can)


def twice(subject: Subject) -> tuple[Tensor, Tensor]:
    feed = draw.feed(subject, draw.ids(subject.facts, 1, 5))
    return subject.run(feed), subject.run(replace(feed, mask=torch.ones_like(feed.ids)))


def test_another_order_of_summation_is_rounding_and_chance_is_not() -> None:
    order, chance = gap(noisy(False), twice), gap(noisy(True), twice)
    assert order.verdict is Verdict.ROUNDING
    assert 0 < order.absolute < 1e-4
    assert chance.verdict is Verdict.DEFECT


def test_without_a_cast_the_measured_rounding_decides() -> None:
    bare = replace(planted(), can=Abilities())

    def apart(by: float) -> Verdict:
        def measure(subject: Subject) -> tuple[Tensor, Tensor]:
            out = subject.run(draw.feed(subject, draw.ids(subject.facts, 1, 9)))
            return out, out + by

        return gap(bare, measure).verdict

    assert [apart(by) for by in (0.0, 1e-6, 1e-3)] == [Verdict.CLEAN, Verdict.ROUNDING, Verdict.DEFECT]


@pytest.mark.parametrize(("by", "verdict"), [(1e-6, Verdict.ROUNDING), (1e-3, Verdict.DEFECT)])
def test_float64_without_a_number_decides_nothing(by: float, verdict: Verdict) -> None:
    def measure(subject: Subject) -> tuple[Tensor, Tensor]:
        out = subject.run(draw.feed(subject, draw.ids(subject.facts, 1, 9)))
        if out.dtype is torch.float64:
            out = torch.full_like(out, float("nan"))
        return out, out + by

    assert gap(planted(), measure).verdict is verdict


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_is_a_defect_unless_both_are(bad: float) -> None:
    a = torch.randn(1, 3, 5)
    b = a.clone()
    b[0, 1, 2] = bad
    subject = planted()
    assert gap(subject, lambda _: (a, b)).verdict is Verdict.DEFECT
    assert gap(subject, lambda _: (b, b)).verdict is Verdict.CLEAN


def test_the_other_order_is_another_rounding_of_the_same_sums() -> None:
    """Equal in float64 to twelve places, and not bit by bit in float32; inside attention too."""
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(2, 3, 7, 64, generator=draws, dtype=torch.float64)
    w, bias = torch.randn(64, 64, generator=draws, dtype=torch.float64), torch.randn(64, generator=draws).double()

    def all_kinds(x: Tensor, w: Tensor, bias: Tensor) -> list[Tensor]:
        attend = torch.nn.functional.scaled_dot_product_attention
        flat = x.flatten(0, 2)
        return [
            x @ w,
            torch.nn.functional.linear(x, w, bias),
            torch.addmm(bias, flat, w),
            torch.bmm(x[0], x[0].transpose(1, 2)),
            torch.einsum("bhtd,df->bhtf", x, w),
            attend(x, x, x, is_causal=True),
        ]

    plain = all_kinds(x, w, bias)
    narrow = all_kinds(x.float(), w.float(), bias.float())
    with torch.no_grad(), OtherOrder():  # type: ignore[no-untyped-call]
        turned = all_kinds(x, w, bias)
        turned_narrow = all_kinds(x.float(), w.float(), bias.float())
    for a, b, c, d in zip(plain, turned, narrow, turned_narrow, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)
        assert not torch.equal(c, d)
