"""Groups, updates and states of the optimisers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.cases.small import GPT2, LLAMA, card

import scantling as sc
from scantling.cards.read import from_dict
from scantling.train.optim import Optimizers, Recipe, block_of, clip, groups, norms_by_block, total_norm

MOE = {
    "kind": "moe",
    "n_experts": 4,
    "top_k": 2,
    "expert": {"kind": "gated", "act": "silu", "d_ff": 16},
}


def trained(lm: sc.Model) -> dict[str, torch.Tensor]:
    return dict(lm.net.named_parameters())


def optimizers(lm: sc.Model, recipe: Recipe, masters: bool = False) -> Optimizers:
    return Optimizers(groups(lm.parts, trained(lm), recipe), recipe, masters)


def pull(lm: sc.Model, seed: int = 0) -> None:
    """A gradient for every weight."""
    draw = torch.Generator().manual_seed(seed)
    for weight in lm.net.parameters():
        weight.grad = torch.randn(weight.shape, generator=draw).to(weight.dtype)


def test_gains_and_shifts_do_not_decay() -> None:
    lm = sc.new(card(attention={"qk_norm": {"kind": "rmsnorm", "eps": 1e-5, "over": "each_head"}}))
    by_name = {group.name: group for group in groups(lm.parts, trained(lm), Recipe())}
    assert all("norm" in name for name in by_name["plain"].weights)
    assert by_name["plain"].weight_decay == 0.0
    # A gain per head is a matrix in shape and a gain in what it does.
    assert by_name["plain"].weights["decoder.blocks.0.attn.q_norm.weight"].dim() == 2
    assert "embed.weight" in by_name["decayed"].weights
    spared = groups(lm.parts, trained(lm), Recipe(decay_embeddings=False))
    assert "embed.weight" in {group.name: group for group in spared}["plain"].weights


def test_muon_takes_the_matrices_of_the_blocks() -> None:
    lm = sc.new(from_dict({**LLAMA, "mlp": MOE}, "moe"))
    by_name = {group.name: set(group.weights) for group in groups(lm.parts, trained(lm), Recipe("muon"))}
    assert by_name["muon"] == {f"decoder.blocks.{i}.attn.{x}.weight" for i in (0, 1) for x in "qkvo"}
    assert {"embed.weight", "decoder.blocks.0.mlp.router.choose.weight"} <= by_name["decayed"]


def test_every_weight_is_in_one_group() -> None:
    lm = sc.new(card(GPT2))
    for kind in ("adamw", "muon", "sgd"):
        found = groups(lm.parts, trained(lm), Recipe(kind))
        names = [name for group in found for name in group.weights]
        assert sorted(names) == sorted(lm.parts.named_weights)
        assert sum(group.numel for group in found) == lm.parts.params


def test_adamw_is_the_papers_update() -> None:
    """arXiv:1711.05101, algorithm 2, over two updates at rates of 0.5 and 1 of the peak."""
    lm = sc.new(card(), dtype="float64")
    recipe = Recipe("adamw", lr=1e-2, weight_decay=0.3)
    optimizer = optimizers(lm, recipe)
    name = "decoder.blocks.0.attn.q.weight"
    x, m, v = trained(lm)[name].detach().clone(), 0.0, 0.0
    for n, factor in enumerate((0.5, 1.0), 1):
        pull(lm, n)
        g = trained(lm)[name].grad.clone()  # type: ignore[union-attr]
        optimizer.step(factor)
        rate = factor * recipe.lr
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        x = x - rate * 0.3 * x - rate * (m / (1 - 0.9**n)) / ((v / (1 - 0.95**n)).sqrt() + 1e-8)
        torch.testing.assert_close(trained(lm)[name].detach(), x, rtol=1e-10, atol=1e-12)


def test_muon_turns_a_gradient_into_nearly_orthogonal_columns() -> None:
    """Its singular values lie around 1 times the size that arXiv:2502.16982, eq. 4, gives to the update."""
    lm = sc.new(card())
    before = {name: weight.detach().clone() for name, weight in trained(lm).items()}
    pull(lm)
    optimizers(lm, Recipe("muon", lr=0.1, weight_decay=0.0)).step(1.0)
    name = "decoder.blocks.1.mlp.up.weight"
    moved = (before[name] - trained(lm)[name].detach()) / (0.1 * 0.2 * math.sqrt(max(before[name].shape)))
    values = torch.linalg.svdvals(moved)
    assert 0.5 < float(values.min()) <= float(values.max()) < 1.5
    assert not torch.equal(before["embed.weight"], trained(lm)["embed.weight"])


def test_masters_keep_what_16_bits_lose() -> None:
    """A relative change of 1e-3 is under half of a bfloat16 digit (2^-9): 40 of them are lost one by one."""
    ends = {}
    for masters in (False, True):
        lm = sc.new(card(), dtype="bfloat16")
        for weight in lm.net.parameters():
            torch.nn.init.ones_(weight)
        optimizer = optimizers(lm, Recipe("sgd", lr=1e-3, momentum=0.0, weight_decay=0.0), masters)
        for _ in range(40):
            for weight in lm.net.parameters():
                weight.grad = torch.ones_like(weight)
            optimizer.gather()
            optimizer.step(1.0)
        ends[masters] = float(lm.net.get_parameter("embed.weight").detach()[0, 0])
    assert ends[False] == 1.0
    assert ends[True] == pytest.approx(0.96, abs=2e-3)


def test_masters_sum_micro_batches_in_float32() -> None:
    lm = sc.new(card(), dtype="bfloat16")
    optimizer = optimizers(lm, Recipe(), True)
    for value in (256.0, 1.0, 1.0):
        for weight in lm.net.parameters():
            weight.grad = torch.full_like(weight, value)
        optimizer.gather()
    assert all(bool((gradient == 258.0).all()) for _, gradient in optimizer.gradients())


@pytest.mark.parametrize("kind", ["adamw", "muon", "sgd"])
@pytest.mark.parametrize("masters", [False, True])
def test_a_restored_state_goes_on_to_the_bit(kind: str, masters: bool) -> None:
    dtype = "bfloat16" if masters else "float32"

    def advance(lm: sc.Model, optimizer: Optimizers, steps: range) -> None:
        for step in steps:
            pull(lm, step)
            optimizer.gather()
            optimizer.step(1 / (step + 1))

    straight, resumed = sc.new(card(), dtype=dtype), sc.new(card(), seed=5, dtype=dtype)
    optimizer = optimizers(straight, Recipe(kind), masters)
    advance(straight, optimizer, range(2))
    state = {key: value.clone() for key, value in optimizer.state().items()}
    resumed.net.load_state_dict(straight.net.state_dict())
    advance(straight, optimizer, range(2, 5))
    again = optimizers(resumed, Recipe(kind), masters)
    again.restore(state)
    advance(resumed, again, range(2, 5))
    for name, weight in trained(straight).items():
        assert torch.equal(weight, trained(resumed)[name]), name
    assert {k: v.tolist() for k, v in optimizer.state().items()} == {k: v.tolist() for k, v in again.state().items()}


def test_a_state_of_another_optimizer_is_refused() -> None:
    lm = sc.new(card())
    adamw, sgd = optimizers(lm, Recipe()), optimizers(lm, Recipe("sgd"))
    pull(lm)
    adamw.step(1.0)
    state = adamw.state()
    with pytest.raises(sc.ScantlingInputError, match="this optimizer keeps momentum_buffer"):
        sgd.restore(state)
    with pytest.raises(sc.ScantlingInputError, match="a weight that is not trained now"):
        adamw.restore(state | {"nobody/exp_avg": torch.zeros(1)})
    with pytest.raises(sc.ScantlingInputError, match="has shape"):
        adamw.restore(state | {"embed.weight/exp_avg": torch.zeros(3)})
    with pytest.raises(sc.ScantlingInputError, match="another precision"):
        optimizers(sc.new(card(), dtype="bfloat16"), Recipe(), True).restore(state)


@pytest.mark.parametrize(("kind", "known"), [("adam", "adamw, adamw-8bit, muon, sgd")])
def test_an_unknown_optimizer_is_refused(kind: str, known: str) -> None:
    lm = sc.new(card())
    with pytest.raises(sc.ScantlingInputError, match=known):
        Optimizers(groups(lm.parts, trained(lm), Recipe()), Recipe(kind))


def test_norms_by_block_add_up_and_find_what_is_not_finite() -> None:
    gradients: dict[str, Any] = {
        "embed.weight": torch.tensor([3.0]),
        "decoder.blocks.0.attn.q.weight": torch.tensor([4.0]),
        "decoder.blocks.0.mlp.up.weight": torch.tensor([0.0]),
        "decoder.blocks.1.attn.q.weight": torch.tensor([12.0]),
        "head.bias": torch.tensor([0.0]),
    }
    norms = norms_by_block(gradients)
    assert norms == {"embed": 3.0, "decoder.blocks.0": 4.0, "decoder.blocks.1": 12.0, "head": 0.0}
    assert total_norm(norms) == 13.0
    clip(gradients, 13.0, 1.0)
    assert total_norm(norms_by_block(gradients)) == pytest.approx(1.0)
    clip(gradients, 1.0, 5.0)
    assert float(gradients["embed.weight"]) == pytest.approx(3 / 13)
    gradients["decoder.blocks.1.attn.q.weight"][0] = float("nan")
    assert [block for block, norm in norms_by_block(gradients).items() if not math.isfinite(norm)] == [
        "decoder.blocks.1"
    ]
    assert block_of("encoder.blocks.11.attn.q_norm.weight") == "encoder.blocks.11"
