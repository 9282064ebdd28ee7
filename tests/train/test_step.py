"""One update: equal weight for every judged token, and no update from a gradient that is not sound."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.train.small import fresh, random_documents, rows, tensors

import scantling as sc
from scantling.tensor.context import Context
from scantling.tensor.router_losses import load_balancing_loss, z_loss
from scantling.train.forward import How, forward
from scantling.train.optim import Optimizers, Recipe, groups
from scantling.train.scoring import Terms
from scantling.train.step import Guard, Outcome, Stepper

MOE = {"kind": "moe", "n_experts": 4, "top_k": 2, "expert": {"kind": "gated", "act": "silu", "d_ff": 16}}


def stepper(lm: sc.Model, how: How | None = None, masters: bool = False, **settings: Any) -> Stepper:
    recipe = Recipe("sgd", lr=1.0, momentum=0.0, weight_decay=0.0)
    optimizers = Optimizers(groups(lm.parts, dict(lm.net.named_parameters()), recipe), recipe, masters)
    return Stepper(lm, optimizers, how or How(), settings.pop("limit", None), settings.pop("seed", 0), **settings)


def weights(lm: sc.Model) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in lm.net.named_parameters()}


def test_micro_batches_of_2_and_9_tokens_are_one_batch_of_11() -> None:
    """Each judged token counts alike: the mean of the means would be another loss and another gradient."""
    short, long = random_documents(3, 10)
    joined, apart = fresh(), fresh()
    one = stepper(joined).update(0, [tensors(rows([short], [long], tokens=10), joined)], 1.0)
    halves = [tensors(rows([some], tokens=10), apart) for some in (short, long)]
    two = stepper(apart).update(0, halves, 1.0)
    assert one.tokens == two.tokens == 11
    assert two.loss == pytest.approx(one.loss, rel=1e-7)
    assert two.norm == pytest.approx(one.norm, rel=1e-6)
    for name, weight in weights(joined).items():
        torch.testing.assert_close(weights(apart)[name], weight, rtol=1e-5, atol=1e-7)
    each = [float(fresh().loss([some], [some])) for some in (short, long)]
    assert one.loss == pytest.approx((2 * each[0] + 9 * each[1]) / 11, rel=1e-6)
    assert abs(one.loss - sum(each) / 2) > 1e-4


@pytest.mark.parametrize("position", ["rope", "alibi", "learned"])
def test_packed_rows_are_the_documents_alone(position: str) -> None:
    """Documents of 6 and 5 tokens: 9 judged targets, and the gradient of the two run one by one."""
    kinds: dict[str, Any] = {"rope": {"theta": 10000.0}, "alibi": {}, "learned": {}}
    changes = {"position": {"kind": position, **kinds[position]}}
    documents = random_documents(6, 5)
    packed, apart = fresh(**changes), fresh(**changes)
    one = stepper(packed).update(0, [tensors(rows(documents, tokens=14), packed)], 1.0)
    two = stepper(apart).update(0, [tensors(rows(*([some] for some in documents), tokens=6), apart)], 1.0)
    assert one.tokens == two.tokens == 9
    assert one.loss == pytest.approx(two.loss, rel=1e-6)
    for name, weight in weights(packed).items():
        torch.testing.assert_close(weights(apart)[name], weight, rtol=1e-4, atol=1e-6)


def test_the_loss_is_that_of_the_models_own_logits() -> None:
    lm = fresh()
    (document,) = random_documents(9)
    result = forward(lm.net, lm.parts, tensors(rows([document], tokens=12), lm), 8, How())
    logits = lm.logits([document])[0, :-1]
    wanted = F.cross_entropy(logits, torch.tensor(document[1:]))
    assert float(result.objective.detach()) == pytest.approx(float(wanted), rel=1e-6)
    assert float(result.nll) / 8 == pytest.approx(float(wanted), rel=1e-6)


def test_losses_of_routers_count_by_the_share_of_tokens() -> None:

    lm = fresh(mlp=MOE)
    (some,) = random_documents(7)
    batch = tensors(rows([some], tokens=7), lm)
    result = forward(lm.net, lm.parts, batch, 12, How(router_balance=0.1, router_z=0.01))
    plain = forward(lm.net, lm.parts, batch, 12, How())
    ctx = Context.of(batch.ids, keep_routing=True)
    lm.net(batch.ids, ctx)
    extra = 0.1 * load_balancing_loss(ctx.routing.values()) + 0.01 * z_loss(ctx.routing.values())
    added = float(result.objective.detach() - plain.objective.detach())
    assert added == pytest.approx(float(extra.detach()) * 6 / 12, rel=1e-5)
    assert list(result.routing) == ["decoder.blocks.0.mlp.router", "decoder.blocks.1.mlp.router"]


def test_dropout_depends_on_seed_step_and_micro_batch_alone() -> None:
    def run(seed: int, step: int, before: int) -> Outcome:
        lm = fresh(dropout=0.3)
        torch.manual_seed(before)
        halves = [tensors(rows([some], tokens=9), lm) for some in random_documents(9, 9)]
        return stepper(lm, seed=seed).update(step, halves, 1.0)

    assert run(1, 5, before=0).norm == run(1, 5, before=99).norm
    assert run(1, 5, 0).norm != run(2, 5, 0).norm
    assert run(1, 5, 0).norm != run(1, 6, 0).norm


@pytest.mark.parametrize("policy", ["selective", "block"])
def test_what_is_computed_again_changes_nothing(policy: str) -> None:
    """Dropout included: the second computation draws what the first drew."""
    kept, again = fresh(dropout=0.3), fresh(dropout=0.3)
    documents = random_documents(9, 7)
    one = stepper(kept).update(0, [tensors(rows(documents, tokens=20), kept)], 1.0)
    two = stepper(again, How(recompute=policy)).update(0, [tensors(rows(documents, tokens=20), again)], 1.0)
    assert one.loss == two.loss
    assert all(torch.equal(weight, weights(again)[name]) for name, weight in weights(kept).items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_a_compiled_net_gives_the_same_update() -> None:
    plain, compiled = fresh(), fresh()
    documents = random_documents(9, 7)
    one = stepper(plain).update(0, [tensors(rows(documents, tokens=20), plain)], 1.0)
    two = stepper(compiled, compiled=torch.compile(compiled.net))
    outcome = two.update(0, [tensors(rows(documents, tokens=20), compiled)], 1.0)
    assert outcome.loss == pytest.approx(one.loss, rel=1e-6)
    for name, weight in weights(plain).items():
        torch.testing.assert_close(weights(compiled)[name], weight, rtol=1e-4, atol=1e-6)


def test_evaluation_drops_nothing() -> None:
    lm = fresh(dropout=0.5)
    batch = tensors(rows(random_documents(9), tokens=9), lm)
    one, two = (float(forward(lm.net, lm.parts, batch, 8, How(), training=False).nll) for _ in range(2))
    assert one == two
    assert float(forward(lm.net, lm.parts, batch, 8, How()).nll) != one


def test_clipping_is_to_the_joint_norm() -> None:
    lm = fresh()
    before = weights(lm)
    outcome = stepper(lm, limit=0.01).update(0, [tensors(rows(random_documents(9), tokens=9), lm)], 1.0)
    moved = math.sqrt(sum(float((before[name] - w).square().sum()) for name, w in weights(lm).items()))
    assert outcome.norm > 0.1
    assert moved == pytest.approx(0.01, rel=1e-4)
    assert outcome.norm == pytest.approx(math.sqrt(sum(norm**2 for norm in outcome.norms.values())))
    assert list(outcome.norms) == ["embed", "decoder.blocks.0", "decoder.blocks.1", "decoder.final_norm", "head.matrix"]


def poison_weight(lm: sc.Model, _: Stepper) -> None:
    with torch.no_grad():
        lm.net.get_parameter("decoder.blocks.1.mlp.up.weight")[0, 0] = math.nan


def poison_activation(lm: sc.Model, _: Stepper) -> None:
    lm.net.get_submodule("decoder.blocks.1.attn.o").register_forward_hook(lambda m, a, out: out * math.inf)


def poison_gradient(lm: sc.Model, _: Stepper) -> None:
    """The gradient that leaves block 1 is not a number: block 0 and the table inherit it."""
    lm.net.get_submodule("decoder.blocks.1.mlp.down").register_full_backward_hook(
        lambda m, grads, out: (grads[0] * math.nan,)
    )


def poison_state(lm: sc.Model, step: Stepper) -> None:
    optimizer = step.optimizers._all[0]
    weight = lm.net.get_parameter("decoder.blocks.0.attn.q.weight")
    optimizer.state[weight]["exp_avg"][0, 0] = math.inf


FAULTS: dict[str, tuple[Callable[[sc.Model, Stepper], None], str]] = {
    "weight": (poison_weight, "the loss is nan: the weight decoder.blocks.1.mlp.up.weight holds"),
    "activation": (poison_activation, "decoder.blocks.1.attn.o gives the first value that is not finite"),
    "gradient": (poison_gradient, "the gradient of decoder.blocks.1 is not finite, and it went first"),
    "state": (poison_state, "the optimizer's decoder.blocks.0.attn.q.weight/exp_avg is not finite"),
}


@pytest.mark.parametrize(
    ("name", "masters"), [*((name, False) for name in FAULTS), *((name, True) for name in FAULTS if name != "state")]
)
def test_what_is_not_finite_stops_before_the_update(name: str, masters: bool) -> None:
    """The weights and the state are those of before, and the place that went wrong first is named."""
    lm = fresh(dtype="bfloat16" if masters else "float32")
    recipe = Recipe()
    optimizers = Optimizers(groups(lm.parts, dict(lm.net.named_parameters()), recipe), recipe, masters)
    step = Stepper(lm, optimizers, How(), 1.0, 0)
    batch = tensors(rows(random_documents(9), tokens=9), lm)
    assert step.update(0, [batch], 1.0).fault is None
    poison, message = FAULTS[name]
    poison(lm, step)
    before, state = weights(lm), {k: v.clone() for k, v in optimizers.state().items()}
    outcome = step.update(1, [batch], 1.0)
    assert outcome.fault is not None
    assert message in outcome.fault
    for key, value in weights(lm).items():
        assert torch.equal(value.nan_to_num(7), before[key].nan_to_num(7))
    for key, value in optimizers.state().items():
        assert torch.equal(value.nan_to_num(7), state[key].nan_to_num(7))
    assert not list(optimizers.gradients())


def test_a_spike_is_refused_and_not_remembered() -> None:
    guard = Guard(3.0)
    assert guard.fault(1000.0) is None
    assert [guard.fault(1.0) for _ in range(50)] == [None] * 50
    assert guard.fault(2.9) is None
    assert "3.2 times its mean" in str(guard.fault(3.3))
    assert guard.fault(1.0) is None
    assert Guard().fault(1e30) is None


def test_a_step_without_a_label_is_none() -> None:
    lm = fresh()
    before = weights(lm)
    outcome = stepper(lm).update(0, [tensors(rows([[5]], tokens=4), lm)], 1.0)
    assert outcome.fault == "no token of the step has a label"
    assert all(torch.equal(w, before[name]) for name, w in weights(lm).items())


def test_smoothing_and_z_loss_are_in_the_objective_alone() -> None:
    lm = fresh()
    batch = tensors(rows(random_documents(9), tokens=9), lm)
    plain = forward(lm.net, lm.parts, batch, 8, How())
    dressed = forward(lm.net, lm.parts, batch, 8, How(Terms(0.1, 1e-2)))
    assert float(plain.nll) == float(dressed.nll)
    assert float(dressed.objective.detach()) > float(plain.objective.detach())


def test_a_head_without_a_vocabulary_is_refused() -> None:
    lm = sc.new("all-minilm-l6-v2", dtype="bfloat16")
    with pytest.raises(sc.ScantlingInputError, match="training needs a head over the vocabulary"):
        forward(lm.net, lm.parts, tensors(rows([[5, 6]], tokens=4), lm), 1, How())
