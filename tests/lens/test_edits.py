"""The one mechanism: what it sees, what it changes, and that nothing of it stays behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.cases.small import CLOSE, GPT2, LLAMA, built, card, tokens

import scantling as sc
from scantling.lens import Edit, ablate, add, attention_maps, capture, edited, known, means, put
from scantling.passes import Given


def hooks_of(lm: sc.Model) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in lm.net.modules())


def test_an_edit_that_fails_leaves_no_hook() -> None:
    lm, ids = built(card()), tokens(5)
    plain = lm.logits(ids)

    def fail(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("on purpose")

    for point in ("decoder.blocks.1", "decoder.blocks.1:in", "decoder.blocks.1.attn:weights"):
        with pytest.raises(RuntimeError, match="on purpose"), edited(lm, Edit(point, fail)):
            lm.logits(ids)
        assert hooks_of(lm) == 0
    assert torch.equal(lm.logits(ids), plain)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_net_is_edited_as_the_plain_one_and_stays_compiled(in_place: bool) -> None:
    lm, ids = built(card()), tokens(5)
    cut = ablate("decoder.blocks.0.mlp")
    wanted, maps = capture(lm, ids, [], edits=[cut]).out, attention_maps(lm, ids)
    assert (wanted - lm.logits(ids)).abs().max() > 0.01
    if in_place:
        lm.net.compile(backend="eager")
    else:
        compiled: Any = torch.compile(lm.net, backend="eager")
        lm.net = compiled
    before, called = lm.net, getattr(lm.net, "_compiled_call_impl", None)
    plain = lm.logits(ids)
    with edited(lm, cut):
        torch.testing.assert_close(lm.logits(ids), wanted, **CLOSE)
    assert lm.net is before
    assert getattr(lm.net, "_compiled_call_impl", None) is called
    torch.testing.assert_close(lm.logits(ids), plain, **CLOSE)
    for path, weights in attention_maps(lm, ids).items():
        torch.testing.assert_close(weights, maps[path], **CLOSE)


def test_a_block_that_was_compiled_on_its_own_is_said() -> None:
    lm = built(card())
    net: Any = lm.net
    net.decoder.blocks[0] = torch.compile(net.decoder.blocks[0], backend="eager")
    with pytest.raises(sc.ScantlingInputError, match=r"'decoder.blocks.0' was compiled on its own"):
        capture(lm, tokens(4), ["decoder.blocks.1"])


@pytest.mark.parametrize("way", ["packed", "compiled"])
def test_a_model_that_decodes_through_compiled_code_is_refused(way: str) -> None:
    lm: Any = built(card())
    setattr(lm, way, object())
    with pytest.raises(sc.ScantlingInputError, match="compiled code"), edited(lm, ablate("decoder.blocks.0")):
        pass


@pytest.mark.parametrize(
    ("point", "said"),
    [
        ("decoder.blocks.0.attn:weight", r"did you mean 'decoder.blocks.0.attn:weights'"),
        ("decoder.blocks.2", r"did you mean 'decoder.blocks"),
        ("decoder.*.cross", "no capture point"),
        ("", "no capture point"),
    ],
)
def test_a_point_that_does_not_exist_is_named_with_the_nearest(point: str, said: str) -> None:
    with pytest.raises(sc.ScantlingInputError, match=said):
        capture(built(card()), tokens(4), [point])


def test_every_known_point_is_seen_or_said_to_be_unseen() -> None:
    """Only parts that are never called by themselves (positions that turn or add) give nothing."""
    for base in (LLAMA, GPT2):
        lm, ids = built(card(base)), tokens(4)
        unseen = []
        for point in known(lm.parts):
            try:
                seen = capture(lm, ids, [point])
            except sc.ScantlingInputError:
                unseen.append(point)
                continue
            assert isinstance(seen[point], torch.Tensor)
        assert {point.removesuffix(":in") for point in unseen} <= {"decoder.position"}


def test_a_shape_that_does_not_fit_is_said() -> None:
    lm, ids = built(card()), tokens(4)
    with pytest.raises(sc.ScantlingInputError, match=r"\[1, 4, 32\]"):
        capture(lm, ids, [], edits=[Edit("decoder.blocks.0", lambda x: x[..., :3])])
    with pytest.raises(sc.ScantlingInputError, match="as many tokens"):
        capture(lm, ids, [], edits=[put("decoder.blocks.0", torch.zeros(1, 5, 32))])
    with pytest.raises(sc.ScantlingInputError, match=r"\[3\]"):
        capture(lm, ids, [], edits=[add("decoder.blocks.0", torch.zeros(3))])
    with pytest.raises(sc.ScantlingInputError, match="heads are not apart"):
        ablate("decoder.blocks.0.mlp:hidden", heads=[0])
    with pytest.raises(sc.ScantlingInputError, match=r"4 is none of 0 to 3"):
        capture(lm, ids, [], edits=[ablate("decoder.blocks.0.attn:mixed", heads=[4])])


def test_zeroed_heads_and_neurons_are_those_of_a_net_with_zeroed_columns() -> None:
    lm, ids = built(card()), tokens(7)
    heads, neurons = [1, 3], [0, 5, 47]
    found = capture(
        lm,
        ids,
        [],
        edits=[
            ablate("decoder.blocks.0.attn:mixed", heads=heads),
            ablate("decoder.blocks.1.mlp:hidden", neurons=neurons),
        ],
    ).out
    net: Any = lm.net
    for head in heads:
        net.decoder.blocks[0].attn.o.weight[:, head * 8 : (head + 1) * 8] = 0
    net.decoder.blocks[1].mlp.down.weight[:, neurons] = 0
    torch.testing.assert_close(found, lm.logits(ids), **CLOSE)


def test_means_are_over_real_tokens() -> None:
    lm, ids = built(card()), tokens(6, batch=2)
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    points = ["decoder.blocks.1.mlp:hidden", "decoder.blocks.1.attn:mixed"]
    seen = capture(lm, ids, points, Given(mask))
    found = means(lm, points, ids, Given(mask))
    hidden, mixed = seen[points[0]], seen[points[1]]
    torch.testing.assert_close(found[points[0]][0, 0], torch.cat((hidden[0], hidden[1, :4])).mean(0), **CLOSE)
    torch.testing.assert_close(found[points[1]][0, :, 0], torch.cat((mixed[0], mixed[1, :, :4]), 1).mean(1), **CLOSE)
    cut = ablate(points[0], neurons=[2], positions=[1], value=found[points[0]])
    after = capture(lm, ids, points[:1], Given(mask), [cut])[points[0]]
    torch.testing.assert_close(after[:, 1, 2], found[points[0]][0, 0, 2].expand(2), **CLOSE)
    assert int((after != hidden).sum()) == 2


@pytest.mark.parametrize("kernel", ["fused", "reference"])
def test_changed_weights_change_what_is_mixed(kernel: str) -> None:
    """Weights that are equal over the keys seen give the mean of their values."""
    lm, ids = built(card()), tokens(5)
    at = "decoder.blocks.1.attn"

    def level(weights: torch.Tensor) -> torch.Tensor:
        return (weights > 0).to(weights) / (weights > 0).sum(-1, keepdim=True)

    seen = capture(lm, ids, [f"{at}:mixed", f"{at}:values"], edits=[Edit(f"{at}:weights", level)], kernel=kernel)
    values = seen[f"{at}:values"].repeat_interleave(2, 1)
    count = torch.arange(1, 6)[:, None]
    torch.testing.assert_close(seen[f"{at}:mixed"], values.cumsum(2) / count, **CLOSE)


def test_a_direction_is_a_bias_in_every_pass_of_generation() -> None:
    lm, ids = built(card(GPT2)), tokens(5)
    push = torch.randn(32, generator=torch.Generator().manual_seed(3))
    plain = lm.generate(ids, 12, ignore_eos=True)
    with edited(lm, add("decoder.blocks.0.mlp", push, 2.0)):
        found = lm.generate(ids, 12, ignore_eos=True)
    assert torch.equal(lm.generate(ids, 12, ignore_eos=True), plain)
    net: Any = lm.net
    net.decoder.blocks[0].mlp.down.bias += 2.0 * push
    assert torch.equal(lm.generate(ids, 12, ignore_eos=True), found)
    assert not torch.equal(found, plain)


def test_edits_of_one_point_follow_each_other_and_captures_see_them() -> None:
    lm, ids = built(card()), tokens(3)
    at = "decoder.blocks.0"
    plain = capture(lm, ids, [at])[at]
    ones = torch.ones(32)
    found = capture(lm, ids, [at], edits=[add(at, ones, 2.0), Edit(at, lambda x: x * 3), add(at, ones, positions=[-1])])
    wanted = (plain + 2) * 3
    wanted[:, -1] += 1
    torch.testing.assert_close(found[at], wanted)
    assert torch.equal(capture(lm, ids, [at])[at], plain)


def test_a_vector_at_one_token_of_a_head_point() -> None:
    lm, ids = built(card()), tokens(6)
    at = "decoder.blocks.1.attn:v_heads"
    plain, ones = capture(lm, ids, [at])[at], torch.ones(8)
    moved = capture(lm, ids, [at], edits=[add(at, ones, 0.5, positions=[4])])[at]
    wanted = plain.clone()
    wanted[:, :, 4] += 0.5
    torch.testing.assert_close(moved, wanted)
