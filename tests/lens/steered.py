"""A direction of number, made of sentences, and what it and random vectors move in ten others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scantling.lens import Direction, direction_of, steering

PAIRS = [
    ("The dogs in the garden", "The dog in the garden"),
    ("My brothers", "My brother"),
    ("The keys on the table", "The key on the table"),
    ("The students of the school", "The student of the school"),
    ("The houses on the hill", "The house on the hill"),
    ("The rivers of this land", "The river of this land"),
    ("Her answers", "Her answer"),
    ("The books that I read", "The book that I read"),
    ("Two men from the village", "A man from the village"),
    ("The lamps above the door", "The lamp above the door"),
    ("Our children", "Our child"),
    ("The letters from my aunt", "The letter from my aunt"),
]
PROMPTS = [
    "The sheep in the field",
    "The fish in the lake",
    "The deer near the road",
    "The series on television",
    "The team from the north",
    "The police in this town",
    "The aircraft over the sea",
    "The crew of the ship",
    "The salmon in the river",
    "The family next door",
]
"""Subjects that are one or many."""
MANY, ONE = " are", " is"
POINT, STRENGTH, RANDOM = "decoder.blocks.26", 0.165, 8


@dataclass(frozen=True)
class Steered:
    """Log-odds of the plural's verb in nats (10), and what was added: by the direction (10), by each vector (8, 10)."""

    plain: Tensor
    moved: Tensor
    shifts: Tensor


def steered(smollm: Any) -> Steered:
    """The direction at a strength, and vectors of its length drawn with seed 0, added in the same way."""
    many, one = (smollm.tokenizer.encode(text, add_special=False) for text in (MANY, ONE))
    assert len(many) == len(one) == 1
    rows = [smollm.tokenizer.encode(text) for text in PROMPTS]

    def odds(direction: Direction | None = None) -> Tensor:
        if direction is not None:
            with steering(smollm, direction, STRENGTH):
                return odds()
        last = torch.stack([smollm.logits(row)[0, -1] for row in rows])
        return last[:, many[0]] - last[:, one[0]]

    plain, found = odds(), direction_of(smollm, PAIRS, POINT)
    noise = torch.randn(RANDOM, len(found.vector), generator=torch.Generator().manual_seed(0))
    noise = noise / noise.norm(dim=-1, keepdim=True) * found.vector.norm()
    shifts = [odds(Direction(found.point, vector)) - plain for vector in noise]
    return Steered(plain, odds(found) - plain, torch.stack(shifts))


def table(found: Steered) -> str:
    """The figures in Markdown, a prompt a row."""
    rows = zip(PROMPTS, found.plain, found.moved, found.shifts.abs().amax(0), strict=True)
    lines = [f"| {text} | {plain:.2f} | {moved:+.2f} | {most:.2f} |" for text, plain, moved, most in rows]
    return "\n".join(
        [f"| prompt | log-odds | direction | {RANDOM} random vectors, at most |", "|---|---:|---:|---:|", *lines]
    )
