"""Where time goes: the clock, the predicted split, the crossover."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import pytest
from tests.cases.small import GPT2, LLAMA, built, card

import scantling as sc
from scantling.measure import Asked
from scantling.measure.split import crossover, flops_by_heading, seconds_by_heading
from scantling.measure.timing import Clock, measured, passing, timing
from scantling.numbers.flops import flops, half_at
from scantling.numbers.hardware import Device
from scantling.parts.part import Workload, total

PRESETS = ("gpt2", "llama-3-8b", "mixtral-8x7b-v0.1", "deepseek-v3", "bert-base-uncased", "t5-small", "gemma-2-2b")


def device(tflops: float, gb_per_s: float) -> Device:
    return Device(about="a device", source="made up", dense_tflops={"fp32": tflops}, memory_gb_per_s=gb_per_s)


def test_the_innermost_module_has_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    moments: Iterator[float] = iter([0.0, 1.0, 3.0, 7.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(moments))
    clock = Clock()
    clock.enter("outer")
    clock.enter("inner")
    clock.leave()
    clock.leave()
    assert dict(clock.seconds) == {"outer": 1.0 + 4.0, "inner": 2.0}


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("kernel", ["fused", "reference"])
def test_headings_add_up_to_all_flops(name: str, kernel: str) -> None:
    model, w = sc.assemble(sc.card(name)), Workload(1, 64, source=32, kernel=kernel)
    found = flops_by_heading(model, w)
    counted = flops(model, w)
    assert sum(found.values()) == (counted.forward_visible if kernel == "fused" else counted.forward)
    assert found["head"] == counted.by_part["head"]
    mlp = sum(counted.by_part.get(part, 0) for part in ("mlp", "experts", "router"))
    assert found["mlp"] == mlp


def test_without_a_limit_on_bytes_time_is_flops() -> None:
    model, w = sc.assemble(sc.card("gpt2")), Workload(1, 256, dtype="float32")
    found = seconds_by_heading(model, w, device(1.0, 1e12))
    assert sum(found.values()) == pytest.approx(flops(model, w).forward_visible / 1e12, rel=1e-4)
    assert crossover(model, w, device(1.0, 1e12)) == pytest.approx(half_at(model)["visible"], abs=2)


def test_bytes_of_one_layer_by_hand() -> None:
    # No arithmetic at all: a norm reads and writes T d numbers, and a product reads x and W and writes its output.
    model, w = sc.assemble(card(n_layers=1)), Workload(1, 8, dtype="float32")
    found = seconds_by_heading(model, w, device(1e12, 4e-9))
    tokens, d, d_ff, vocab = 8, 32, 48, 64
    assert found["norm"] == pytest.approx(3 * 2 * tokens * d)
    assert found["head"] == pytest.approx(tokens * d + vocab * d + tokens * vocab)
    gate_and_up = 2 * (tokens * d + d * d_ff + tokens * d_ff)
    down = tokens * d_ff + d * d_ff + tokens * d
    assert found["mlp"] == pytest.approx(gate_and_up + 2 * tokens * d_ff + down)


def test_a_model_whose_windows_keep_pairs_few_never_crosses() -> None:
    model = sc.assemble(card(attention={"window": 4}))
    assert crossover(model, Workload(dtype="float32"), device(1.0, 1e12)) is None


def test_where_a_measured_share_passes_one_half() -> None:
    assert passing((100, 400), (0.25, 0.75)) == pytest.approx(200)
    assert passing((100, 200, 400), (0.1, 0.2, 0.4)) is None


@pytest.mark.parametrize("base", [LLAMA, GPT2, {**GPT2, "family": "encoder"}, {**GPT2, "family": "encoder-decoder"}])
def test_every_part_of_a_pass_is_timed(base: dict[str, object]) -> None:
    found = measured(built(card(base)), Asked(passes=1), 16)
    assert set(found) >= {"embedding", "attention projections", "scores and mix", "mlp", "norm", "head", "other"}
    assert all(seconds > 0 for seconds in found.values())


def test_the_figure_has_both_splits_and_every_crossover() -> None:
    figure = timing(built(card()), Asked(lengths=(8, 16), passes=1))
    for tokens in (8, 16):
        rows = [row for row in figure.rows if row[0] == tokens]
        for column in (3, 4, 5):
            assert math.fsum(row[column] for row in rows) == pytest.approx(1)  # type: ignore[misc]
    found, said = figure.data["crossover"], half_at(sc.assemble(card()))
    assert (found["by_flops_full"], found["by_flops_visible"]) == (said["full"], said["visible"])
    assert found["by_roofline"] >= 1
    assert (
        total(sc.assemble(card()).steps(Workload(1, 8)), "flops") == flops(sc.assemble(card()), Workload(1, 8)).forward
    )
