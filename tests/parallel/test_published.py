"""The table of published runs is what its sources say, and docs/plan.md is the simulator beside it."""

from __future__ import annotations

import json
from itertools import groupby

import pytest
from tests import plan_page

from scantling.cli.main import _run
from scantling.numbers.parallel.assumptions import NETWORK
from scantling.numbers.parallel.step import Simulator
from scantling.study.published import Beside, beside, errors, runs


def test_parameters_are_the_published_ones() -> None:
    """Exact where a source prints them all (MPT), else to the digits that it prints."""
    exact = 0
    for run in runs():
        counted = run.job.model.params
        if isinstance(run.parameters, int) and run.parameters > 10**6:
            assert counted == run.parameters, run.model
            exact += 1
        elif run.parameters is not None:
            digits = len(str(run.parameters).partition(".")[2])
            assert round(counted / 1e9, digits) == pytest.approx(run.parameters, rel=0.003), run.model
    assert exact == 38


def test_the_mfu_of_a_step_is_the_published_one() -> None:
    """Where a source prints both a speed and an MFU: the same within a third of a point, by our count of FLOPs."""
    both = [row for row in beside() if row.run.mfu is not None]
    assert len(both) == 45
    for row in both:
        assert 100 * row.published == pytest.approx(100 * (row.run.mfu or 0), abs=0.55), row.run


def test_a_figure_in_tflops_is_turned_into_seconds() -> None:
    """arXiv:2104.04473, equation 4: 84 days for 300 B tokens of the 175 B model on 1,024 A100 at 140 TFLOP/s, from
    8 T P / (n X); its equation 3 for FLOPs gives the same step within 2 %."""
    run = next(r for r in runs() if r.model == "megatron-174.6b" and r.job.devices == 1536)
    one = 8 * run.job.step_tokens * run.job.model.params / (1536 * 141e12)
    assert run.seconds == pytest.approx(one, rel=0.05)
    b, s, layers, h, v = run.job.sequences, 2048, 96, 12288, 51200
    equation_3 = 96 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert run.seconds == pytest.approx(equation_3 / (1536 * 141e12), rel=1e-3)


def test_each_source_says_what_the_model_misses_or_nothing_is() -> None:
    """Within 5 points of MFU, and fitting, or in words."""
    for row in beside():
        assert row.run.source
        if not (abs(row.error) <= plan_page.NEAR and row.fits):
            assert row.run.misses, (row.run.group, row.run.model)


def test_predictions_are_as_good_as_the_page_says() -> None:
    """The groups that the clock's constants do not come from."""
    off = {name: errors(list(rows)) for name, rows in groupby(beside(), lambda row: row.run.group)}
    assert off["Megatron-LM, 1.7 B to 1 T"].rms < 3.5
    assert off["Llama 3 405 B"].rms < 3.5
    assert abs(off["PaLM 540 B"].largest) < 3
    assert all(off[f"MPT on {device}"].rms < 6.5 for device in ("A100 80 GB", "A100 40 GB", "H100"))


def test_what_ran_fits_but_for_three() -> None:
    """Of 76 runs, all of which fitted; those three are named on the page."""
    too_large = [(row.run.model, row.run.job.devices) for row in beside() if not row.fits]
    assert too_large == [("megatron-529.6b", 640), ("llama-3.1-405b", 8192), ("mpt-1b", 128)]


def test_errors_of_known_rows() -> None:
    rows = [Beside(row.run, row.estimate, 0.4, 0.4 + off / 100) for row, off in zip(beside(), (3, -4), strict=False)]
    found = errors(rows)
    assert (found.runs, found.mean, found.largest) == (2, pytest.approx(-0.5), pytest.approx(-4))
    assert found.rms == pytest.approx(12.5**0.5)


def test_the_page_is_up_to_date() -> None:
    """``make docs``, or ``python -m tests.plan_page --write``, rewrites it. The places are compared below."""
    text = plan_page.PATH.read_text()
    assert plan_page.page(plan_page.printed_places(text)) == text


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_places_are_up_to_date_and_among_the_first_five_or_missed_in_words() -> None:
    places = plan_page.places()
    assert plan_page.printed_places(plan_page.PATH.read_text()) == places
    for row, place in zip(beside(), places, strict=True):
        assert plan_page.near(row, place) or row.run.misses, (row.run.group, row.run.model, place)


def test_a_stale_page_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    text = plan_page.PATH.read_text()
    places = plan_page.printed_places(text)
    assert len(places) == len(runs())
    assert plan_page.page((*places[:-1], "9 of 9")) != text
    monkeypatch.setattr("scantling.numbers.parallel.assumptions.NETWORK", NETWORK / 2)
    assert plan_page.page(places) != text


def test_the_command_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["plan", "--published"]) == 0
    out = capsys.readouterr().out
    assert all(run.group in out and run.source in out and run.misses in out for run in runs())
    assert _run(["plan", "--published", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)["runs"]
    assert [row["predicted_mfu"] for row in data] == [row.predicted for row in beside()]
    llama = next(row for row in data if row["model"] == "llama-3.1-405b" and row["devices"] == 16384)
    assert llama["layout"]["mesh"] == {"data": 128, "tensor": 8, "pipeline": 16, "context": 1, "expert": 1}


def test_more_replicas_leave_fewer_micro_batches_and_a_larger_bubble() -> None:
    """MT-NLG's three runs: more replicas share less of the step's rows, so the bubble grows from 8 to 12."""
    rows = [row for row in beside() if row.run.group.startswith("Megatron-Turing")]
    shares = [row.estimate.times.bubble / row.estimate.times.total for row in rows]
    assert shares == sorted(shares)
    assert [row.estimate.micro_batches for row in rows] == [240, 192, 160]
    assert all(Simulator(row.run.job).estimate(row.run.layout) == row.estimate for row in rows)
