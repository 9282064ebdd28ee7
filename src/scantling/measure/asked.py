"""What is measured on: a model, and the rows that it is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scantling.cards.rules import position_limit, positions_text
from scantling.errors import ScantlingInputError
from scantling.model import Model
from scantling.parts.heads import Head
from scantling.parts.part import Workload
from scantling.tensor.context import Context, Recorder

LENGTHS = (128, 256, 512, 1024)
PASSES = 3
KERNELS = ("fused", "reference")


@dataclass(frozen=True)
class Asked:
    """How a model is measured.

    Attributes:
        lengths: tokens of a row, where they vary; the figures of one length take the `length` nearest to 256.
        batch: rows.
        steps: updates between the first gradient and the second.
        lr: of those updates.
        passes: of which the fastest counts, part by part.
        seed: of ids, and of the weights of a card.
    """

    lengths: tuple[int, ...] = LENGTHS
    batch: int = 1
    steps: int = 10
    lr: float = 1e-3
    passes: int = PASSES
    seed: int = 0

    @property
    def length(self) -> int:
        """Of a row where one length is asked."""
        return min(self.lengths, key=lambda tokens: abs(tokens - 256))


def fitting(lm: Model, lengths: tuple[int, ...] | None) -> tuple[int, ...]:
    """The lengths in order, or without any the usual ones as far as the model's positions reach.

    Raises:
        ScantlingInputError: longer than the model has positions.
    """
    limit = position_limit(lm.card)
    if lengths is None:
        usual = [tokens for tokens in LENGTHS if limit is None or tokens <= limit]
        return tuple(usual) or (max(2, (limit or 2) // 2), limit or 4)
    if limit is not None and max(lengths) > limit:
        raise ScantlingInputError(
            f"rows of {max(lengths):,} are asked for and {lm.card.name} has {positions_text(lm.card)}"
        )
    return tuple(sorted(set(lengths)))


def workload(lm: Model, asked: Asked, tokens: int, kernel: str) -> Workload:
    """A pass over rows of that length as the account sees it."""
    dtype = str(lm.dtype).removeprefix("torch.")
    return Workload(asked.batch, tokens, source=tokens if lm.parts.two_stacks else None, kernel=kernel, dtype=dtype)


def rows(lm: Model, asked: Asked, tokens: int) -> Tensor:
    """Ids (B, T): prose that every Python carries where there is a tokenizer and it is long enough, else random ids."""
    found = None if lm.tokenizer is None else _prose(lm)
    if found is not None and len(found) >= asked.batch * tokens:
        return torch.tensor(found[: asked.batch * tokens], device=lm.device).view(asked.batch, tokens)
    draw = torch.Generator().manual_seed(asked.seed)
    return torch.randint(0, lm.card.vocab_size, (asked.batch, tokens), generator=draw).to(lm.device)


def _prose(lm: Model) -> list[int]:
    from pydoc_data.topics import topics

    assert lm.tokenizer is not None
    return list(lm.tokenizer.encode("\n".join(str(topics[name]) for name in ("objects", "types"))))


def run(lm: Model, ids: Tensor, kernel: str = "fused", recorder: Recorder | None = None, **more: Any) -> Context:
    """One pass of inference; of an encoder-decoder over ids as source and target. Returns its context."""
    context = Context.of(ids, kernel_name=kernel, recorder=recorder, **more)
    with torch.no_grad():
        lm.net(ids, context, *([ids] if lm.parts.two_stacks else []))
    return context


def judged(lm: Model) -> bool:
    """Whether the head scores a vocabulary, so that there is a loss."""
    return isinstance(lm.parts.head, Head)
