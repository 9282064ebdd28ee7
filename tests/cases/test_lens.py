"""Cases about looking inside: attention maps and the logit lens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.cases.small import CLOSE, GPT2, LLAMA, built, card, tokens

from scantling.lens import attention_maps, attribute, lens_logits, logit_lens
from scantling.passes import Given
from scantling.tensor.context import Context


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_the_lens_takes_each_layers_own_size(norm: str) -> None:
    """LENS-01: six layers whose stream grows 10 times: the lens after layer 1 is the norm of that stream, by hand."""
    lm = built(card({**LLAMA, "norm": {"kind": norm, "eps": 1e-5}}, n_layers=6))
    net: Any = lm.net
    for i, block in enumerate(net.decoder.blocks):
        block.mlp.down.weight *= 1.6**i
    ids = tokens(6)
    states = lm.hidden(ids)
    assert states[5].std() / states[1].std() > 3
    lens = dict(lens_logits(lm, ids))
    wide = states[2].double()
    if norm == "layernorm":
        wide = wide - wide.mean(-1, keepdim=True)
    normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * net.decoder.final_norm.weight.double()
    if norm == "layernorm":
        normed = normed + net.decoder.final_norm.bias.double()
    by_hand = normed @ net.head.matrix.weight.double().T
    torch.testing.assert_close(lens["decoder.blocks.1"].double(), by_hand, **CLOSE)
    assert torch.equal(lens["decoder.blocks.5"], lm.logits(ids))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kernel", ["fused", "reference"])
def test_rows_of_a_map_add_up_to_one_with_dropout(kernel: str, training: bool) -> None:
    """LENS-03: attention dropout 0.5, in training and in evaluation: maps are taken before it, hidden keys are 0."""
    lm, ids = built(card(dropout={"attention": 0.5}, attention={"window": 4})), tokens(9)
    seen: dict[str, torch.Tensor] = {}
    ctx = Context.of(ids, kernel_name=kernel, training=training)
    paths = [f"decoder.blocks.{i}.attn" for i in range(2)]
    ctx.observe(lambda path, value: seen.setdefault(path, value), paths)
    lm.net(ids, ctx)
    place = torch.arange(9)
    hidden = (place[:, None] < place) | (place[:, None] - place >= 4)
    for path in paths:
        weights = seen[f"{path}:weights"]
        torch.testing.assert_close(weights.sum(-1), torch.ones(1, 4, 9), **CLOSE)
        assert torch.count_nonzero(weights[..., hidden]) == 0
        assert bool((weights[..., ~hidden] > 0).all())


@pytest.mark.parametrize("base", [GPT2, LLAMA], ids=["learned", "rope"])
def test_the_lens_does_not_depend_on_the_batch(base: dict[str, Any]) -> None:
    """MASK-05: maps, logit lens and what adds to a logit, of a prompt alone and padded beside a longer one."""
    lm, ids = built(card(base)), tokens(5)
    rows = torch.cat((torch.cat((torch.zeros(1, 3, dtype=torch.int64), ids), 1), tokens(8, seed=5)))
    mask = torch.tensor([[0] * 3 + [1] * 5, [1] * 8])
    given = Given(mask, (mask.cumsum(-1) - 1).clamp(min=0))
    for (path, alone), batch in zip(
        attention_maps(lm, ids).items(), attention_maps(lm, rows, given=given).values(), strict=True
    ):
        torch.testing.assert_close(batch[:1, :, 3:, 3:], alone, msg=path, **CLOSE)
        assert torch.count_nonzero(batch[:1, :, 3:, :3]) == 0
    for (point, alone), (_, batch) in zip(lens_logits(lm, ids), lens_logits(lm, rows, given), strict=True):
        torch.testing.assert_close(batch[:1, 3:], alone, msg=point, **CLOSE)
    assert torch.is_grad_enabled()
    first = Given(mask[:1], given.position_ids[:1])
    wanted, found = attribute(lm, ids, [3, 5]), attribute(lm, rows[:1], [3, 5], first)
    torch.testing.assert_close(found.values, wanted.values, **CLOSE)
    top = logit_lens(lm, ids, positions=[-1])[0].top
    assert torch.equal(logit_lens(lm, rows[:1], first, positions=[-1])[0].top, top)
