"""What the lens says of every kind of card, and of sampled ones: sums are the stream, maps are the oracle's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from tests.test_laws import CARDS, SAMPLED, ids_of, sampled_cards, strong

import scantling as sc
from scantling.cards import Card
from scantling.lens import attention_maps, attribute, capture, decompose, lens_logits
from scantling.parts.heads import Head
from scantling.passes import Given

CLOSE: dict[str, Any] = {"atol": 2e-5, "rtol": 1e-4}


def check(card: Card) -> None:
    lm = sc.Model(card, sc.assemble(card), strong(card))
    ids = ids_of(card, 2, 9)
    given = Given(decoder_ids=ids_of(card, 2, 7, seed=1)) if lm.parts.two_stacks else Given()
    plain = lm.logits(ids, decoder_ids=given.decoder_ids)
    for stack in lm.parts.stacks:
        assert decompose(lm, ids, given, stack=stack, by_head=True).error < 1e-5
        for cross in (False, True):
            maps = attention_maps(lm, ids, given=given, stack=stack, cross=cross)
            points = [f"{path}:weights" for path in maps]
            oracle = capture(lm, ids, points, given, kernel="reference")
            for path, weights in maps.items():
                torch.testing.assert_close(weights, oracle[f"{path}:weights"], **CLOSE)
            assert torch.equal(capture(lm, ids, points, given).out, plain)
    if isinstance(lm.parts.head, Head):
        *_, (_, logits) = lens_logits(lm, ids, given)
        assert torch.equal(logits, plain)
        if lm.parts.head.transform is None:
            one = Given(decoder_ids=given.decoder_ids[:1]) if lm.parts.two_stacks else Given()
            found = attribute(lm, ids[:1], range(card.vocab_size), one, position=4)
            torch.testing.assert_close(found.sums.float(), plain[0, 4], **CLOSE)


@pytest.mark.parametrize("name", CARDS)
def test_every_card(name: str) -> None:
    check(CARDS[name])


@SAMPLED
@given(sampled_cards())
def test_sampled_cards(card: Card) -> None:
    check(card)
