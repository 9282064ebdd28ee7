"""Models of ours: no false alarm on the recorded ones, on sampled cards, on cards that change one choice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from tests.cards.strategies import any_cards
from tests.cases.small import GPT2, LLAMA, built, card
from tests.conftest import GOLDEN

import scantling as sc
from scantling.audits import Effort, Report, Verdict, examine
from scantling.cards.read import from_dict
from scantling.subjects.named import beside
from scantling.subjects.ours import ours

SOON = ("llama-gqa", "gpt2", "bert", "t5", "mixtral", "gemma2", "llama-rope-dynamic")
NAMES = [
    pytest.param(path.name, marks=[] if path.name in SOON else [pytest.mark.slow])
    for path in sorted((GOLDEN / "tiny").iterdir())
]
MAY_NOT_RUN = {"shift", "accumulation", "quantised", "kept"}
"""A head without a vocabulary has no loss; odd widths have no blocks of 32; encoder-decoders keep nothing in 8 bits."""


def check(report: Report) -> None:
    """No defect, nothing that could not run but what cannot, and rounding well inside what is allowed."""
    assert [(f.probe, f.where, f.message) for f in report.defects] == []
    unable = {f.probe for f in report.findings if f.verdict is Verdict.COULD_NOT_RUN}
    assert unable <= MAY_NOT_RUN
    shares = [f.data.get("share", 0.0) for f in report.findings if f.verdict in (Verdict.CLEAN, Verdict.ROUNDING)]
    assert max(shares) < 1 / 3


@pytest.mark.parametrize("name", NAMES)
def test_no_recorded_model_has_a_defect(name: str) -> None:
    report = examine(ours(sc.load(GOLDEN / "tiny" / name)))
    check(report)
    designed = {f.probe for f in report.findings if f.verdict is Verdict.BY_DESIGN}
    if name == "gpt2":
        assert designed == {"padding"}
    if name == "llama-rope-dynamic":
        assert {"padding", "cache", "chunks"} <= designed
    if name in ("gemma2", "mistral-swa"):
        assert [f.verdict for f in report.of("window") if f.unit == "keys"] == [Verdict.CLEAN]
    if name == "t5":
        assert {f.verdict for f in report.of("source")} <= {Verdict.CLEAN, Verdict.ROUNDING}


@pytest.mark.slow
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(any_cards())
def test_no_sampled_card_has_a_defect(drawn: dict[str, Any]) -> None:
    # Narrower streams are all alike after a norm.
    assume(drawn["d_model"] >= 6 and ((drawn.get("embedding") or {}).get("width") or 6) >= 6)
    asked = {**drawn, "context": max(drawn["context"], 32), "vocab_size": max(drawn["vocab_size"], 9)}
    lm = sc.new(from_dict(asked, "sampled"))
    with torch.no_grad():
        for weight in lm.net.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) * 0.2)
    report = examine(ours(lm), effort=Effort(tokens=9, longest=20))
    assert [(f.probe, f.where, f.message) for f in report.defects] == []


def test_an_encoder_of_chosen_positions_may_read_one_way() -> None:
    """With 22 apart and the last 16 of each before it, the first rows of a short text are read by later ones only."""
    stride = {"every": 22, "last": 16}
    encoder = card(LLAMA, family="encoder", attention={"stride": stride}, head={"kind": "none"})
    report = examine(ours(built(encoder)), ["future"], Effort(tokens=9, longest=20))
    assert [f.verdict for f in report.findings] == [Verdict.NOT_APPLICABLE]


def test_positions_that_no_token_can_tell_apart_are_none() -> None:
    """Where each of a few tokens sees itself alone, a turn of both q and k moves the logits by rounding only."""
    report = examine(ours(built(card(LLAMA, attention={"stride": {"every": 11}, "sinks": True}))), ["places"])
    assert [f.verdict for f in report.findings] == [Verdict.NOT_APPLICABLE]


@pytest.mark.parametrize(("base", "changes"), [(GPT2, {}), (LLAMA, {"attention": {"window": 5}}), (LLAMA, {})])
def test_another_net_beside_its_card(base: dict[str, object], changes: dict[str, object]) -> None:
    """A model of other weights in place of the reference is a defect; the same weights are none."""
    lm = built(card(base, **changes))
    same, other = ours(built(card(base, **changes))), ours(built(card(base, **changes), seed=1))
    assert examine(beside(ours(lm), same), ["reference"]).defects == []
    assert len(examine(beside(ours(lm), other), ["reference"]).defects) == 3


def test_a_wrong_window_in_the_card_is_found() -> None:
    """The card says 5, the layers were built with 6: one key more."""
    lm = built(card(attention={"window": 6}))
    subject = ours(lm).without(windows=(5, 5))
    (first, second) = [f for f in examine(subject, ["window"]).defects if f.unit == "keys"]
    assert (first.size, second.size) == (1.0, 1.0)
    assert "6 keys back, its own included, where the window says 5" in first.message


def test_weights_are_as_before_and_so_are_their_flags(tmp_path: Path) -> None:
    lm = sc.load(GOLDEN / "tiny" / "llama-gqa")
    before = {name: p.clone() for name, p in lm.net.named_parameters()}
    flags = {name: p.requires_grad for name, p in lm.net.named_parameters()}
    examine(ours(lm))
    assert all(torch.equal(before[name], p) for name, p in lm.net.named_parameters())
    assert {name: p.requires_grad for name, p in lm.net.named_parameters()} == flags
    assert all(p.grad is None for p in lm.net.parameters())
