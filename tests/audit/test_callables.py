"""Callables of others: a decoder without mask and positions, numpy, signatures, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import scantling as sc
from scantling.audits import Effort, Facts, Verdict, examine, from_callable
from scantling.audits.planted_subject import planted


class Block(nn.Module):
    """Norm, attention without a mask, residual; norm, MLP, residual."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = nn.MultiheadAttention(d, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x: Tensor) -> Tensor:
        h = self.ln1(x)
        x = x + self.attn(h, h, h)[0]
        return x + self.mlp(self.ln2(x))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """A stack that is meant to predict the next token, with neither a causal mask nor positions."""

    def __init__(self, vocab_size: int, d: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, d)
        self.blocks = nn.ModuleList(Block(d, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocab_size, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def report() -> Any:
    torch.manual_seed(0)
    return sc.audit(Decoder(1000, 64, 4, 2).eval(), vocab_size=1000)


def test_a_decoder_without_mask_and_positions_is_guilty_of_both(report: Any) -> None:
    assert {f.probe for f in report.defects} == {"future", "order"}
    (order,) = report.of("order")
    assert "order of tokens does not reach the output" in order.message
    for finding in report.of("future"):
        assert finding.verdict is Verdict.DEFECT
        assert len(finding.smallest["ids"]) == 2


def test_what_a_callable_cannot_do_is_said_and_not_passed_over(report: Any) -> None:
    unable = {f.probe for f in report.findings if f.verdict is Verdict.COULD_NOT_RUN}
    assert {"padding", "packing", "cache", "chunks", "reload", "kernels"} <= unable
    assert report.of("neighbours")[0].verdict in (Verdict.CLEAN, Verdict.ROUNDING)


def test_a_function_of_numpy_is_asked_too() -> None:
    """A table of the next token: causal, and a bag of words to the order probe."""
    table = np.random.default_rng(0).normal(size=(50, 50))
    told = sc.audit(lambda ids: table[ids.numpy()], vocab_size=50, probes=["future", "neighbours", "order"])
    assert [f.verdict for f in told.of("future")] == [Verdict.CLEAN]
    assert [f.verdict for f in told.of("neighbours")] == [Verdict.CLEAN]
    assert [f.probe for f in told.defects] == ["order"]
    said = sc.audit(lambda ids: table[ids.numpy()], facts=Facts(50, position="none"), probes=["order"])
    assert [f.verdict for f in said.findings] == [Verdict.BY_DESIGN]


def test_arguments_are_found_by_their_names() -> None:
    def masked(ids: Tensor, attention_mask: Any = None, position_ids: Any = None) -> Any:
        x = torch.nn.functional.one_hot(ids, 20).float()
        return {"logits": x} and (x * (1 if attention_mask is None else attention_mask[..., None]),)

    def packed(ids: Tensor, document_ids: Any = None) -> Tensor:
        return torch.nn.functional.one_hot(ids, 20).float()

    assert from_callable(masked, Facts(20)).can.takes == {"mask", "positions"}
    assert from_callable(packed, Facts(20)).can.takes == frozenset()
    assert list(from_callable(packed, Facts(20)).can.packed) == ["document_ids"]
    assert [f.verdict for f in sc.audit(packed, vocab_size=20, probes=["packing"]).findings] == [Verdict.CLEAN]


@pytest.mark.parametrize(
    ("call", "named", "says"),
    [
        (3, {"vocab_size": 9}, "a callable of ids is needed"),
        (lambda ids: ids, {}, "vocab_size is missing"),
        (lambda ids: ids, {"vocab_size": 2}, "at least 4 different tokens"),
        (lambda ids: ids, {"vocab_size": 9, "tokens": 2}, "at least 4"),
        (lambda ids: ids, {"vocab_size": 9, "tokens": 50, "longest": 20}, "no less than tokens"),
        (lambda ids: ids, {"vocab_size": 9, "probes": ["futur"]}, "did you mean 'future'"),
    ],
)
def test_bad_calls_get_one_sentence(call: Any, named: dict[str, Any], says: str) -> None:
    with pytest.raises(sc.ScantlingInputError, match=says):
        sc.audit(call, **named)


def test_logits_of_another_shape_are_refused_in_the_finding() -> None:
    told = sc.audit(lambda ids: ids, vocab_size=9, probes=["future"])
    assert [f.verdict for f in told.findings] == [Verdict.COULD_NOT_RUN]
    assert "logits (B, T, V) are needed" in told.findings[0].message


def test_a_model_that_crashes_has_a_defect() -> None:
    def broken(ids: Tensor) -> Tensor:
        raise KeyError("weights")

    told = sc.audit(broken, vocab_size=9, probes=["future", "neighbours"])
    assert {f.probe for f in told.defects} == {"future", "neighbours"}
    assert all("it crashes: KeyError" in f.message for f in told.defects)


def test_modes_of_a_module_are_put_back() -> None:
    net = Decoder(50, 16, 2, 1)
    net.eval()
    net.blocks[0].train()
    before = {m: m.training for m in net.modules()}
    sc.audit(net, vocab_size=50, probes=["future", "repeat"])
    assert {m: m.training for m in net.modules()} == before
    assert all(p.requires_grad for p in net.parameters())


@pytest.mark.parametrize("family", ["decoder", "encoder", "encoder-decoder"])
@pytest.mark.parametrize(("context", "named"), [(12, True), (12, False), (20, True), (11, True)])
def test_short_tables_of_positions(context: int, named: bool, family: str) -> None:
    """Rows stay within the table; below what an audit needs, that is said."""
    subject = planted(position="learned", context=context, trained_length=context, family=family)
    told = examine(subject if named else subject.without(position=None))
    assert [(f.probe, f.where, f.message) for f in told.defects] == []
    said = {f.verdict for f in told.findings}
    assert said == {Verdict.COULD_NOT_RUN} if context < 12 else Verdict.CLEAN in said


@pytest.mark.parametrize("tokens", [4, 5, 40])
def test_rows_of_other_lengths(tokens: int) -> None:
    told = examine(planted(window=3), effort=Effort(tokens=tokens, longest=max(tokens, 48)))
    assert [(f.probe, f.where, f.message) for f in told.defects] == []
