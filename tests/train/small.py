"""What tests of training share: small nets with dropout, micro-batches by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tests.cases.small import LLAMA

import scantling as sc
from scantling.cards.read import from_dict
from scantling.train.forward import Inputs, inputs

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Batch:
    """Rows as the data gives them."""

    ids: Any
    labels: Any
    document_ids: Any
    position_ids: Any
    attention_mask: Any
    prefix_lengths: Any = None
    decoder_ids: Any = None
    cursor: dict[str, Any] = field(default_factory=dict)


def rows(*documents: list[list[int]], tokens: int, pad: int = 0) -> Batch:
    """A row for each argument, which is a list of documents; labels are what follows in the same document."""
    shape = (len(documents), tokens)
    ids, labels = np.full(shape, pad), np.full(shape, -100)
    numbers, places, mask = np.zeros(shape, int), np.zeros(shape, int), np.zeros(shape, bool)
    for row, some in enumerate(documents):
        at = 0
        for number, document in enumerate(some):
            end = at + len(document)
            ids[row, at:end] = document
            labels[row, at : end - 1] = document[1:]
            numbers[row, at:end], places[row, at:end], mask[row, at:end] = number, range(len(document)), True
            numbers[row, end:], places[row, end:] = number + 1, range(tokens - end)
            at = end
    return Batch(ids, labels, numbers, places, mask)


def random_documents(*lengths: int, seed: int = 0, vocab: int = 64) -> list[list[int]]:
    """Documents of those lengths, without id 0."""
    draw = np.random.default_rng(seed)
    return [draw.integers(1, vocab, n).tolist() for n in lengths]


def tensors(batch: Batch, lm: sc.Model) -> Inputs:
    return inputs(batch, lm.parts, CPU)


def fresh(dropout: float = 0.0, seed: int = 0, dtype: str = "float32", **changes: Any) -> sc.Model:
    """A small net; a section of `changes` that names its kind takes the place of the card's own."""
    if dropout:
        changes["dropout"] = {"embedding": dropout, "attention": dropout, "residual": dropout}
    laid = {k: v if not isinstance(v, dict) or "kind" in v else {**LLAMA.get(k, {}), **v} for k, v in changes.items()}
    return sc.new(from_dict({**LLAMA, **laid}, "small"), seed=seed, dtype=dtype)
