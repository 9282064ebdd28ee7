"""Seconds of a step: bubble, recomputation, ranks that wait for each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as replace_card
from tests.parallel.conftest import MakeJob

import scantling as sc
from scantling.cards import preset
from scantling.errors import ScantlingInputError
from scantling.numbers.flops import flops
from scantling.numbers.hardware import device, read_devices
from scantling.numbers.parallel.assumptions import IN_SITU, UNMEASURED
from scantling.numbers.parallel.layouts import Layout, Mesh
from scantling.numbers.parallel.passes import Exchange, block_pass, ways
from scantling.numbers.parallel.rows import rows_of
from scantling.numbers.parallel.step import Simulator
from scantling.numbers.parallel.work import Ways, places, speed, work
from scantling.parts.part import Workload
from scantling.study.published import runs


@pytest.mark.parametrize(("micro_batches", "virtual"), [(8, 1), (64, 1), (64, 2), (64, 3)])
def test_the_bubble_is_that_of_the_paper(job: MakeJob, micro_batches: int, virtual: int) -> None:
    """arXiv:2104.04473, sections 2.2.1 and 2.2.2: (p - 1) / m of the ideal time, divided by v with chunks. A vocabulary
    of 8 makes the stages equal; adding up gradients, no part of the ideal time, is little beside 16,384 positions.
    """
    card = replace_card(preset("gpt3-175b"), vocab_size=8, context=16384, n_layers=96)
    j = replace(job("gpt3-175b", 64, 16384, micro_batches), model=sc.assemble(card))
    times = Simulator(j).estimate(Layout(Mesh(1, 8, 8), zero=0, virtual=virtual)).times
    assert times.bubble / (times.compute + times.tensor) == pytest.approx(7 / micro_batches / virtual, rel=0.02)


def test_what_a_layer_keeps_of_its_kernels_speed_is_what_table_4_gives() -> None:
    """arXiv:2205.05198, table 4: milliseconds of the 22 B model's layer on 8 A100, 4 rows of 2,048 positions, forward
    and backward, with and without sequence parallelism. The forward waits for its exchange, the backward hides it.
    """
    run = next(r for r in runs() if r.model == "megatron-22b")
    block, w = run.job.model.stacks["decoder"].blocks[0], Workload(4, 2048, training=True, kernel="reference")
    kernels, measured = 0.0, 0.0
    for sequence, forward, backward in ((False, 7.7, 11.9), (True, 7.2, 11.8)):
        layout = Layout(Mesh(1, 8), zero=0, micro_batch=4, sequence=sequence)
        one = work(block.steps(w), places(block), ways(layout), run.job.speed)
        exchange, _ = Exchange(run.job.fabric, layout, True).reductions(4 * 2048 * 6144 * 2, 2)
        kernels += IN_SITU * (one.forward + one.backward)
        measured += (forward + backward) / 1000 - exchange
    assert round(kernels / measured, 2) == IN_SITU


def test_the_share_of_the_network_is_what_section_6_3_gives() -> None:
    """Eight replicas of the 530 B model take 39.15 s where one takes 37.83 s; what differs is the sum of gradients."""
    one, eight = (
        Simulator(r.job).estimate(r.layout).times
        for r in runs()
        if r.model == "megatron-529.6b" and "Selective" in r.group and r.layout.recompute == "selective"
    )
    assert eight.data == pytest.approx(39.15 - 37.83, rel=0.02)
    assert eight.total - eight.data == pytest.approx(one.total)


def test_all_ranks_together_do_the_models_work(job: MakeJob) -> None:
    """The FLOPs of the blocks of all tensor and context ranks are those of `scantling flops`."""
    model = job("llama-3-8b", 1, 4096, 1).model
    block, w = model.stacks["decoder"].blocks[0], Workload(1, 4096, training=True, kernel="reference")
    counted = sum(step.flops for step in block.steps(w))
    for split in (Ways(), Ways(8), Ways(2, 4), Ways(4, 2, sequence=False)):
        one = work(block.steps(w), places(block), split, speed(device("h100"), "bf16"))
        assert one.flops * split.tensor * split.context == pytest.approx(counted)
    assert counted * 32 == flops(model, w).forward - flops(model, w).by_part["head"]


def test_computing_again_costs_a_forward(job: MakeJob) -> None:
    """Whole blocks: one more forward with its exchange. The core of the attention: only with the plain kernel."""
    j = job("gpt3-175b", 8, 2048, 1, kernel="reference")
    block = j.model.stacks["decoder"].blocks[0]
    w = Workload(1, 2048, training=True, kernel="reference", dtype="bfloat16")
    found = {}
    for policy in ("none", "selective", "block"):
        layout = Layout(Mesh(1, 8), recompute=policy)
        found[policy] = block_pass(rows_of(block, w), j.speed, Exchange(j.fabric, layout, True))
    assert found["none"].again == 0
    exchange, _ = Exchange(j.fabric, Layout(Mesh(1, 8)), True).reductions(2048 * 12288 * 2, 2)
    assert found["block"].again == pytest.approx(found["none"].work.forward + exchange)
    assert 0 < found["selective"].again < 0.2 * found["block"].again


def test_the_slowest_stage_sets_the_pace(job: MakeJob) -> None:
    """Gemma 2's head of 256,000 rows makes its last stage the slowest: 4 stages of 26 blocks, m micro-batches."""
    simulator = Simulator(job("gemma-2-2b", 4, 4096, 32))
    piped = simulator.estimate(Layout(Mesh(1, 1, 4), zero=0)).times
    alone = Simulator(job("gemma-2-2b", 1, 4096, 32)).estimate(Layout(Mesh(), zero=0)).times
    assert piped.compute > 1.3 * alone.compute / 4


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.floats(1.1, 8))
def test_faster_hardware_is_never_slower(tensor: int, pipeline: int, context: int, factor: float) -> None:
    from tests.parallel.conftest import _job

    layout = Layout(Mesh(16, tensor, pipeline, context), zero=3)
    base = _job("llama-3-8b", layout.mesh.devices, 4096, 128)
    total = Simulator(base).estimate(layout).times.total
    fast, wide = base.speed, base.fabric
    for better in (
        replace(base, speed=replace(fast, product=factor * fast.product, attention=factor * fast.attention)),
        replace(base, speed=replace(fast, memory=factor * fast.memory)),
        replace(base, fabric=replace(wide, network=factor * wide.network)),
        replace(base, fabric=replace(wide, link=factor * wide.link)),
    ):
        assert Simulator(better).estimate(layout).times.total <= total + 1e-9


def test_a_device_whose_products_nobody_measured() -> None:
    """Its share of the peak is the stated one; without a bandwidth there is no clock."""
    v4 = speed(device("tpu-v4"), "bf16")
    assert v4.product == pytest.approx(UNMEASURED * v4.peak) == pytest.approx(UNMEASURED * 275e12)
    assert speed(device("h100"), "bf16").product == 698.6e12
    bare = read_devices("x: {about: a, source: b, dense_tflops: {bf16: 1}}", "x.yaml")["x"]
    with pytest.raises(ScantlingInputError, match="x has no memory_gb_per_s"):
        speed(bare, "bf16")
    with pytest.raises(ScantlingInputError, match="x has no dense peak in fp32"):
        speed(bare, "fp32")
