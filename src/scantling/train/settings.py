"""A card's training section as what the other files of training take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from scantling.cards import Card
from scantling.cards.training import Training, updates
from scantling.data import OBJECTIVES, MaskedLM, Objective, Seq2Seq, SpanCorruption
from scantling.errors import ScantlingInputError
from scantling.model import Model
from scantling.train import lora
from scantling.train.forward import How
from scantling.train.optim import Recipe
from scantling.train.schedule import Schedule
from scantling.train.scoring import Terms

WEIGHTS = {"fp32": "float32", "bf16-mixed": "float32", "bf16-master": "bfloat16", "bf16": "bfloat16"}
"""The dtype of the weights while they compute, by precision."""

_BY_FAMILY = {"decoder": "causal", "encoder": "masked", "encoder-decoder": "seq2seq"}


def objective_of(card: Card, training: Training) -> str:
    """The name of what is predicted."""
    return training.objective or _BY_FAMILY[card.family]


def objective(lm: Model, training: Training) -> Objective:
    """What is predicted; the target of an encoder-decoder begins with what the model says."""
    name = objective_of(lm.card, training)
    if training.whole_words and name != "masked":
        raise ScantlingInputError(f"training.whole_words goes with the objective masked, not with {name}")
    if name == "seq2seq":
        return Seq2Seq(start_id=lm.start_id)
    if name == "masked":
        return MaskedLM(whole_words=training.whole_words)
    if name == "spans":
        return SpanCorruption(start_id=lm.start_id)
    return OBJECTIVES[name]()


def boundary_of(card: Card, training: Training) -> str:
    """How documents are put into rows."""
    packed = objective_of(card, training) in ("causal", "masked")
    return training.boundary or ("packed" if packed else "padded")


def how_of(training: Training) -> How:
    """How the loss is computed."""
    return How(
        Terms(training.label_smoothing, training.z_loss),
        training.router_balance,
        training.router_z,
        training.recompute,
        torch.bfloat16 if training.precision == "bf16-mixed" else None,
        kernel=training.kernel,
    )


def recipe_of(training: Training) -> Recipe:
    """The optimiser and its constants."""
    chosen = training.optimizer
    return Recipe(
        chosen.kind,
        chosen.lr,
        chosen.betas,
        chosen.eps,
        chosen.weight_decay,
        chosen.momentum,
        chosen.decay_embeddings,
    )


def lora_of(training: Training) -> lora.Recipe:
    """The adapters; there must be some."""
    chosen = training.lora
    assert chosen is not None
    alpha = float(chosen.rank) if chosen.alpha is None else chosen.alpha
    return lora.Recipe(chosen.rank, alpha, tuple(chosen.targets), chosen.dropout, training.seed)


def schedule_of(training: Training) -> Schedule:
    """The learning rate's factor by update."""
    chosen, steps = training.schedule, training.steps
    decay = updates(chosen.decay, steps) if chosen.kind == "wsd" else 0
    return Schedule(chosen.kind, steps, updates(chosen.warmup, steps), chosen.final, decay)


def rows_of(card: Card, training: Training) -> list[tuple[int, int]]:
    """Tokens of a row from which update on: the curriculum's stages, then the rest.

    Raises:
        ScantlingInputError: stages out of order, or rows longer than the context.
    """
    starts: list[tuple[int, int]] = []
    begin = 0
    for stage in training.curriculum:
        starts.append((begin, stage.tokens))
        end = round(stage.until * training.steps)
        if end <= begin:
            raise ScantlingInputError(
                f"training.curriculum: the stage of {stage.tokens} tokens ends at update {end} and begins at {begin}"
            )
        begin = end
    starts.append((begin, training.tokens or card.context))
    longest = max(tokens for _, tokens in starts)
    if longest > card.context:
        raise ScantlingInputError(
            f"rows of {longest} tokens are longer than the context of {card.name}, {card.context}"
        )
    return starts


COSMETIC = ("evaluation", "save_every", "keep", "compile", "bad", "parallel")
"""Keys of the section that change no loss of a run."""


def differences(old: dict[str, Any], new: dict[str, Any]) -> Sequence[str]:
    """Keys in which two training sections differ, those without influence on the losses left out."""
    return [key for key in {**old, **new} if key not in COSMETIC and old.get(key) != new.get(key)]
