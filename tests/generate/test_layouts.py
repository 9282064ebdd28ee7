"""Rings, blocks and rows of unequal lengths, over every registered part and over sampled cards: law 7 for each."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.test_laws import CLOSE, CUTS, SAMPLED, WITH_DECODER, continued, ids_of, run, sampled_cards, strong

import scantling as sc
from scantling.cards import Card
from scantling.generate.keeping import reaches
from scantling.numbers.cache import cache_bytes
from scantling.parts.part import Workload
from scantling.tensor.cache import RingCache
from scantling.tensor.context import Context
from scantling.tensor.paged import PagedCache

KERNELS = ["fused", "reference"]


def check_ring(card: Card, cuts: list[int], kernel: str) -> None:
    net, model = strong(card), sc.assemble(card)
    ids, w = ids_of(card, 2, 12), Workload(batch=2, tokens=12, source=7)
    cache = RingCache(model.named_state(w), reaches(model), torch.float32, "cpu")
    pieces = []
    for start, end in zip([0, *cuts], [*cuts, 12], strict=True):
        more = continued if start else run
        pieces.append(more(net, ids[:, start:end], cache=cache, kernel_name=kernel))
        cache.advance(end - start)
    torch.testing.assert_close(torch.cat(pieces, 1), run(net, ids, kernel_name=kernel), **CLOSE)
    assert cache.nbytes == cache_bytes(model, w, "float32", "ring")


def check_blocks(card: Card, lengths: list[int], size: int, kernel: str) -> None:
    """Rows of unequal lengths in blocks that stand in any order; then two tokens each, then one."""
    net, model = strong(card), sc.assemble(card)
    ids = ids_of(card, len(lengths), 12)
    each = -(-12 // size)
    cache = PagedCache(model.named_state(Workload(tokens=size)), each * len(lengths), torch.float32, "cpu")
    order = torch.randperm(each * len(lengths), generator=torch.Generator().manual_seed(1)).tolist()
    tables = [order[i * each : (i + 1) * each] for i in range(len(lengths))]

    def passed(rows: list[int], pasts: list[int], new: int) -> torch.Tensor:
        some = torch.stack([ids[row, past : past + new] for row, past in zip(rows, pasts, strict=True)])
        view = cache.rows([tables[row] for row in rows], pasts, size)
        positions = torch.tensor(pasts)[:, None] + torch.arange(new)
        return net(some, Context.of(some, positions=positions, cache=view, kernel_name=kernel))

    whole = [run(net, ids[i : i + 1], kernel_name=kernel)[0] for i in range(len(lengths))]
    for row, length in enumerate(lengths):
        torch.testing.assert_close(passed([row], [0], length)[0], whole[row][:length], **CLOSE)
    everyone, more = list(range(len(lengths))), [length + 2 for length in lengths]
    for pasts, new in ((lengths, 2), (more, 1)):
        for row, logits in enumerate(passed(everyone, pasts, new)):
            torch.testing.assert_close(logits, whole[row][pasts[row] : pasts[row] + new], **CLOSE)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("card", WITH_DECODER.values(), ids=WITH_DECODER)
def test_rings_of_every_part(card: Card, kernel: str) -> None:
    check_ring(card, [5, 6, 7, 10], kernel)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("card", WITH_DECODER.values(), ids=WITH_DECODER)
def test_blocks_of_every_part(card: Card, kernel: str) -> None:
    if card.family == "decoder":
        check_blocks(card, [5, 9, 1], 4, kernel)


@SAMPLED
@given(sampled_cards(), CUTS, st.sampled_from(KERNELS))
def test_rings_of_sampled_cards(card: Card, cuts: list[int], kernel: str) -> None:
    if card.family != "encoder":
        check_ring(card, cuts, kernel)


@SAMPLED
@given(
    sampled_cards(), st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 5), st.sampled_from(KERNELS)
)
def test_blocks_of_sampled_cards(card: Card, lengths: list[int], size: int, kernel: str) -> None:
    if card.family == "decoder":
        check_blocks(card, lengths, size, kernel)
