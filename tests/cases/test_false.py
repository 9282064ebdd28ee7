"""Cases that were reported as faults and were none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.cases.small import CLOSE, LLAMA, built, card, tokens

from scantling.parts.moe import Router
from scantling.tensor.context import Context


@pytest.mark.parametrize("turned", [8, 4])
def test_the_two_rope_layouts_differ_by_an_order_of_rows(turned: int) -> None:
    """FALSE-01: halves and neighbours with the same weights differ; with each head's rows even then odd they agree."""
    position = {"kind": "rope", "theta": 1e4, "d_rotary": turned}
    halves = built(card({**LLAMA, "position": position}))
    neighbours = built(card({**LLAMA, "position": {**position, "interleaved": True}}))
    ids = tokens(9)
    assert (halves.logits(ids) - neighbours.logits(ids)).abs().max() > 0.1
    order = [*range(0, turned, 2), *range(1, turned, 2), *range(turned, 8)]
    state = dict(neighbours.net.state_dict())
    for name in [n for n in state if ".attn.q." in n or ".attn.k." in n]:
        state[name] = state[name].unflatten(0, (-1, 8))[:, order].flatten(0, 1)
    halves.net.load_state_dict(state)
    torch.testing.assert_close(halves.logits(ids), neighbours.logits(ids), **CLOSE)


def kept(logits: list[float], **choice: Any) -> list[float]:
    """The weights that a router gives the experts it keeps."""
    n = len(logits)
    net: Any = Router(n, n, 2, **choice).build()
    with torch.no_grad():
        net.choose.weight.copy_(torch.eye(n))
        weights, _ = net(torch.tensor([[logits]]), Context(1, 1, torch.device("cpu")))
    return weights.flatten().tolist()  # type: ignore[no-any-return]


def test_softmax_before_or_after_the_choice_is_one_where_weights_are_divided_by_their_sum() -> None:
    """FALSE-03: router logits 2, 1, 0.5, -1, the two best."""
    logits = [2.0, 1.0, 0.5, -1.0]
    both = [0.7310586, 0.2689414]
    assert kept(logits, scores="softmax", normalize=True) == pytest.approx(both, abs=5e-8)
    assert kept(logits, scores="top_softmax", normalize=False) == pytest.approx(both, abs=5e-8)
    assert kept(logits, scores="top_softmax", normalize=True) == pytest.approx(both, abs=5e-8)
    whole = torch.tensor(logits).softmax(-1)[:2].tolist()
    assert kept(logits, scores="softmax", normalize=False) == pytest.approx(whole, abs=5e-8)
    assert sum(whole) < 0.9


def test_centred_logits_have_the_same_distribution() -> None:
    """FALSE-06: with a centred head the logits move by a constant per position, and no probability or loss does."""
    lm, ids = built(card()), tokens(9)
    logits, loss = lm.logits(ids), lm.loss(ids, ids)
    with torch.no_grad():
        head: Any = lm.net.get_parameter("head.matrix.weight")
        head.sub_(head.mean(0))
    moved = lm.logits(ids) - logits
    assert moved.abs().max() > 1e-2
    assert float((moved - moved.mean(-1, keepdim=True)).abs().max()) < 1e-5
    torch.testing.assert_close(lm.logits(ids).softmax(-1), logits.softmax(-1), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lm.loss(ids, ids), loss)
