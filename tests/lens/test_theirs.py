"""Maps and streams of every row against transformers as it runs, where the records hold one row or no such map."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.conftest import GOLDEN

import scantling as sc
from scantling.lens import attention_maps, capture, lens_logits
from scantling.passes import Given

CLOSE = {"atol": 5e-5, "rtol": 1e-4}
IDS = torch.randint(3, 130, (2, 13), generator=torch.Generator().manual_seed(4))
TARGET = torch.randint(3, 130, (2, 9), generator=torch.Generator().manual_seed(5))
MASK = torch.ones(2, 13, dtype=torch.int64)
MASK[1, 10:] = 0


def theirs(name: str) -> Any:
    transformers = pytest.importorskip("transformers")
    kinds = {"bert": "AutoModelForMaskedLM", "t5": "AutoModelForSeq2SeqLM", "bart": "AutoModelForSeq2SeqLM"}
    kind = getattr(transformers, kinds.get(name, "AutoModelForCausalLM"))
    return kind.from_pretrained(GOLDEN / "tiny" / name, attn_implementation="eager").eval()


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "gemma2", "bloom", "bert"])
def test_one_stack(name: str) -> None:
    lm = sc.load(GOLDEN / "tiny" / name)
    with torch.no_grad():
        wanted = theirs(name)(IDS, attention_mask=MASK, output_attentions=True, output_hidden_states=True)
    (where,) = lm.parts.stacks
    for found, weights in zip(attention_maps(lm, IDS, given=Given(MASK)).values(), wanted.attentions, strict=True):
        torch.testing.assert_close(found[0], weights[0], **CLOSE)
        torch.testing.assert_close(found[1, :, :10], weights[1, :, :10], **CLOSE)
    seen = capture(lm, IDS, [f"{where}.blocks.*:in", where], Given(MASK))
    streams = [*(seen[f"{where}.blocks.{i}:in"] for i in range(lm.card.n_layers)), seen[where]]
    for stream, state in zip(streams, wanted.hidden_states, strict=True):
        torch.testing.assert_close(stream[MASK.bool()], state[MASK.bool()], **CLOSE)


def read_by_theirs(model: Any, name: str, state: torch.Tensor) -> torch.Tensor:
    """Their own norm and head on a stream of theirs."""
    if name == "bert":
        return model.cls(state)
    if name in ("gpt2", "bloom"):
        return model.lm_head(model.transformer.ln_f(state))
    logits = model.lm_head(model.model.norm(state))
    cap = getattr(model.config, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "gemma2", "bloom", "bert"])
def test_the_lens_after_each_layer(name: str) -> None:
    lm, model = sc.load(GOLDEN / "tiny" / name), theirs(name)
    with torch.no_grad():
        states = model(IDS, attention_mask=MASK, output_hidden_states=True).hidden_states
        for (_, found), state in zip(list(lens_logits(lm, IDS, Given(MASK)))[:-1], states, strict=False):
            wanted = read_by_theirs(model, name, state)
            torch.testing.assert_close(found[MASK.bool()], wanted[MASK.bool()], **CLOSE)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_two_stacks(name: str) -> None:
    lm = sc.load(GOLDEN / "tiny" / name)
    with torch.no_grad():
        wanted = theirs(name)(
            IDS, attention_mask=MASK, decoder_input_ids=TARGET, output_attentions=True, output_hidden_states=True
        )
    given = Given(MASK, decoder_ids=TARGET)
    encoder = attention_maps(lm, IDS, given=given, stack="encoder").values()
    for found, weights in zip(encoder, wanted.encoder_attentions, strict=True):
        torch.testing.assert_close(found[0], weights[0], **CLOSE)
        torch.testing.assert_close(found[1, :, :10], weights[1, :, :10], **CLOSE)
    for cross, maps in ((False, wanted.decoder_attentions), (True, wanted.cross_attentions)):
        for found, weights in zip(attention_maps(lm, IDS, given=given, cross=cross).values(), maps, strict=True):
            torch.testing.assert_close(found, weights, **CLOSE)
    layers = len(lm.parts.stacks["decoder"].blocks)
    seen = capture(lm, IDS, ["decoder.blocks.*:in", "decoder"], given)
    streams = [*(seen[f"decoder.blocks.{i}:in"] for i in range(layers)), seen["decoder"]]
    for stream, state in zip(streams, wanted.decoder_hidden_states, strict=True):
        torch.testing.assert_close(stream, state, **CLOSE)
