"""FlexAttention gives what the reference kernel gives, run step by step as torch does on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.cases.small import CLOSE, GPT2, LLAMA, built, card, tokens
from tests.train.small import fresh

from scantling.cards.read import training_of
from scantling.errors import ScantlingInputError
from scantling.tensor.context import Context
from scantling.train import settings
from scantling.train.forward import Inputs, forward

T = 150
"""More than one block of 128."""
DOCUMENTS = torch.tensor([[0] * 40 + [1] * 70 + [2] * 40, [0] * 130 + [1] * 10 + [-1] * 10])
PADDING = torch.tensor([[False] * 20 + [True] * 130, [True] * T])

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal": ({}, {}),
    "both ways": ({"family": "encoder"}, {}),
    "window": ({"attention": {"window": 9}}, {}),
    "chunk": ({"attention": {"chunk": 16}}, {"padding": PADDING}),
    "stride": ({"attention": {"stride": {"every": 5, "last": 2}}}, {}),
    "capped": ({"attention": {"softcap": 3.0}}, {}),
    "documents": ({}, {"documents": DOCUMENTS}),
    "documents in a window": ({"attention": {"window": 9}}, {"documents": DOCUMENTS}),
    "padding": ({"family": "encoder"}, {"padding": PADDING}),
    "prefix": ({"attention": {"prefix": True}}, {"prefix_lengths": torch.tensor([30, 77])}),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_reference(name: str) -> None:
    changes, given = CASES[name]
    net, ids = built(card(**{"context": 256, **changes})).net, tokens(T, batch=2)
    wanted, found = (net(ids, Context.of(ids, kernel_name=kernel, **given)) for kernel in ("reference", "flex"))
    real = given.get("padding", torch.ones(2, T, dtype=torch.bool))
    torch.testing.assert_close(found[real], wanted[real], **CLOSE)


def test_a_source_of_several_documents() -> None:
    net = built(card(GPT2, family="encoder-decoder", context=256)).net
    ids, source = tokens(T, batch=2), tokens(30, batch=2, seed=3)
    sources = torch.tensor([[0] * 10 + [1] * 10 + [2] * 10, [0] * 20 + [1] * 10])
    more = {"documents": DOCUMENTS, "source_documents": sources}
    wanted, found = (net(ids, Context.of(ids, kernel_name=name, **more), source) for name in ("reference", "flex"))
    torch.testing.assert_close(found, wanted, **CLOSE)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"position": {"kind": "alibi"}}, "no bias by position"),
        ({"attention": {"sinks": True}}, "no sinks"),
        ({"dropout": {"attention": 0.1}}, "no dropout of attention weights"),
    ],
)
def test_what_the_kernel_has_not_is_refused(changes: dict[str, Any], said: str) -> None:
    base = {key: value for key, value in LLAMA.items() if key not in changes or key == "attention"}
    net, ids = built(card(base, **changes)).net, tokens(8)
    with pytest.raises(ScantlingInputError, match="the flex kernel has " + said):
        net(ids, Context.of(ids, kernel_name="flex", training=True))


def test_training_may_ask_for_it() -> None:
    lm = fresh()
    ids = torch.randint(0, lm.card.vocab_size, (2, 40), generator=torch.Generator().manual_seed(0))
    batch = Inputs(ids, ids, ids.numel(), documents=torch.tensor([[0] * 25 + [1] * 15] * 2))
    hows = [settings.how_of(training_of(lm.card, {"kernel": name}, "small")) for name in ("fused", "flex")]
    with torch.no_grad():
        losses = [float(forward(lm.net, lm.parts, batch, ids.numel(), how).objective) for how in hows]
    assert hows[1].kernel == "flex"
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    with pytest.raises(ScantlingInputError, match="no gradients on a cpu"):
        forward(lm.net.requires_grad_(True), lm.parts, batch, ids.numel(), hows[1])
