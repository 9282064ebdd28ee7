"""Shards: together they are the model, each weight once; stages and limits."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.cards.strategies import any_cards

import scantling as sc
from scantling.cards import preset
from scantling.cards.read import from_dict
from scantling.errors import ScantlingInputError
from scantling.numbers.parallel.layouts import (
    Layout,
    Mesh,
    divisors,
    expert_sizes,
    limits,
    meshes,
    refusal,
    stages,
    virtual_sizes,
)
from scantling.numbers.parallel.ranks import kinds, ranks, weights
from scantling.numbers.parallel.shards import cuts, held, share
from scantling.parts.transformer import Transformer

FEW = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def together(model: Transformer, layout: Layout) -> Fraction:
    """Parameters of all ranks, each divided by how many hold the same."""
    mesh, known = layout.mesh, kinds(model)
    total, where = Fraction(0), weights(model, known)
    for rank in ranks(known.order, layout):
        for pieces, n in where.pieces(rank):
            if pieces == where.table and rank.closes and not rank.opens:
                continue
            for cut in pieces:
                for t in range(mesh.tensor):
                    each = range(mesh.expert if cut.experts else 1)
                    owned = sum(cut.owned(mesh.tensor, mesh.expert, t, e) for e in each)
                    total += Fraction(rank.how_many * n * owned, cut.copies(mesh.tensor))
    return total


@FEW
@given(any_cards(), st.data())
def test_the_shards_of_any_card_are_the_model(card: dict[str, object], data: st.DataObject) -> None:
    model = sc.assemble(from_dict({**card, "context": 32}, "sampled"))
    has = limits(model)
    every = (Mesh(2, t, p, 1, e) for t in range(1, 13) for p in (1, 2, 3) for e in expert_sizes(Mesh(2, t, p), has))
    mesh = data.draw(st.sampled_from([mesh for mesh in every if refusal(mesh, has, 32) is None]))
    virtual = data.draw(st.sampled_from(virtual_sizes(has.layers, mesh.pipeline, 64)))
    assert together(model, Layout(mesh, virtual=virtual)) == model.params


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("gpt2", Mesh(1, 6, 5)),
        ("llama-3.1-405b", Mesh(1, 8, 16)),
        ("llama-3.1-405b", Mesh(1, 16, 9)),
        ("falcon-7b", Mesh(1, 71, 2)),
        ("mixtral-8x7b-v0.1", Mesh(4, 4, 2, 1, 4)),
        ("deepseek-v3", Mesh(64, 4, 8, 1, 32)),
        ("gpt-oss-20b", Mesh(16, 8, 3, 1, 16)),
        ("t5-small", Mesh(2, 4)),
        ("gemma-2-9b", Mesh(1, 8, 6)),
    ],
)
def test_the_shards_of_presets_are_the_model(name: str, mesh: Mesh) -> None:
    model = sc.assemble(preset(name))
    assert refusal(mesh, limits(model), 4096) is None
    assert together(model, Layout(mesh)) == model.params


def test_an_uneven_vocabulary_leaves_the_last_rank_fewer_rows() -> None:
    """50,257 rows over 8 ranks: seven with 6,283 and one with 6,276; over 3 ranks 16,753, 16,753 and 16,751."""
    assert [share(50257, 8, rank) for rank in range(8)] == [6283] * 7 + [6276]
    table = next(cut for cut in cuts(sc.assemble(preset("gpt2"))) if cut.name == "embed.weight")
    assert [held([table], 3, 1, rank).total for rank in range(3)] == [16753 * 768, 16753 * 768, 16751 * 768]


def test_fewer_kv_heads_than_ranks_are_copied() -> None:
    """Llama 3 405 B has 8 KV heads: 16 ranks hold each twice, so each has 128 x 16,384 of keys and of values."""
    pieces = [cut for cut in cuts(sc.assemble(preset("llama-3.1-405b"))) if ".0.attn." in cut.name]
    sizes = {cut.name.rsplit(".", 2)[1]: held([cut], 16, 1).total for cut in pieces}
    assert sizes == {"q": 8 * 128 * 16384, "k": 128 * 16384, "v": 128 * 16384, "o": 8 * 128 * 16384}


def test_stages_of_llama_3_take_a_layer_from_both_ends() -> None:
    """arXiv:2407.21783, section 3.3.2: 126 layers on 16 ranks, the embedding alone in the first chunk of the first and
    the head alone in the last of the last."""
    found = stages(126, 16, 8)
    assert [sum(map(len, rank)) for rank in found] == [7, *[8] * 14, 7]
    assert (found[0][0], found[15][7]) == ([], [])
    assert found[1] == [[0], [16], [32], [48], [64], [80], [96], [112]]
    assert sorted(i for rank in found for chunk in rank for i in chunk) == list(range(126))


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 4))
def test_stages_hold_every_block_once_and_differ_by_one(layers: int, pipeline: int, virtual: int) -> None:
    found = stages(layers, pipeline, virtual)
    in_order = [i for v in range(virtual) for rank in found for i in rank[v]]
    assert in_order == list(range(layers))
    sizes = {len(chunk) for rank in found for chunk in rank}
    assert max(sizes) - min(sizes) <= 1


def test_chunks_are_those_that_divide_the_blocks() -> None:
    """Megatron-LM's 3, 2, 2 and 3 virtual stages (arXiv:2104.04473, table 1) are among them."""
    for layers, pipeline, virtual in ((60, 4, 3), (80, 8, 2), (96, 16, 2), (105, 35, 3), (126, 16, 8)):
        assert virtual in virtual_sizes(layers, pipeline, 64)
    assert virtual_sizes(60, 4, 3) == [1], "fewer micro-batches than ranks"
    assert virtual_sizes(96, 1, 64) == [1]
    assert virtual_sizes(7, 2, 8) == [1]


@given(st.integers(1, 3000))
def test_meshes_are_all_products(devices: int) -> None:
    assert divisors(devices) == [n for n in range(1, devices + 1) if devices % n == 0]
    found = list(meshes(devices, 8))
    assert all(mesh.devices == devices and mesh.tensor <= 8 for mesh in found)
    assert len(set(found)) == len(found)
    if devices == 64:
        # Four exponents of 2 that add up to 6, the second at most 3.
        assert len(found) == sum((6 - t + 2) * (6 - t + 1) // 2 for t in range(4))


@pytest.mark.parametrize(
    ("name", "mesh", "message"),
    [
        ("gpt2", Mesh(1, 8), "12 heads do not divide among 8 tensor ranks"),
        ("gpt2", Mesh(1, 1, 13), "12 blocks are fewer than 13 pipeline stages"),
        ("t5-small", Mesh(1, 1, 2), "two stacks are not pipelined"),
        ("llama-3-8b", Mesh(1, 1, 1, 3), "1,000 positions do not divide into two chunks for each of 3 context ranks"),
        ("mixtral-8x7b-v0.1", Mesh(3, expert=3), "8 experts do not divide among 3 ranks"),
        ("mixtral-8x7b-v0.1", Mesh(2, expert=4), "2 replicas do not divide into groups of 4 expert ranks"),
        ("qwen2.5-7b", Mesh(1, 7), "4 KV heads and 7 tensor ranks divide in neither direction"),
    ],
)
def test_what_does_not_divide_is_refused_in_words(name: str, mesh: Mesh, message: str) -> None:
    refused = refusal(mesh, limits(sc.assemble(preset(name))), 1000)
    assert refused is not None
    assert refused[1] == message


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"micro_batch": 0}, "micro_batch is 0; a whole number of at least 1"),
        ({"zero": 4}, "zero is 4; use 0, 1, 2 or 3"),
        ({"recompute": "all"}, "recompute is 'all'; use one of none, selective, block"),
        ({"shards": 3}, "shards is 3, which does not divide 4 replicas"),
    ],
)
def test_an_impossible_layout_is_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ScantlingInputError, match=message):
        Layout(Mesh(4), **wrong)  # type: ignore[arg-type]
