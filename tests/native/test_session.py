"""Generation through the compiled pass: the texts that PyTorch gives, for every way of making one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.native.test_pass import CARDS
from tests.test_laws import strong

import scantling as sc
from scantling.generate.beam import Beams
from scantling.generate.engine import Options
from scantling.generate.keeping import Keeping
from scantling.generate.packed_session import PackedSession
from scantling.native import library

pytestmark = pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))
NAMES = ["llama", "window", "biases", "qk-norm", "neighbours turned", "padded vocabulary"]


def built(name: str) -> sc.Model:
    """A model whose logits are far enough apart that rounding chooses no other token."""
    lm = sc.new(CARDS[name])
    lm.net.load_state_dict(strong(CARDS[name]).state_dict())
    lm.net.eval().requires_grad_(False)
    return lm


@pytest.mark.parametrize("name", NAMES)
def test_greedy_rows_are_those_of_pytorch(name: str) -> None:
    lm = built(name)
    ids = torch.randint(0, 70, (3, 6), generator=torch.Generator().manual_seed(1))
    wanted = lm.generate(ids, 12, ignore_eos=True)
    lm.pack()
    assert torch.equal(lm.generate(ids, 12, ignore_eos=True), wanted)


def test_padded_rows_and_draws() -> None:
    lm = built("llama")
    ids = torch.randint(0, 70, (3, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[1] * 6, [0] * 2 + [1] * 4, [0] * 5 + [1]])
    settings: dict[str, Any] = {"attention_mask": mask, "ignore_eos": True, "temperature": 0.7, "top_k": 9, "seed": 3}
    wanted = lm.generate(ids, 10, **settings)
    lm.pack()
    assert torch.equal(lm.generate(ids, 10, **settings), wanted)


def test_beams_are_those_of_pytorch() -> None:
    lm = built("llama")
    ids = torch.randint(0, 70, (1, 5), generator=torch.Generator().manual_seed(2))
    beams = Beams(4)
    wanted = lm.generate(ids, 8, beams=beams, ignore_eos=True)
    lm.pack()
    assert torch.equal(lm.generate(ids, 8, beams=beams, ignore_eos=True), wanted)


def test_score_rewind_and_select() -> None:
    lm = built("window")
    lm.pack()
    assert lm.packed is not None
    ids = torch.randint(0, 70, (2, 12), generator=torch.Generator().manual_seed(5))
    wanted = lm.logits(ids)
    session = lm.packed.session(lm, 2, 20)
    close = {"atol": 3e-5, "rtol": 1e-4}
    torch.testing.assert_close(session.prefill(ids[:, :5]), wanted[:, 4], **close)
    torch.testing.assert_close(session.score(ids[:, 5:9]), wanted[:, 5:9], **close)
    session.rewind(3)
    assert session.filled == 6
    torch.testing.assert_close(session.score(ids[:, 6:11], last_only=True), wanted[:, 10:11], **close)
    session.select(torch.tensor([1, 1]))
    torch.testing.assert_close(session.step(ids[[1, 1], 11]), wanted[[1, 1], 11], **close)
    session.rewind(1)
    session.select(torch.tensor([0, 1, 0]))
    torch.testing.assert_close(session.step(ids[[1, 1, 1], 11]), wanted[[1, 1, 1], 11], **close)


def test_a_kind_of_cache_is_pytorchs() -> None:
    """What the compiled pass does not have is asked of PyTorch."""
    lm = built("llama")
    lm.pack()
    from scantling.generate.session import begin

    ids = torch.tensor([[1, 2, 3]])
    assert isinstance(begin(lm, ids, 4)[0], PackedSession)
    assert not isinstance(begin(lm, ids, 4, keeping=Keeping("ring"))[0], PackedSession)
    assert torch.equal(lm.generate(ids, 4), lm.generate(ids, 4, options=Options(keeping=Keeping("full"))))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": "q3"}, "width is 'q3'; use one of stored, f32"),
        ({"activations": "int4"}, "activations are 'int4'; use exact or int8"),
    ],
)
def test_settings_that_do_not_exist(settings: dict[str, Any], message: str) -> None:
    lm = built("llama")
    with pytest.raises(sc.ScantlingInputError, match=message):
        lm.pack(**settings)
    assert lm.packed is None


def test_a_card_that_the_pass_does_not_know() -> None:
    from tests.test_laws import CARDS as ALL

    with pytest.raises(sc.ScantlingInputError, match="does not know law: attention is causal"):
        sc.new(ALL["chunks"]).pack()


def test_the_default_model_decodes_its_own_blocks(smollm: Any) -> None:
    """The greedy text of the file's 4-bit blocks is that of their values in float32."""
    import copy

    lm = copy.copy(smollm)
    lm.pack()
    assert lm.packed.weights.nbytes < 113_000_000
    prompt = "The three primary colours are"
    assert lm.generate(prompt, 24) == smollm.generate(prompt, 24)
    assert smollm.packed is None
