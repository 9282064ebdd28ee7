"""The measured machine: what is timed is what is said, whatever the clock shows; then the roofline made of it."""

from __future__ import annotations

import json
from datetime import datetime
from itertools import count
from typing import Any

import pytest
import torch

import scantling as sc
from scantling.cli.main import _run
from scantling.study import calibrate as module
from scantling.study.calibrate import calibrate

TICK = 2.0**-10


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that moves by the same step at every look at it."""
    ticks = count()
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(ticks) * TICK)


@pytest.mark.usefixtures("clock")
def test_rates_are_work_over_time() -> None:
    found = calibrate(["fp32", "int8"], nbytes=5 * 2**20, seconds=50 * TICK)
    assert found.read.best == found.read.median == 5 * 2**20 / TICK
    assert found.read.what == "5 MB"
    for rate in found.products.values():
        m, k, n = map(int, rate.what.split(" x "))
        assert rate.best == 2 * m * k * n / TICK
        assert rate.passes >= 2
    assert [*found.products] == ["fp32", "int8"]


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(("asked", "read"), [(17, 2**20), (2**40, 3 * 2**20)])
def test_the_set_is_as_large_as_asked_within_limits(asked: int, read: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_READ", 3 * 2**20)
    assert calibrate([], asked, seconds=8 * TICK).read.best == read / TICK


def test_the_products_are_those_that_are_counted() -> None:
    """Torch's own counter over what is timed: each pass costs what its rate is made of."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        runs = module._timed(
            torch, torch.device("cpu"), [lambda: torch.mm(torch.ones(6, 5), torch.ones(4, 5).t())], 0.0
        )
    assert len(runs) == 1
    assert counter.get_total_flops() == 2 * (2 * 6 * 5 * 4)


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(sc.ScantlingInputError, match="products in fp8 cannot be measured here; known: fp32, bf16"):
        calibrate(["fp8"], 1)
    with pytest.raises(sc.ScantlingInputError, match="no device 'abacus' on this machine"):
        calibrate(["fp32"], 1, place="abacus")


def test_what_is_only_wished_for_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Any:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(torch, "_int_mm", refused)
    found = calibrate(["fp32"], 1, 0.05, besides=["int8"])
    assert [*found.products] == ["fp32"]
    assert found.missing == ("this machine does not multiply matrices in int8: no kernel",)
    with pytest.raises(sc.ScantlingInputError, match="in int8: no kernel"):
        calibrate(["int8"], 1, 0.05)


def answer(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[Any, str]:
    assert _run([*args, "--json"]) == 0
    captured = capsys.readouterr()
    return json.loads(captured.out), captured.err


@pytest.mark.parametrize("device", [[], ["--device", "this"]])
def test_with_no_device_this_machine_is_measured(
    device: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "__defaults__", (0.2, "cpu", ()))
    monkeypatch.setattr(module, "MOST_READ", 2**22)
    data, told = answer(capsys, "roofline", "tiny", "--batch", "2", "--context", "64", *device)
    measured = data["measured"]
    assert "measuring this machine" in told
    assert datetime.fromisoformat(measured["at"]).tzinfo is not None
    assert measured["torch"] == torch.__version__
    assert [*measured["products"]] == ["bf16", "fp32", "int8"]
    assert f"measured on this machine at {measured['at']}" in data["device_source"]
    for bound, tokens in ((data["decode"], 2), (data["prefill"], 128)):
        compute = bound["flops"] / measured["products"]["bf16"]["best"]
        memory = (bound["weight_bytes"] + bound["cache_bytes"]) / measured["read"]["best"]
        assert bound["seconds"] == pytest.approx(max(compute, memory))
        assert bound["binds"] == ("compute" if compute > memory else "memory")
        assert bound["tokens_per_second"] == pytest.approx(tokens / max(compute, memory))


def test_a_tabled_device_measures_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    data, told = answer(capsys, "roofline", "tiny", "--device", "h100")
    assert (data["measured"], told) == (None, "")


def test_what_cannot_be_is_refused_before_anything_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["roofline", "bert-base-uncased", "--context", "513"]) == 2
    told = capsys.readouterr().err
    assert "512 learned positions" in told
    assert "measuring" not in told
