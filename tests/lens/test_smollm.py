"""SmolLM2-135M-Instruct: its sums, its heads that copy, and a direction; the slow tests take 20 seconds each."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from scantling.lens import (
    Direction,
    HeadScore,
    ablate,
    decompose,
    direction_of,
    edited,
    head_scores,
    means,
    repeated_tokens,
    second_half_loss,
    steering,
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
    """The three best of 270 against three random others, ten draws; each head is replaced by its mean."""
    scores = head_scores(smollm, length=LENGTH, rows=ROWS, seed=0)
    best = sorted(scores, key=lambda s: -s.induction)[:3]
    others = [s for s in scores if s not in best]
    ids = repeated_tokens(smollm, LENGTH, ROWS, seed=5)
    usual = means(smollm, ["decoder.blocks.*.attn:mixed"], repeated_tokens(smollm, LENGTH, ROWS, seed=99))
    plain = float(second_half_loss(smollm, ids, LENGTH))

    def harm(heads: Sequence[HeadScore]) -> float:
        points = [(f"{s.path}:mixed", s.head) for s in heads]
        with edited(smollm, *(ablate(point, heads=[head], value=usual[point]) for point, head in points)):
            return float(second_half_loss(smollm, ids, LENGTH)) - plain

    random_harm = [harm(random.Random(seed).sample(others, 3)) for seed in range(10)]
    assert best[2].induction > 0.5
    assert harm(best) > 1.0
    assert harm(best) > 5 * sum(random_harm) / len(random_harm)


PAIRS = [
    ("I love this movie. It is", "I hate this movie. It is"),
    ("The food was delicious and the service was", "The food was disgusting and the service was"),
    ("What a wonderful day. I feel", "What a horrible day. I feel"),
    ("The book was brilliant. I thought it was", "The book was boring. I thought it was"),
    ("Everyone was happy with the result, which was", "Everyone was unhappy with the result, which was"),
    ("The hotel was clean and lovely. Our stay was", "The hotel was dirty and awful. Our stay was"),
]
STRENGTH = 0.25
PROMPTS = [
    "The concert last night was",
    "My new phone is",
    "I think the weather today is",
    "The teacher said that my essay was",
    "Our trip to the mountains was",
    "The soup in that restaurant is",
    "In my opinion the game was",
    "The neighbours say the new park is",
    "The meeting this morning was",
    "Her performance on stage was",
]


@pytest.mark.slow
def test_a_direction_of_praise_moves_good_against_bad(smollm: Any) -> None:
    """Log-odds of " good" over " bad" after ten prompts that the direction was not made of; a random vector does not.

    Three random vectors of the same length are drawn; what each moves, up or down, is averaged over the prompts.
    """
    good, bad = (smollm.tokenizer.encode(text, add_special=False)[0] for text in (" good", " bad"))
    rows = [smollm.tokenizer.encode(text) for text in PROMPTS]

    def odds() -> torch.Tensor:
        last = torch.stack([smollm.logits(row)[0, -1] for row in rows])
        return last[:, good] - last[:, bad]

    plain = odds()
    found = direction_of(smollm, PAIRS, "decoder.blocks.26")
    with steering(smollm, found, STRENGTH):
        moved = odds() - plain
    assert int((moved >= 1).sum()) >= 8
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn(3, len(found.vector), generator=draw)
    noise = noise / noise.norm(dim=-1, keepdim=True) * found.vector.norm()
    shifts = []
    for vector in noise:
        with steering(smollm, Direction(found.point, vector), STRENGTH):
            shifts.append(odds() - plain)
    assert float(torch.stack(shifts).abs().mean(1).max()) < 0.2
