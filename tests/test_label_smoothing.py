"""The loss under smoothed labels: torch's, and the formula of arXiv:1512.00567, section 7."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.conftest import GOLDEN

import scantling as sc

TINY = GOLDEN / "tiny"
IGNORED = -100


def formula(logits: torch.Tensor, labels: torch.Tensor, smoothing: float) -> float:
    """H(q', p) with q'(k) = (1 - e) [k = y] + e / K, averaged over what is judged, one position after another."""
    losses = []
    for scores, label in zip(logits.double().flatten(0, 1), labels.flatten(), strict=True):
        if int(label) == IGNORED:
            continue
        log_p = scores - scores.exp().sum().log()
        q = torch.full_like(log_p, smoothing / len(log_p))
        q[label] += 1 - smoothing
        losses.append(float(-(q * log_p).sum()))
    return sum(losses) / len(losses)


def case(name: str) -> tuple[sc.Model, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A tiny model, ids and labels for `loss`, and the logits and labels that are compared."""
    lm = sc.load(TINY / name)
    draws = torch.Generator().manual_seed(5)
    ids, labels = torch.randint(3, 131, (2, 2, 9), generator=draws)
    labels[0, 4] = labels[1, 7:] = IGNORED
    if lm.card.family == "encoder-decoder":
        before = torch.cat([torch.full((2, 1), lm.start_id), labels[:, :-1]], 1).clamp(min=0)
        return lm, ids, labels, lm.logits(ids, decoder_ids=before), labels
    logits = lm.logits(ids)
    return (
        (lm, ids, labels, logits[:, :-1], labels[:, 1:])
        if lm.card.family == "decoder"
        else (lm, ids, labels, logits, labels)
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("name", ["llama-gqa", "bert", "t5", "marian"])
def test_torchs_definition_and_the_papers(name: str, smoothing: float) -> None:
    lm, ids, labels, logits, wanted = case(name)
    found = float(lm.loss(ids, labels, label_smoothing=smoothing))
    theirs = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), label_smoothing=smoothing)
    assert found == pytest.approx(float(theirs), abs=1e-6)
    assert found == pytest.approx(formula(logits, wanted, smoothing), abs=1e-5)
    assert (found == pytest.approx(float(lm.loss(ids, labels)), abs=1e-4)) == (smoothing == 0)


@pytest.mark.parametrize("smoothing", [-0.1, 1.5, float("nan"), "0.1", True, None])
def test_a_smoothing_out_of_range_is_refused(smoothing: Any) -> None:
    lm = sc.load(TINY / "bert")
    with pytest.raises(sc.ScantlingInputError, match=r"label_smoothing is .*; a number from 0 to 1 is needed"):
        lm.loss([[1, 2]], [[1, 2]], label_smoothing=smoothing)


def test_an_encoder_decoder_whose_target_has_no_beginning_cannot_be_judged() -> None:
    lm = replace(sc.load(TINY / "t5"), start_id=None)
    with pytest.raises(sc.ScantlingInputError, match="decoder_start_token_id"):
        lm.loss([[1, 2]], [[1, 2]])
