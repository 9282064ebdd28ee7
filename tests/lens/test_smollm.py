"""SmolLM2-135M-Instruct: its sums, its heads that copy, and a direction; the slow tests take 20 seconds each."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from tests.lens.page import PATH, STEERED, pieces
from tests.lens.steered import steered, table

from scantling.lens import (
    HeadScore,
    ablate,
    decompose,
    edited,
    head_scores,
    means,
    repeated_tokens,
    second_half_loss,
)
from scantling.lens.attribution import matrix_of

LENGTH, ROWS = 30, 2


def test_the_terms_add_up_to_every_logit_at_every_token(smollm: Any) -> None:
    """301 terms: the embeddings, 30 x 9 heads and 30 MLPs."""
    ids = smollm.tokenizer.encode("The capital of France is")
    found = decompose(smollm, ids, by_head=True)
    matrix, shift = matrix_of(smollm)
    assert shift is None
    assert len(found.terms) == 1 + 30 * 9 + 30
    sums = found.values.sum(0) @ matrix.double().T
    assert float((sums - smollm.logits(ids)).abs().max()) < 1e-4


@pytest.mark.slow
def test_heads_that_read_after_the_first_occurrence_carry_the_copying(smollm: Any) -> None:
    """The three best of 270 against three random others, 16 draws; heads are replaced by their means, then by zeros."""
    scores = head_scores(smollm, length=LENGTH, rows=ROWS, seed=0)
    best = sorted(scores, key=lambda s: -s.induction)[:3]
    others = [s for s in scores if s not in best]
    ids = repeated_tokens(smollm, LENGTH, ROWS, seed=5)
    usual = means(smollm, ["decoder.blocks.*.attn:mixed"], repeated_tokens(smollm, LENGTH, ROWS, seed=99))
    plain = float(second_half_loss(smollm, ids, LENGTH))

    def harm(heads: Sequence[HeadScore], by_means: bool) -> float:
        points = [(f"{s.path}:mixed", s.head) for s in heads]
        values = [usual[point] if by_means else 0.0 for point, _ in points]
        changes = [ablate(at, heads=[head], value=value) for (at, head), value in zip(points, values, strict=True)]
        with edited(smollm, *changes):
            return float(second_half_loss(smollm, ids, LENGTH)) - plain

    assert best[2].induction > 0.5
    drawn = [random.Random(seed).sample(others, 3) for seed in range(16)]
    for by_means in (True, False):
        worst = harm(best, by_means)
        assert worst > 1.0
        assert worst > 5 * sum(harm(heads, by_means) for heads in drawn) / len(drawn)


@pytest.mark.slow
def test_a_direction_of_number_moves_verbs_and_random_vectors_do_not(smollm: Any) -> None:
    """Log-odds of " are" over " is" after ten subjects that the direction was not made of: by at least 1 nat in eight.

    Eight random vectors of the same length move it by less than 0.2, up or down, at every prompt.
    """
    found = steered(smollm)
    assert int((found.moved >= 1).sum()) >= 8
    assert found.shifts.shape == (8, 10)
    assert float(found.shifts.abs().max()) < 0.2
    printed = STEERED.search(PATH.read_text(encoding="utf-8"))
    assert printed is not None
    words, numbers = pieces(printed[0])
    wanted_words, wanted = pieces(table(found))
    assert words == wanted_words
    assert numbers == pytest.approx(wanted, abs=0.011)
