"""Cases that an audit finds, or lets pass, in the models of others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.cases.small import LLAMA, built, card
from torch import Tensor, nn

import scantling as sc
from scantling.audits import Abilities, Facts, Feed, Subject, Verdict, examine
from scantling.subjects.ours import ours

FINE = {Verdict.CLEAN, Verdict.ROUNDING}


class Attention(nn.Module):
    """One layer over a table: torch's attention, with what is cached before it."""

    def __init__(self, aligned: bool, dropout: float = 0.0, checks: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.qkv = nn.Embedding(50, 32), nn.Linear(32, 96, bias=False)
        self.head = nn.Linear(32, 50, bias=False)
        self.aligned, self.dropout, self.checks = aligned, dropout, checks

    def forward(self, ids: Tensor, past: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(self.embed(ids if past is None else torch.cat([past, ids], 1))).chunk(3, -1)
        new, keys = ids.shape[1], q.shape[1]
        q = q[:, -new:]
        dropped = self.dropout if self.training or not self.checks else 0.0
        if self.aligned:
            seen = torch.ones(new, keys, dtype=torch.bool).tril(keys - new)
            mixed = F.scaled_dot_product_attention(q, k, v, seen, dropped)
        else:
            # torch aligns this flag at the first key.
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropped, is_causal=True)
        return self.head(self.embed(ids) + mixed)  # type: ignore[no-any-return]


def over_a_cache(net: Attention) -> Subject:
    def cached(feed: Feed, pieces: Any) -> Tensor:
        outs, start = [], 0
        for n in pieces:
            outs.append(net(feed.ids[:, start : start + n], feed.ids[:, :start]))
            start += n
        return torch.cat(outs, 1)

    can = Abilities(module=net, cached={"ids": cached})
    return Subject("attention", lambda feed: net(feed.ids), Facts(50, position="none"), can)


def test_a_triangle_aligned_at_the_first_key_is_found_over_a_cache() -> None:
    """MASK-01: is_causal with fewer queries than keys; one pass is right, a cached token sees the first key only."""
    for aligned in (True, False):
        told = examine(over_a_cache(Attention(aligned).eval()), ["future", "cache", "chunks"])
        assert {f.verdict for f in told.of("future")} <= FINE
        assert {f.probe for f in told.defects} == (set() if aligned else {"cache", "chunks"})


def test_dropout_of_a_function_that_ignores_the_mode_is_found() -> None:
    """NUM-19: dropout_p is constant, so it drops in evaluation."""
    for checks in (True, False):
        told = examine(over_a_cache(Attention(True, 0.5, checks).eval()), ["repeat"])
        assert {f.where for f in told.defects} == (set() if checks else {"twice"})


@pytest.mark.parametrize(("dtype", "fault"), [("float32", False), ("bfloat16", False), ("bfloat16", True)])
def test_16_bits_over_a_cache_are_rounding_where_float32_agrees(dtype: str, fault: bool) -> None:
    """CACHE-02: rounding in bfloat16 is told from a fault in bfloat16."""
    subject = ours(built(card(LLAMA, n_layers=4), dtype))
    if fault:
        late = {name: _one_late(way) for name, way in subject.can.cached.items()}
        from dataclasses import replace

        subject = replace(subject, can=replace(subject.can, cached=late, cast=None))
    told = examine(subject, ["cache"])
    said = {f.verdict for f in told.findings}
    assert said == ({Verdict.DEFECT} if fault else {Verdict.ROUNDING})


def _one_late(way: Any) -> Any:
    """The logits of the token before, as an off-by-one in a cache gives."""
    return lambda feed, pieces: way(feed, pieces).roll(1, 1)


@pytest.mark.parametrize("offset", [1, 2, 0])
def test_the_offset_of_a_trained_model_is_reported(offset: int) -> None:
    """TRAIN-05: a model of the sequence 1, 2, 3 ... trained to convergence on labels that are shifted this often."""
    torch.manual_seed(0)
    table = nn.Embedding(40, 40)
    ids = torch.arange(200)[None] % 40
    step = torch.optim.Adam(table.parameters(), 0.3)
    for _ in range(60):
        logits = table(ids[:, : 200 - offset])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, offset:].flatten())
        step.zero_grad()
        loss.backward()
        step.step()
    subject = Subject("a count", lambda feed: table(feed.ids), Facts(40), Abilities(module=table, sample=ids[:, :60]))
    told = [f for f in examine(subject, ["shift"]).findings if f.where == "on text"]
    assert [f.verdict for f in told] == [Verdict.CLEAN if offset == 1 else Verdict.DEFECT]
    by_offset = told[0].data["loss by offset"]
    assert min(by_offset, key=by_offset.get) == str(offset)


def test_packed_rows_of_ours_are_apart_and_their_boundary_is_not_judged() -> None:
    """MASK-06, MASK-08: another first document does not move the second, and no target crosses the boundary."""
    told = examine(ours(built(card())), ["packing"])
    assert told.defects == []
    assert {where for f in told.findings for where in f.where.split("; ")} == {"document_ids", "loss"}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("lost", ["never", "with dropout"])
def test_a_mask_that_goes_with_dropout_is_found(dropout: float, lost: str) -> None:
    """MASK-15: the cells of the matrix: with and without dropout, in training and not, under one seed."""
    torch.manual_seed(0)

    class Net(Attention):
        def forward(self, ids: Tensor, past: Tensor | None = None) -> Tensor:
            if lost == "never" or not self.training or not self.dropout:
                return super().forward(ids, past)
            x = self.embed(ids)
            q, k, v = self.qkv(x).chunk(3, -1)
            return self.head(x + F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout))  # type: ignore[no-any-return]

    told = sc.audit(Net(True, dropout).eval(), vocab_size=50, probes=["future"])
    guilty = lost == "with dropout" and dropout > 0
    assert {f.where.partition(";")[0] for f in told.defects} == ({"in training"} if guilty else set())


def test_a_denominator_of_the_whole_step_is_no_defect() -> None:
    """FALSE-05: micro-batches of 2 and 9 tokens: 11 in both is right, and dividing each by its own number is not."""

    def loss(own: bool) -> Any:
        def of(feed: Feed, labels: Tensor, items: int | None = None) -> Tensor:
            logits, wanted = lm.net(feed.ids)[:, :-1], labels[:, 1:]
            total = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")
            return total / ((wanted != -100).sum() if items is None or own else items)

        return of

    lm = built(card())
    for own in (False, True):
        can = Abilities(module=lm.net, loss=loss(own), counts_items=True)
        subject = Subject("loss", lambda feed: lm.net(feed.ids), Facts(lm.card.vocab_size), can)
        told = examine(subject, ["accumulation"])
        guilty = {"micro-batches", "gradients of micro-batches"} if own else set()
        assert {f.where for f in told.defects} == guilty


def test_logits_that_differ_by_a_constant_per_row_are_by_design() -> None:
    """FALSE-06: the same model with a centred head."""
    from scantling.subjects.named import beside

    lm, centred = built(card()), built(card())
    with torch.no_grad():
        head: Any = centred.net.get_parameter("head.matrix.weight")
        head.sub_(head.mean(0))
    told = examine(beside(ours(lm), ours(centred)), ["reference"])
    assert {f.verdict for f in told.findings} == {Verdict.BY_DESIGN}
    assert {f.message for f in told.findings} == {
        "logits differ by a constant per position, which no probability shows"
    }


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_first_module_that_overflows_is_named_with_advice(dtype: str) -> None:
    """NUM-13: a down projection past 65,504; float16 loses it, bfloat16 and float32 do not."""
    lm = built(card(), dtype)
    with torch.no_grad():
        down: Any = lm.net.get_parameter("decoder.blocks.1.mlp.down.weight")
        down.mul_(6e4 if dtype == "float32" else 3e4)
    told = {f.where.partition(";")[0]: f for f in examine(ours(lm), ["precision"]).findings}
    found = told["float16"]
    assert found.verdict is (Verdict.DEFECT if dtype == "float16" else Verdict.BY_DESIGN)
    assert "decoder.blocks.1.mlp.down" in found.message
    assert "bfloat16 has float32's range" in found.message
    assert told["bfloat16"].verdict is Verdict.ROUNDING
