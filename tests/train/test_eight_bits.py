"""Moments in 8 bits: the codes, the update, the bytes, and that a run goes on."""

from __future__ import annotations

import pytest
import torch
from tests.cases.small import card
from tests.train.test_optim import optimizers, pull

import scantling as sc
from scantling.numbers.training import PRECISIONS, training_memory
from scantling.numbers.training import Recipe as Account
from scantling.parts.part import Workload
from scantling.train.eight_bits import AdamW8, Coded, codes
from scantling.train.optim import Optimizers, Recipe

CPU = torch.device("cpu")


def test_codes_are_those_of_the_paper() -> None:
    """Seven decades: 1, 2, .. 64 steps a side with signs, twice as many without, and 0 and 1: 256 in both."""
    signed, plain = codes(True), codes(False)
    assert len(signed.unique()) == len(plain.unique()) == 256
    assert bool((signed.diff() > 0).all())
    assert bool((plain.diff() > 0).all())
    # 0.9 in 64 or 128 steps: the last middle is half a step below 1.
    assert signed[[0, -2]].tolist() == pytest.approx([-(1 - 0.45 / 64), 1 - 0.45 / 64])
    assert plain[-2:].tolist() == pytest.approx([1 - 0.45 / 128, 1.0])
    assert plain[:4].tolist() == pytest.approx([0.0, 3.25e-7, 7.75e-7, 1.0e-6 + 1.125e-6], rel=1e-5)
    assert int((signed == 0).sum()) == int((plain == 0).sum()) == 1


@pytest.mark.parametrize("signed", [True, False])
def test_what_is_written_is_read_to_the_nearest_code(signed: bool) -> None:
    """Each value is read as the code that is nearest of all 256, by its own block's scale; the last block is short."""
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(700, generator=draw) * torch.logspace(-3, 3, 700)
    values = values if signed else values.abs()
    held, scales = torch.zeros(700, dtype=torch.uint8), torch.zeros(3)
    coded = Coded(signed, CPU)
    coded.write(values, held, scales)
    assert scales.tolist() == [float(values[i : i + 256].abs().max()) for i in (0, 256, 512)]
    wide = scales.repeat_interleave(256)[:700]
    nearest = (values[:, None] - codes(signed) * wide[:, None]).abs().min(1).values
    torch.testing.assert_close((coded.read(held, scales) - values).abs(), nearest, rtol=1e-4, atol=1e-6)
    coded.write(torch.zeros(700), held, scales)
    assert coded.read(held, scales).tolist() == [0.0] * 700


def test_updates_are_those_of_adamw_but_for_the_rounding_of_moments() -> None:
    """The first one uses moments that were never written; the twentieth is 2 % of the way off."""
    ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 6000)) for _ in range(2))
    begun = ours.detach().clone()
    constants = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    both = AdamW8([ours], **constants), torch.optim.AdamW([theirs], **constants)
    draw = torch.Generator().manual_seed(0)
    for step in range(20):
        ours.grad = torch.randn(6000, generator=draw) + 0.5
        theirs.grad = ours.grad.clone()
        for optimizer in both:
            optimizer.step()
        if step == 0:
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    apart = float(((ours - theirs).norm() / (theirs - begun).norm()).detach())
    assert 1e-6 < apart < 0.02


def test_a_small_tensor_is_adamw_itself() -> None:
    ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 60)) for _ in range(2))
    both = AdamW8([ours], 1e-2, (0.9, 0.95), 1e-8), torch.optim.AdamW([theirs], 1e-2, (0.9, 0.95), weight_decay=0.0)
    for seed in range(5):
        for weight, optimizer in zip((ours, theirs), both, strict=True):
            weight.grad = torch.randn(60, generator=torch.Generator().manual_seed(seed))
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("precision", list(PRECISIONS))
@pytest.mark.parametrize("kind", ["adamw", "adamw-8bit", "muon", "sgd"])
def test_the_trainer_holds_what_is_predicted(kind: str, precision: str) -> None:
    """Weights, float32 copies, gradients of a micro-batch and states, byte by byte, in the trainer's own optimisers."""
    drawn = card(d_model=96, attention={"n_heads": 4, "n_kv_heads": 2, "d_head": 24}, vocab_size=100)
    formats = PRECISIONS[precision]
    lm = sc.new(drawn, dtype=formats.weights)
    held = optimizers(lm, Recipe(kind), formats.master is not None)
    pull(lm)
    held.gather()
    said = training_memory(lm.parts, Workload(1, 8), Account(precision, kind))
    assert sum(said.gradients.values()) == sum(gradient.nbytes for _, gradient in held.gradients())
    held.step(1.0)
    assert said.master == sum(master.nbytes for master in held.masters.values())
    states = {key: value for key, value in held.state().items() if not key.endswith("/master")}
    if kind == "adamw-8bit":
        # The count of updates is a number of Python's there.
        states = {key: value for key, value in states.items() if not key.endswith("/step")}
    tables = [table for optimizer in held._all if isinstance(optimizer, AdamW8) for table in optimizer.tables]
    assert sum(said.optimizer.values()) == sum(value.nbytes for value in (*states.values(), *tables))
    assert bool(tables) == (kind == "adamw-8bit")


def test_a_state_is_put_back() -> None:
    """Three updates, then two more from the state of another: the same to the bit; a state of AdamW is refused."""
    models = [sc.new(card(d_model=96, attention={"n_heads": 4, "d_head": 24}, vocab_size=100)) for _ in range(2)]
    straight, broken = (optimizers(lm, Recipe("adamw-8bit")) for lm in models)

    def update(lm: sc.Model, some: Optimizers, seeds: range) -> None:
        for seed in seeds:
            pull(lm, seed)
            some.step(1.0)

    update(models[0], straight, range(5))
    update(models[1], broken, range(3))
    again = optimizers(models[1], Recipe("adamw-8bit"))
    again.restore({key: value.clone() for key, value in broken.state().items()})
    update(models[1], again, range(3, 5))
    ours, theirs = again.state(), straight.state()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert all(torch.equal(a, b) for a, b in zip(models[0].net.parameters(), models[1].net.parameters(), strict=True))
    plain = optimizers(models[1], Recipe("adamw"))
    with pytest.raises(sc.ScantlingInputError, match="this optimizer keeps step, exp_avg, exp_avg_sq"):
        plain.restore(ours)
