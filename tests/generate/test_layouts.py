"""Rings, blocks and rows of unequal lengths, over every registered part and over sampled cards: law 7 for each."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.test_laws import CLOSE, CUTS, SAMPLED, WITH_DECODER, continued, ids_of, run, sampled_cards, source_of, strong

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


SOURCES = [7, 4, 6]
"""Tokens of each row's source."""


def check_blocks(card: Card, lengths: list[int], size: int, kernel: str) -> None:
    """Rows of unequal lengths in blocks that stand in any order; then two tokens each, then one.

    Of an encoder-decoder sources of unequal lengths go in together, with the first token of each target.
    """
    net, model, everyone = strong(card), sc.assemble(card), list(range(len(lengths)))
    ids, first = ids_of(card, len(lengths), 12), [0] * len(lengths)
    sources = source_of(net, ids)
    cache = PagedCache(
        model.named_state(Workload(tokens=size)),
        -(-12 // size) * len(lengths),
        torch.float32,
        "cpu",
        of_source=model.source_slots,
        source_count=0 if sources is None else sum(-(-n // size) for n in SOURCES[: len(lengths)]),
    )
    tables, of_source = shuffled([12] * len(lengths), size), shuffled(SOURCES[: len(lengths)], size)

    def passed(rows: list[int], pasts: list[int], new: int, source: torch.Tensor | None = None) -> torch.Tensor:
        some = torch.stack([ids[row, past : past + new] for row, past in zip(rows, pasts, strict=True)])
        read = [[of_source[row] for row in rows], [SOURCES[row] for row in rows]] if sources is not None else []
        view = cache.rows([tables[row] for row in rows], pasts, size, *read)
        positions = torch.tensor(pasts)[:, None] + torch.arange(new)
        return net(some, Context.of(some, positions=positions, cache=view, kernel_name=kernel), source)

    own = [None if sources is None else sources[row : row + 1, : SOURCES[row]] for row in everyone]
    whole = [run(net, ids[row : row + 1], kernel_name=kernel, source=own[row])[0] for row in everyone]
    if sources is not None:
        longest = sources[:, : max(SOURCES[: len(lengths)])]
        for row, logits in enumerate(passed(everyone, first, 1, longest)):
            torch.testing.assert_close(logits, whole[row][:1], **CLOSE)
        first = [1] * len(lengths)
    for row, length in enumerate(lengths):
        if length > first[row]:
            found = passed([row], [first[row]], length - first[row])[0]
            torch.testing.assert_close(found, whole[row][first[row] : length], **CLOSE)
    more = [length + 2 for length in lengths]
    for pasts, new in ((lengths, 2), (more, 1)):
        for row, logits in enumerate(passed(everyone, pasts, new)):
            torch.testing.assert_close(logits, whole[row][pasts[row] : pasts[row] + new], **CLOSE)


def shuffled(lengths: list[int], size: int) -> list[list[int]]:
    """Blocks for rows of these lengths, in any order."""
    each = [-(-length // size) for length in lengths]
    order = torch.randperm(sum(each), generator=torch.Generator().manual_seed(1)).tolist()
    return [[order.pop() for _ in range(count)] for count in each]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("card", WITH_DECODER.values(), ids=WITH_DECODER)
def test_rings_of_every_part(card: Card, kernel: str) -> None:
    check_ring(card, [5, 6, 7, 10], kernel)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("card", WITH_DECODER.values(), ids=WITH_DECODER)
def test_blocks_of_every_part(card: Card, kernel: str) -> None:
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
    if card.family != "encoder":
        check_blocks(card, lengths, size, kernel)
