"""Attention maps, streams, logit lens and sums against what the original implementations recorded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.conftest import GOLDEN

import scantling as sc
from scantling.lens import attention_maps, attribute, capture, decompose, lens_logits
from scantling.parts.heads import Head
from scantling.passes import Given

MODELS = sorted(p.name for p in (GOLDEN / "tiny").iterdir())
CLOSE = {"atol": 5e-5, "rtol": 1e-4}


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest) -> tuple[sc.Model, dict[str, Any]]:
    folder = GOLDEN / "tiny" / request.param
    return sc.load(folder), load_file(folder / "io.safetensors")


def given(io: dict[str, Any]) -> Given:
    return Given(io["attention_mask"], token_type_ids=io.get("token_type_ids"), decoder_ids=io.get("decoder_input_ids"))


def read(io: dict[str, Any]) -> torch.Tensor:
    """Which tokens of the stack under the head are real."""
    return io.get("decoder_attention_mask", io["attention_mask"]).bool()


def close(lm: sc.Model) -> dict[str, float]:
    return {**CLOSE, "atol": 2e-4} if lm.card.name == "marian" else CLOSE


def test_attention_maps_are_the_recorded_ones_and_the_fast_kernel_gave_the_output(case: Any) -> None:
    lm, io = case
    maps = list(attention_maps(lm, io["input_ids"], given=given(io), cross=lm.parts.two_stacks).values())
    recorded = [io[name] for name in sorted(io) if name.startswith("cross_attn." if lm.parts.two_stacks else "attn.")]
    if not recorded:
        assert lm.card.name == "falcon-alibi-sequential"
        return  # by design: recorded with a kernel that shows no maps, as the original's other one adds the bias twice
    assert len(maps) >= len(recorded) >= 2
    for found, wanted in zip(maps, recorded, strict=False):
        torch.testing.assert_close(found[:1][:, :, read(io)[0]], wanted[:, :, read(io)[0]], **close(lm))
    g = given(io)
    plain = lm.logits(io["input_ids"], g.attention_mask, token_type_ids=g.token_type_ids, decoder_ids=g.decoder_ids)
    assert torch.equal(capture(lm, io["input_ids"], ["*.attn:weights"], g).out, plain)


def test_streams_are_the_recorded_ones(case: Any) -> None:
    lm, io = case
    where, name = ("decoder", "dec_hidden") if lm.parts.two_stacks else (next(iter(lm.parts.stacks)), "hidden")
    layers = len(lm.parts.stacks[where].blocks)
    seen = capture(lm, io["input_ids"], [f"{where}.blocks.*", where], given(io))
    for i in range(layers):
        torch.testing.assert_close(seen[f"{where}.blocks.{i}:in"][read(io)], io[f"{name}.{i}"][read(io)], **close(lm))
    top = io[f"{name}.{layers}"][read(io)]
    if seen[where].shape[-1] == top.shape[-1]:
        torch.testing.assert_close(seen[where][read(io)], top, **close(lm))
    else:
        assert lm.card.name == "opt-postnorm-proj"  # there the projection of the head counts as a layer


def test_the_stream_is_the_sum_of_its_terms(case: Any) -> None:
    lm, io = case
    for stack in lm.parts.stacks:
        whole = decompose(lm, io["input_ids"], given(io), stack=stack)
        heads = decompose(lm, io["input_ids"], given(io), stack=stack, by_head=True)
        assert whole.error < 1e-6
        assert heads.error < 1e-6
        assert len(heads.terms) > len(whole.terms)


def test_logits_are_the_sum_of_their_terms(case: Any) -> None:
    lm, io = case
    head = lm.parts.head
    if not isinstance(head, Head) or head.transform is not None:
        with pytest.raises(sc.ScantlingInputError, match=r"no sum over the stream|logits of a vocabulary"):
            attribute(lm, io["input_ids"][:1], [0], given(io))
        return
    g, tokens = given(io), list(range(lm.card.vocab_size))
    one = Given(g.attention_mask[:1], decoder_ids=None if g.decoder_ids is None else g.decoder_ids[:1])
    position = int(read(io)[0].sum()) - 1
    found = attribute(lm, io["input_ids"][:1], tokens, one, position=position)
    torch.testing.assert_close(found.sums.float(), io["logits"][0, position], **close(lm))
    assert found.error < 1e-4


def test_the_lens_ends_in_the_recorded_logits(case: Any) -> None:
    lm, io = case
    if not isinstance(lm.parts.head, Head):
        return  # by design: labels and vectors are no vocabulary
    *_, (point, logits) = lens_logits(lm, io["input_ids"], given(io))
    assert point.endswith(f"blocks.{len(list(lm.parts.stacks.values())[-1].blocks) - 1}")
    torch.testing.assert_close(logits[read(io)], io["logits"][read(io)], **close(lm))
