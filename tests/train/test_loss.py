"""The loss in pieces against torch's own, in value and in gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import scantling as sc
from scantling.tensor.context import Context
from scantling.train.loss import judge
from scantling.train.scoring import Scoring, Terms


def problem(n: int = 23, d: int = 5, v: int = 11, extra: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    draw = torch.Generator().manual_seed(n * 1000 + v)
    hidden = torch.randn(n, d, generator=draw, dtype=dtype, requires_grad=True)
    weight = torch.randn(v + extra, d, generator=draw, dtype=dtype, requires_grad=True)
    bias = torch.randn(v + extra, generator=draw, dtype=dtype, requires_grad=True)
    labels = torch.randint(v, (n,), generator=draw)
    labels[::4] = -100
    return hidden, weight, bias, labels


def reference(hidden: Any, weight: Any, bias: Any, labels: Any, v: int, cap: float | None, e: float, z: float) -> Any:
    """Written from the formulas, over the judged rows alone."""
    kept = labels != -100
    x = hidden[kept] @ weight[:v].T + (0 if bias is None else bias[:v])
    if cap is not None:
        x = cap * torch.tanh(x / cap)
    p = x.log_softmax(-1)
    right = p.gather(-1, labels[kept][:, None])[:, 0]
    return (-(1 - e) * right - e * p.mean(-1) + z * torch.logsumexp(x, -1) ** 2).sum()


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 40),
    v=st.integers(1, 20),
    extra=st.integers(0, 4),
    rows=st.integers(1, 50),
    cap=st.sampled_from([None, 3.0]),
    e=st.sampled_from([0.0, 0.1, 1.0]),
    z=st.sampled_from([0.0, 1e-2]),
    biased=st.booleans(),
)
def test_pieces_of_any_size_equal_the_formula(
    n: int, v: int, extra: int, rows: int, cap: float | None, e: float, z: float, biased: bool
) -> None:
    hidden, weight, bias, labels = problem(n, 5, v, extra, torch.float64)
    bias = bias if biased else None
    inputs = [hidden, weight, *([bias] if biased else [])]
    wanted = reference(hidden, weight, bias, labels, v, cap, e, z) / 7
    judged = judge(hidden, labels, Scoring(weight, bias, v, cap), 7, Terms(e, z), rows)
    torch.testing.assert_close(judged.objective, wanted, rtol=1e-12, atol=1e-12)
    if not bool((labels != -100).any()):
        assert float(judged.objective.detach()) == 0
        return
    ours, theirs = (torch.autograd.grad(loss, inputs) for loss in (judged.objective, wanted))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_gradients_against_finite_differences() -> None:
    hidden, weight, bias, labels = problem(9, 4, 7, 2, torch.float64)

    def loss(h: Any, w: Any, b: Any) -> Any:
        return 3.0 * judge(h, labels, Scoring(w, b, 7, 2.0), 5, Terms(0.1, 1e-2), rows=4).objective

    assert torch.autograd.gradcheck(loss, (hidden, weight, bias))


@pytest.mark.parametrize("rows", [32, 1024, 4095, 5000])
def test_float32_equals_torch(rows: int) -> None:
    hidden, weight, _, labels = problem(4096, 16, 11)
    labels[64:96] = -100
    mean = F.cross_entropy(hidden.double() @ weight.double().T, labels)
    count = int((labels != -100).sum())
    judged = judge(hidden, labels, Scoring(weight, None, 11), count, rows=rows)
    assert float(judged.objective.detach()) == pytest.approx(float(mean.detach()), rel=1e-6)
    assert float(judged.nll) / count == pytest.approx(float(mean.detach()), rel=1e-6)
    ours, theirs = (torch.autograd.grad(loss, [hidden, weight]) for loss in (judged.objective, mean))
    for a, b in zip(ours, theirs, strict=True):
        assert float((a - b).norm() / b.norm()) < 1e-6


def test_the_bare_sum_has_neither_smoothing_nor_z_loss() -> None:
    hidden, weight, bias, labels = problem()
    scoring = Scoring(weight, bias, 11)
    with torch.no_grad():
        bare = judge(hidden, labels, scoring, 1).nll
        dressed = judge(hidden, labels, scoring, 1, Terms(0.2, 0.1))
    wanted = F.cross_entropy(hidden @ weight.T + bias, labels, reduction="sum")
    torch.testing.assert_close(bare.float(), wanted.detach())
    torch.testing.assert_close(dressed.nll, bare)
    assert float(dressed.objective) > float(bare)


def test_autocast_rounds_as_the_plain_loss_under_autocast() -> None:
    hidden, weight, _, labels = problem(300, 32, 50)
    gradients = []
    for plain in (True, False):
        with torch.autocast("cpu", torch.bfloat16):
            loss = judge(hidden, labels, Scoring(weight, None, 50), 10, rows=64, plain=plain).objective
        gradients.append((loss, *torch.autograd.grad(loss, [hidden, weight])))
    assert gradients[1][2].dtype == torch.float32
    torch.testing.assert_close(gradients[0][0], gradients[1][0], rtol=1e-6, atol=0)
    for a, b in zip(gradients[0][1:], gradients[1][1:], strict=True):
        assert float((a - b).norm() / b.norm()) < 1e-2


def test_no_tensor_of_all_logits_is_made() -> None:
    """A piece of 64 rows of 1,000 scores; all of them would be 2,048 rows."""
    hidden, weight, _, labels = problem(2048, 8, 1000)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.untyped_storage().nbytes() // out.element_size())
            return out

    with Watch():
        judge(hidden, labels, Scoring(weight, None, 1000), 1, rows=64).objective.backward()
    assert largest == 64 * 1000


HEADS = {
    "tied": {"tied": True},
    "own": {"tied": False},
    "bias": {"tied": True, "head": {"bias": True}},
    "padded": {"tied": False, "embedding": {"vocab_multiple": 64}},
    "scaled": {"tied": True, "head": {"scale": 0.25, "softcap": 5.0}, "embedding": {"scale": 4.0}},
    "transform": {"tied": False, "head": {"transform": {"act": "gelu", "norm": True}}},
    "narrow": {"tied": True, "embedding": {"width": 16}},
}


@pytest.mark.parametrize("name", list(HEADS))
def test_every_head_gives_the_loss_of_its_logits(name: str) -> None:
    from scantling.cards.read import from_dict

    card = {
        "name": "x",
        "family": "decoder",
        "n_layers": 1,
        "d_model": 32,
        "vocab_size": 100,
        "context": 16,
        "attention": {"kind": "multi_head", "n_heads": 2},
        "position": {"kind": "rope", "theta": 10000.0},
        "norm": {"kind": "rmsnorm", "eps": 1e-5, "at": ["in"]},
        "mlp": {"kind": "plain", "act": "gelu", "d_ff": 64},
    }
    lm = sc.new(from_dict(card | HEADS[name], "x"), seed=3)
    ids = torch.randint(100, (2, 9), generator=torch.Generator().manual_seed(0))
    labels = torch.cat([ids[:, 1:], torch.full((2, 1), -100)], 1)
    wanted = F.cross_entropy(lm.net(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    wanted.backward()
    theirs = {n: p.grad.clone() for n, p in lm.net.named_parameters()}
    lm.net.zero_grad()
    hidden = lm.net(ids, Context.of(ids, before_scores=True))
    head, net = lm.parts.head, lm.net
    weight, bias = head.matrix(net.head, net.embed.weight)
    loss = judge(hidden, labels, Scoring(weight, bias, 100, head.softcap), 16, rows=5).objective
    loss.backward()
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6)
    for n, p in lm.net.named_parameters():
        torch.testing.assert_close(p.grad, theirs[n], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"count": 0}, "at least one judged token"),
        ({"rows": 0}, "a piece of 0 rows"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, "one label a vector"),
    ],
)
def test_refusals(what: dict[str, Any], message: str) -> None:
    hidden, weight, _, labels = problem()
    given_ = {"labels": labels, "count": 1.0, "rows": None} | what
    with pytest.raises(sc.ScantlingInputError, match=message):
        judge(hidden, given_["labels"], Scoring(weight, None, 11), given_["count"], rows=given_["rows"])


@pytest.mark.parametrize("terms", [{"label_smoothing": 1.5}, {"z_loss": -1.0}, {"z_loss": float("nan")}])
def test_terms_out_of_range(terms: dict[str, float]) -> None:
    with pytest.raises(sc.ScantlingInputError, match="is needed"):
        Terms(**terms)
