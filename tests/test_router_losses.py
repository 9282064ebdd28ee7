"""Losses and reports on routers against transformers' own, and against figures worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.conftest import GOLDEN
from tests.test_laws import CARDS, ids_of, strong

import scantling as sc
from scantling.errors import ScantlingInputError
from scantling.tensor.context import Context
from scantling.tensor.router_losses import Routing, load, load_balancing_loss, z_loss


def routing(probabilities: list[list[float]], top_k: int, scores: str = "softmax") -> Routing:
    """One row of tokens with these probabilities."""
    logits = torch.tensor(probabilities).log()[None]
    return Routing(logits, logits.topk(top_k, -1).indices, scores)


def test_by_hand_one_choice() -> None:
    """Three of four tokens choose expert 0, one expert 1: f = (3/4, 1/4), P = (0.65, 0.35)."""
    one = routing([[0.8, 0.2], [0.9, 0.1], [0.6, 0.4], [0.3, 0.7]], 1)
    assert float(load_balancing_loss([one])) == pytest.approx(2 * (0.75 * 0.65 + 0.25 * 0.35), rel=1e-6)


def test_by_hand_two_choices_of_two_layers() -> None:
    """f counts both choices: (1, 1/2, 1/2) over the four tokens, P = (0.475, 0.3125, 0.2125)."""
    one = routing([[0.5, 0.3, 0.2], [0.4, 0.2, 0.4]], 2)
    two = routing([[0.5, 0.45, 0.05], [0.5, 0.3, 0.2]], 2)
    three = routing([[0.5, 0.1, 0.4], [0.4, 0.5, 0.1]], 2)
    pooled = float(load_balancing_loss([one, three]))
    f, p = (4 / 4, 2 / 4, 2 / 4), (1.8 / 4, 1.1 / 4, 1.1 / 4)
    assert pooled == pytest.approx(3 * sum(a * b for a, b in zip(f, p, strict=True)), rel=1e-6)
    assert float(load_balancing_loss([two])) == pytest.approx(3 * (0.5 + 0.375), rel=1e-6)


def test_an_even_router_has_the_least_loss_and_the_most_entropy() -> None:
    n, k = 8, 2
    logits = torch.zeros(1, n, n)
    experts = torch.stack([torch.arange(n), (torch.arange(n) + 1) % n], -1)[None]
    even = Routing(logits, experts)
    assert float(load_balancing_loss([even])) == pytest.approx(k)
    report = load(even)
    assert report.shares == (1 / n,) * n
    assert report.entropy == pytest.approx(math.log(n))
    assert report.dead == ()


def test_z_loss_by_hand() -> None:
    """log(e^0 + e^0) = ln 2, log(e^ln3 + e^0) = ln 4."""
    logits = torch.tensor([[[0.0, 0.0], [math.log(3), 0.0]]])
    one = Routing(logits, logits.topk(1, -1).indices)
    assert float(z_loss([one])) == pytest.approx((math.log(2) ** 2 + math.log(4) ** 2) / 2)
    assert float(z_loss([one], torch.tensor([[True, False]]))) == pytest.approx(math.log(2) ** 2)


def test_sigmoids_are_divided_by_their_sum() -> None:
    logits = torch.tensor([[[0.0, math.log(3.0)]]])
    one = Routing(logits, logits.topk(1, -1).indices, "sigmoid")
    torch.testing.assert_close(one.probabilities, torch.tensor([[[0.5, 0.75]]]) / 1.25)
    low = Routing(logits - 500, one.experts, "sigmoid")
    assert bool(torch.isfinite(low.probabilities).all())


def test_the_report_names_dead_experts_and_leaves_padding_out() -> None:
    one = routing([[0.7, 0.2, 0.1], [0.6, 0.3, 0.1], [0.1, 0.1, 0.8]], 1)
    assert load(one).shares == pytest.approx((2 / 3, 0, 1 / 3))
    assert load(one).dead == (1,)
    masked = load(one, torch.tensor([[True, True, False]]))
    assert masked.shares == (1, 0, 0)
    assert masked.dead == (1, 2)
    wanted = [-sum(p * math.log(p) for p in row) for row in ([0.7, 0.2, 0.1], [0.6, 0.3, 0.1])]
    assert masked.entropy == pytest.approx(sum(wanted) / 2)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("n_experts", "top_k", "layers"), [(4, 2, 1), (8, 1, 3), (5, 5, 2)])
def test_random_logits_give_the_loss_of_transformers(n_experts: int, top_k: int, layers: int, masked: bool) -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    draw = torch.Generator().manual_seed(n_experts)
    logits = [torch.randn(3, 7, n_experts, generator=draw) for _ in range(layers)]
    real = torch.rand(3, 7, generator=draw) > 0.4 if masked else None
    ours = load_balancing_loss([Routing(x, x.topk(top_k, -1).indices) for x in logits], real)
    flat = tuple(x.flatten(0, 1) for x in logits)
    theirs: Any = load_balancing_loss_func(flat, n_experts, top_k, None if real is None else real.long())
    torch.testing.assert_close(ours, theirs)


def test_mixtral_hands_over_the_logits_that_transformers_has() -> None:
    from transformers import MixtralForCausalLM

    folder = GOLDEN / "tiny" / "mixtral"
    lm, io = sc.load(folder), load_file(folder / "io.safetensors")
    real = io["attention_mask"].bool()
    original = MixtralForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        out = original(io["input_ids"], attention_mask=io["attention_mask"], output_router_logits=True)
        ctx = Context.of(io["input_ids"], padding=real, training=True)
        lm.net(io["input_ids"], ctx)
    assert list(ctx.routing) == ["decoder.blocks.0.mlp.router", "decoder.blocks.1.mlp.router"]
    for ours, theirs in zip(ctx.routing.values(), out.router_logits, strict=True):
        at = real.flatten()
        torch.testing.assert_close(ours.logits.flatten(0, 1)[at], theirs[at], atol=5e-5, rtol=1e-4)
    torch.testing.assert_close(load_balancing_loss(ctx.routing.values(), real), out.aux_loss)


@pytest.mark.parametrize("name", ["mixtral", "sinks", "groups of experts"])
def test_both_losses_reach_the_routers_and_nothing_is_kept_in_evaluation(name: str) -> None:
    card = CARDS[name]
    net, ids = strong(card), ids_of(card, 2, 6)
    quiet = Context.of(ids)
    net(ids, quiet)
    assert quiet.routing == {}
    asked = Context.of(ids, keep_routing=True)
    net(ids, asked)
    ctx = Context.of(ids, training=True)
    net(ids, ctx)
    assert list(asked.routing) == list(ctx.routing) != []
    for loss in (load_balancing_loss, z_loss):
        net.zero_grad()
        loss(ctx.routing.values()).backward(retain_graph=True)
        grads = {n: p.grad for n, p in net.named_parameters() if n.endswith("router.choose.weight")}
        assert len(grads) == len(ctx.routing)
        assert all(g is not None and bool(g.abs().sum() > 0) for g in grads.values())


def test_what_has_no_loss_is_refused() -> None:
    one = routing([[0.7, 0.3]], 1)
    for loss in (load_balancing_loss, z_loss):
        with pytest.raises(ScantlingInputError, match="no router ran"):
            loss([])
        with pytest.raises(ScantlingInputError, match="every token is padding"):
            loss([one], torch.tensor([[False]]))
        with pytest.raises(ScantlingInputError, match=r"the mask has shape \[1, 2\] and the routers saw \[1, 1\]"):
            loss([one], torch.tensor([[True, True]]))
