"""Which heads copy: scores on random tokens that are repeated.

An induction head reads, at a token that stood earlier, the token after that earlier one (prefix matching; Olsson et
al., In-context Learning and Induction Heads, transformer-circuits.pub/2022/in-context-learning-and-induction-heads).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scantling.errors import ScantlingInputError
from scantling.lens.attention import attention_maps

if TYPE_CHECKING:
    from scantling.model import Model


@dataclass(frozen=True)
class HeadScore:
    """One head on repeated random tokens; each score is a mean attention weight, from 0 to 1.

    Attributes:
        path: of its attention.
        layer, head: its numbers.
        induction: what a token of the second half gives to the one after its first occurrence.
        previous: what a token gives to the one before it.
        same: what a token of the second half gives to its own first occurrence.
        first: what a token gives to the first one of the row, where idle heads look.
    """

    path: str
    layer: int
    head: int
    induction: float
    previous: float
    same: float
    first: float


def repeated_tokens(lm: Model, length: int = 50, rows: int = 4, seed: int = 0) -> Tensor:
    """Random tokens (rows, 2 * length), the second half equal to the first, behind what texts start with.

    Marks of the tokenizer are not drawn.

    Raises:
        ScantlingInputError: a length or number of rows below 1, or more tokens than the context holds.
    """
    if length < 2 or rows < 1:
        raise ScantlingInputError(f"length is {length} and rows {rows}: at least 2 tokens and 1 row are needed")
    count = lm.card.vocab_size if lm.tokenizer is None else min(lm.card.vocab_size, lm.tokenizer.vocab_size)
    marks = set() if lm.tokenizer is None else set(lm.tokenizer.special_ids)
    words = torch.tensor([i for i in range(count) if i not in marks])
    draw = torch.Generator().manual_seed(seed)
    half = words[torch.randint(0, len(words), (rows, length), generator=draw)]
    start = [] if lm.tokenizer is None else lm.tokenizer.encode("")[:1]
    return torch.cat([torch.tensor(start, dtype=torch.int64).expand(rows, -1), half, half], 1)


def head_scores(lm: Model, *, length: int = 50, rows: int = 4, seed: int = 0) -> list[HeadScore]:
    """Every head of the stack that the head reads, scored on repeated random tokens.

    Layers whose window is shorter than `length` cannot reach the first occurrence.

    Raises:
        ScantlingInputError: as `repeated_tokens`, or an encoder-decoder, whose target is no copy of its source.
    """
    if lm.parts.two_stacks:
        raise ScantlingInputError(f"{lm.card.name} is an encoder-decoder: scores on repeated tokens are of one stack")
    ids = repeated_tokens(lm, length, rows, seed)
    lead = ids.shape[1] - 2 * length
    later = torch.arange(lead + length, lead + 2 * length)
    every = torch.arange(1, ids.shape[1])
    found = []
    for layer, (path, maps) in enumerate(attention_maps(lm, ids).items()):
        wide = maps.float()
        scores = {
            "induction": wide[:, :, later[:-1], later[:-1] - length + 1],
            "previous": wide[:, :, every, every - 1],
            "same": wide[:, :, later, later - length],
            "first": wide[:, :, every, 0],
        }
        means = {name: value.mean((0, 2)) for name, value in scores.items()}
        for head in range(wide.shape[1]):
            found.append(HeadScore(path, layer, head, **{name: float(value[head]) for name, value in means.items()}))
    return found


def second_half_loss(lm: Model, ids: Tensor, length: int) -> Tensor:
    """Mean loss, in nats, of the tokens of the second half that a copy predicts, of ids from `repeated_tokens`: ()."""
    ids = lm.ids(ids)
    logs = lm.logits(ids).log_softmax(-1)
    at = torch.arange(ids.shape[1] - length, ids.shape[1] - 1)
    return -logs[:, at].gather(-1, ids[:, at + 1, None]).mean()
