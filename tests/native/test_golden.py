"""Every family that the compiled pass knows: the recorded logits of its tiny model, and PyTorch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.conftest import GOLDEN, stacks_of

import scantling as sc
from scantling.generate.batching import Engine, Limits
from scantling.generate.beam import Beams, beam_rows, beam_search
from scantling.generate.packed_pages import PackedPages
from scantling.generate.request import Request
from scantling.generate.settings import Options
from scantling.generate.speculative import Drafting
from scantling.native import library
from scantling.native.program import outline

pytestmark = pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))
NAMES = [name for name in sorted(p.name for p in (GOLDEN / "tiny").iterdir()) if stacks_of(name) == "decoder"]
UNKNOWN = {
    "bloom-postln-residual": "each added to the stream",
    "deepseek-v2": "it has no LatentAttention",
    "deepseek-v2-qlora-groups": "it has no LatentAttention",
    "deepseek-v3": "it has no LatentAttention",
    "falcon-alibi-sequential": "penalties are not rounded",
    "llama-rope-dynamic": "the angles do not depend on the length",
    "opt-postnorm-proj": "its tables are as wide as the stream",
    "phi3-longrope-long": "the angles do not depend on the length",
    "phi3-longrope-short": "the angles do not depend on the length",
}


@pytest.fixture(scope="module", params=[name for name in NAMES if name not in UNKNOWN])
def case(request: pytest.FixtureRequest) -> tuple[sc.Model, dict[str, Any]]:
    folder = GOLDEN / "tiny" / request.param
    return sc.load(folder), load_file(folder / "io.safetensors")


def test_logits_are_the_recorded_ones_and_those_of_pytorch(case: Any) -> None:
    """Rows alone, each in one piece and then token by token."""
    lm, io = case
    lm.pack("f32")
    assert lm.packed is not None
    ids, mask = io["input_ids"], io["attention_mask"].bool()
    for row, real, recorded in zip(ids, mask, io["logits"], strict=True):
        text = row[real]
        session = lm.packed.session(lm, 1, len(text))
        first = len(text) // 2
        found = torch.cat([session.score(text[None, :first])[0], *(session.step(i[None]) for i in text[first:])])
        torch.testing.assert_close(found, lm.logits(text)[0], atol=3e-5, rtol=1e-4)
        if real[0] or "position_ids_from_mask" not in io:
            torch.testing.assert_close(found, recorded[real], atol=5e-5, rtol=1e-4)


def test_greedy_continuations_are_the_recorded_ones(case: Any) -> None:
    lm, io = case
    lm.pack("f32")
    ids, mask = io["gen_input_ids"], io["gen_attention_mask"]
    assert torch.equal(lm.generate(ids, 20, attention_mask=mask, ignore_eos=True), io["expected_ids"])


def test_every_way_of_writing_gives_the_recorded_text(case: Any) -> None:
    """Requests in blocks of the engine, with drafts of two kinds, and beams."""
    lm, io = case
    lm.pack("f32")
    ids, mask = io["gen_input_ids"], io["gen_attention_mask"].bool()
    new = io["expected_ids"][:, ids.shape[1] :].tolist()
    prompts = [row[real].tolist() for row, real in zip(ids, mask, strict=True)]
    engine, on = Engine(lm, Limits(rows=2, positions=96, chunk=5)), Options(ignore_eos=True)
    handles = [engine.submit(Request(prompt, 20, options=on)) for prompt in prompts]
    engine.run()
    assert isinstance(engine.cache, PackedPages)
    assert [handle.ids for handle in handles] == new
    for drafting in (Drafting(lookup=2, switch=False), Drafting(layers=1, switch=False)):
        made = lm.generate([prompts[0]], 20, options=Options(ignore_eos=True, drafting=drafting))
        assert made[0, len(prompts[0]) :].tolist() == new[0]
    found = beam_search(lm, ids[:1], 10, Beams(3), attention_mask=mask[:1], ignore_eos=True)
    assert torch.equal(beam_rows(lm, ids[:1], found), io["beam_ids"])


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_it_does_not_know_is_said(name: str) -> None:
    found = outline(sc.assemble(sc.card(str(GOLDEN / "tiny" / name))))
    assert isinstance(found, str)
    assert UNKNOWN[name] in found


def test_16_bits_are_read_as_they_are() -> None:
    """Matrices whose widths fill no block: heads of 10 channels, and a hidden width of 112."""
    lm = sc.load(GOLDEN / "tiny" / "llama-gqa")
    lm.pack("bf16")
    assert lm.packed is not None
    for name, values in lm.net.state_dict().items():
        if values.dim() == 2:
            lm.net.get_parameter(name).data = values.bfloat16().float()
    ids = torch.arange(12)[None]
    found = lm.packed.session(lm, 1, 12).score(ids)
    torch.testing.assert_close(found, lm.logits(ids), atol=3e-5, rtol=1e-4)
