"""What ranks send, against the formulas of the papers, and how long that takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.parallel.conftest import MakeJob

from scantling.errors import ScantlingInputError
from scantling.numbers.hardware import device, read_devices
from scantling.numbers.parallel.assumptions import LINK, LINK_LATENCY, NETWORK, NETWORK_LATENCY
from scantling.numbers.parallel.communication import KINDS, Fabric, Traffic, fabric, sent
from scantling.numbers.parallel.layouts import Layout, Mesh
from scantling.numbers.parallel.memory import precision
from scantling.numbers.parallel.replicas import Room, waited
from scantling.numbers.parallel.shards import Held
from scantling.numbers.parallel.step import Simulator

NODES = Fabric(8, 300e9, 25e9)


def of(traffic: tuple[Traffic, ...], what: str) -> dict[str, float]:
    """Bytes that a rank sends, by collective."""
    return {t.kind: t.sent for t in traffic if t.what == what}


def test_a_ring_sends_what_the_literature_says() -> None:
    """Patarasuk and Yuan: 2 (n - 1) / n of the tensor for an all-reduce, half of that for each of its phases."""
    assert sent("all-reduce", 4, 1000) == 1500
    assert sent("all-gather", 4, 1000) == sent("reduce-scatter", 4, 1000) == sent("all-to-all", 4, 1000) == 750
    assert sent("send", 2, 1000) == 1000
    assert all(sent(kind, 1, 1000) == 0 for kind in KINDS)


@given(st.sampled_from(KINDS[:3]), st.integers(1, 5000), st.integers(1, 10**12))
def test_no_ring_sends_more_than_the_tensor_twice(kind: str, ranks: int, size: int) -> None:
    assert 0 <= sent(kind, ranks, size) < 2 * size
    assert sent("all-reduce", ranks, size) == sent("all-gather", ranks, size) + sent("reduce-scatter", ranks, size)


def test_tensor_ranks_sum_four_times_a_layer(job: MakeJob) -> None:
    """Megatron-LM (arXiv:1909.08053, section 3): two all-reduces of B T d in a layer's forward, two in its backward;
    with a recomputed forward six (arXiv:2104.04473, section 3.2: 8 bsh (t - 1) / t numbers per layer without). The
    embedding's and the head's own are one more forward and backward each.
    """
    j = job("gpt3-175b", 8, 2048, 1)
    stream = 2 * 2048 * 12288
    whole = Simulator(j).traffic(Layout(Mesh(1, 8), zero=0, sequence=False))
    assert of(whole, "tensor") == {"all-reduce": pytest.approx((4 * 96 + 4) * 2 * 7 / 8 * stream)}
    again = Simulator(j).traffic(Layout(Mesh(1, 8), zero=0, sequence=False, recompute="block"))
    assert of(again, "tensor") == {"all-reduce": pytest.approx((6 * 96 + 4) * 2 * 7 / 8 * stream)}


def test_divided_positions_send_as_much_as_before(job: MakeJob) -> None:
    """arXiv:2205.05198, section 4.2.2: the bandwidth of sequence parallelism is that of tensor parallelism."""
    simulator = Simulator(job("gpt3-175b", 8, 2048, 1))
    plain, divided = (simulator.traffic(Layout(Mesh(1, 8), zero=0, sequence=s)) for s in (False, True))
    halves = of(divided, "tensor")
    assert halves["all-gather"] == halves["reduce-scatter"]
    assert sum(halves.values()) == sum(of(plain, "tensor").values())


def test_a_parallel_block_sums_once(job: MakeJob) -> None:
    """GPT-J adds attention and MLP to the same stream, so that one all-reduce does (arXiv:2204.02311, section 2)."""
    traffic = Simulator(job("gpt-j-6b", 2, 2048, 1)).traffic(Layout(Mesh(1, 2), zero=0, sequence=False))
    assert of(traffic, "tensor")["all-reduce"] == pytest.approx((2 * 28 + 4) * 2 * 2048 * 4096)


def test_context_ranks_gather_keys_and_values(job: MakeJob) -> None:
    """Llama 3 8B has 8 KV heads of 128 in 32 layers: K and V of 8,192 positions in 16 bits are 32 MiB a layer; gathered
    twice, and their gradients scattered once."""
    traffic = Simulator(job("llama-3-8b", 4, 8192, 1)).traffic(Layout(Mesh(1, context=4), zero=0))
    layer = 2 * 8 * 128 * 8192 * 2
    assert of(traffic, "context") == {"all-gather": 2 * 32 * layer * 3 / 4, "reduce-scatter": 32 * layer * 3 / 4}


def test_tokens_go_to_their_experts_and_back(job: MakeJob) -> None:
    """Mixtral: each of 2 x 4,096 positions, divided over 4 ranks, goes to 2 experts and back, forward and backward."""
    j = job("mixtral-8x7b-v0.1", 8, 4096, 16)
    traffic = Simulator(j).traffic(Layout(Mesh(2, context=4, expert=8), micro_batch=2))
    one = 2 * 4096 // 4 * 2 * 4096 * 2
    assert of(traffic, "experts") == {"all-to-all": pytest.approx(4 * 32 * 4 * one * 7 / 8)}


def test_stages_send_the_stream_once_for_each_chunk(job: MakeJob) -> None:
    """arXiv:2104.04473, sections 3.2 and 4.1: b s h numbers between stages, v times as often with v chunks; each of t
    tensor ranks sends 1 / t."""
    j = job("gpt3-175b", 64, 2048, 16)
    one = 2 * 2048 * 12288 / 8
    for virtual in (1, 3):
        traffic = Simulator(j).traffic(Layout(Mesh(1, 8, 8), virtual=virtual))
        assert of(traffic, "pipeline") == {"send": 2 * virtual * 16 * one}


@pytest.mark.parametrize(("zero", "parameters"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_sharing_everything_costs_half_as_much_again(zero: int, parameters: int) -> None:
    """arXiv:1910.02054, section 7: the parameters twice with stages 0 to 2, three times with stage 3, in 16 bits."""
    size, held = precision("mixed-16"), Held(10**9)
    _, traffic = waited(Layout(Mesh(64), zero), held, NODES, size, Room(0.0, 0.0, 1), 1)
    assert sum(t.sent for t in traffic) == pytest.approx(parameters * 2 * 10**9 * 63 / 64)


def test_shared_gradients_are_scattered_in_every_round() -> None:
    """Once a micro-batch without chunks, once a round of as many micro-batches as ranks with them."""
    size, held = precision("mixed-16"), Held(10**9)
    plain, chunks = Layout(Mesh(4, 1, 4), 2), Layout(Mesh(4, 1, 4), 2, virtual=2)
    for layout, rounds in ((plain, 16), (chunks, 4)):
        _, traffic = waited(layout, held, NODES, size, Room(0.0, 0.0, 1), 16)
        assert [t.times for t in traffic if t.what == "gradients"] == [rounds]
        assert [t.times for t in traffic if t.what == "weights"] == [1]


def test_shards_within_a_node_are_summed_between_nodes() -> None:
    """Hybrid shards: gradients scattered over 8, and each eighth summed over 4 nodes."""
    _, traffic = waited(Layout(Mesh(32), 3, 8), Held(8 * 10**8), NODES, precision("mixed-16"), Room(0.0, 0.0, 1), 1)
    found = {(t.what, t.kind): (t.ranks, t.inside, t.size) for t in traffic}
    assert found == {
        ("weights", "all-gather"): (8, True, 16 * 10**8),
        ("gradients", "reduce-scatter"): (8, True, 16 * 10**8),
        ("gradients", "all-reduce"): (4, False, 2 * 10**8),
    }


def test_experts_are_summed_by_those_that_have_them() -> None:
    """8 replicas in 2 groups of 4 expert ranks: dense gradients over 8, those of an expert over 2."""
    layout = Layout(Mesh(8, expert=4), 0)
    _, traffic = waited(layout, Held(10**9, 10**8), NODES, precision("mixed"), Room(0.0, 0.0, 1), 1)
    assert [(t.ranks, t.size) for t in traffic] == [(8, 4 * 10**9), (2, 4 * 10**8)]


def test_seconds_are_bytes_over_the_slower_link() -> None:
    """8 ranks in a node share its links; 16 that stand one apart cross the network with the node's 8 adapters; 2 that
    stand 8 apart with one."""
    gb = 10**9
    assert NODES.seconds("all-gather", 8, 1, gb) == pytest.approx(LINK_LATENCY + 7 / 8 / (300 * LINK))
    assert NODES.seconds("all-gather", 16, 1, gb) == pytest.approx(NETWORK_LATENCY + 15 / 16 / (8 * 25 * NETWORK))
    assert NODES.seconds("all-reduce", 2, 8, gb, 3) == pytest.approx(3 * (NETWORK_LATENCY + 1 / (25 * NETWORK)))
    assert NODES.seconds("send", 2, 4, gb) == pytest.approx(LINK_LATENCY + 1 / (300 * LINK))
    assert NODES.seconds("send", 2, 8, gb) == pytest.approx(NETWORK_LATENCY + 1 / (25 * NETWORK))
    assert NODES.seconds("all-gather", 1, 1, gb) == 0.0
    assert (NODES.inside(8, 1), NODES.inside(2, 4), NODES.inside(6, 1), NODES.inside(2, 8)) == (
        True,
        True,
        False,
        False,
    )


@given(st.integers(0, 3), st.floats(0, 1), st.integers(1, 64))
def test_hiding_never_costs_and_never_hides_the_edge(zero: int, seconds: float, micro_batches: int) -> None:
    layout, size = Layout(Mesh(16), zero), precision("mixed")
    bare, _ = waited(layout, Held(10**9), NODES, size, Room(0.0, 0.0, 1), micro_batches)
    hidden, _ = waited(layout, Held(10**9), NODES, size, Room(seconds, 2 * seconds, 32), micro_batches)
    assert bare / 32 - 1e-9 <= hidden <= bare + 1e-9


def test_a_missing_figure_is_named_where_it_is_needed() -> None:
    bare = read_devices("x: {about: a, source: b, dense_tflops: {bf16: 1}}", "x.yaml")["x"]
    assert fabric(bare, 1).per_node == 1
    with pytest.raises(ScantlingInputError, match="device x has no devices_per_node: --per-node or"):
        fabric(bare, 2)
    with pytest.raises(ScantlingInputError, match="device x has no link_gb_per_s"):
        fabric(bare, 2, 8)
    with pytest.raises(ScantlingInputError, match="device x has no network_gb_per_s: --network or"):
        fabric(bare, 2, 1)
    assert fabric(bare, 2, 1, 25e9) == Fabric(1, 0.0, 25e9)
    assert fabric(device("h100"), 16) == Fabric(8, 450e9, 50e9)


def test_what_cannot_hide_is_waited_for(job: MakeJob) -> None:
    layout = Layout(Mesh(2, 8, 2), zero=1, micro_batch=1)
    with_all = job("llama-3-8b", 32, 4096, 32)
    times = Simulator(with_all).estimate(layout).times
    for name in ("tensor", "data", "pipeline"):
        less = Simulator(replace(with_all, overlap=with_all.overlap - {name})).estimate(layout).times
        assert getattr(less, name) > getattr(times, name)
        assert less.total > times.total
