"""Who proposes tokens: a smaller model, the first layers of the same one, or the text itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from scantling.errors import ScantlingInputError
from scantling.generate.keeping import Keeping
from scantling.generate.room import known_tokens
from scantling.generate.session import Session

if TYPE_CHECKING:
    from scantling.model import Model

Pick = Callable[[int, Tensor], tuple[int, Tensor]]
"""From the place of a proposal and the drafter's logits (1, V): the token, and the odds (V) it was drawn by."""


class Drafter(Protocol):
    """Proposes what comes next."""

    def propose(self, text: Sequence[int], count: int, pick: Pick) -> tuple[list[int], list[Tensor | None]]:
        """At most `count` tokens after `text`, with the distributions (V) that they were drawn from.

        None stands for certainty: the token is no draw.
        """


class LookupDraft:
    """What followed the last time that the text ended as it does now (prompt lookup decoding).

    Attributes:
        longest: tokens of the ending that is looked for; shorter endings are tried after it.
    """

    def __init__(self, longest: int = 3) -> None:
        self.longest = longest

    def propose(self, text: Sequence[int], count: int, pick: Pick) -> tuple[list[int], list[Tensor | None]]:
        """See `Drafter`."""
        for length in range(min(self.longest, len(text) - 1), 0, -1):
            ending = list(text[len(text) - length :])
            for at in range(len(text) - length - 1, -1, -1):
                if list(text[at : at + length]) == ending:
                    found = list(text[at + length : at + length + count])
                    return found, [None] * len(found)
        return [], []


class ModelDraft:
    """A model with a cache of its own."""

    def __init__(self, model: Model, capacity: int, keeping: Keeping | None = None) -> None:
        self._session = Session(model, 1, capacity, keeping=keeping)
        self._known, self._read = known_tokens(model), list[int]()

    def propose(self, text: Sequence[int], count: int, pick: Pick) -> tuple[list[int], list[Tensor | None]]:
        """See `Drafter`."""
        self._go_back(text)
        device, tokens, drawn_from = self._session.model.device, list[int](), list[Tensor | None]()
        new = list(text[len(self._read) :])
        for i in range(count):
            logits = self._session.score(torch.tensor([new], device=device), last_only=True)[:, -1, : self._known]
            self._read += new
            token, odds = pick(i, logits)
            tokens.append(token)
            drawn_from.append(odds)
            new = [token]
        return tokens, drawn_from

    def _go_back(self, text: Sequence[int]) -> None:
        """To where its own proposals and the text part; at least the last token is read again."""
        same = 0
        while same < min(len(self._read), len(text) - 1) and self._read[same] == text[same]:
            same += 1
        if len(self._read) > same:
            self._session.rewind(len(self._read) - same)
            del self._read[same:]


def early_exit(model: Model, layers: int) -> Model:
    """The model that ends after its first `layers` blocks: the same weights, none copied (arXiv:2309.08168, section 3).

    Raises:
        ScantlingInputError: no decoder alone, or not fewer layers than it has.
    """
    stack = model.parts.decoder
    if stack is None or model.parts.two_stacks:
        raise ScantlingInputError(f"{model.card.name}: an early exit needs a decoder of one stack")
    if isinstance(layers, bool) or not isinstance(layers, int) or not 1 <= layers < len(stack.blocks):
        raise ScantlingInputError(
            f"an early exit after {layers!r} layers: a number from 1 to {len(stack.blocks) - 1} is needed"
        )
    parts = replace(model.parts, decoder=replace(stack, blocks=stack.blocks[:layers]))
    net = parts.build(device="meta")
    weights = model.net.state_dict()
    net.load_state_dict({name: weights[name] for name in net.state_dict()}, strict=True, assign=True)
    return replace(model, parts=parts, net=net.eval().requires_grad_(False), notes=())


def check_pair(model: Model, draft: Model) -> None:
    """Refuse a draft model that writes other tokens.

    Raises:
        ScantlingInputError: another vocabulary, or no decoder of one stack.
    """
    if draft.parts.decoder is None or draft.parts.two_stacks or draft.card.head.kind != "lm":
        raise ScantlingInputError(f"{draft.card.name} cannot draft: a decoder that scores a vocabulary is needed")
    mine, its = known_tokens(model), known_tokens(draft)
    if mine != its:
        raise ScantlingInputError(
            f"{draft.card.name} has {its} tokens and {model.card.name} {mine}: a draft needs the same vocabulary"
        )
    if model.tokenizer is None or draft.tokenizer is None:
        return
    other = next((i for i in range(mine) if _piece(model, i) != _piece(draft, i)), None)
    if other is not None:
        raise ScantlingInputError(
            f"token {other} is {_piece(model, other)!r} for {model.card.name} and {_piece(draft, other)!r} for "
            f"{draft.card.name}: a draft needs the same vocabulary"
        )


def _piece(model: Model, token: int) -> str | None:
    assert model.tokenizer is not None
    try:
        return model.tokenizer.token(token)
    except ScantlingInputError:
        return None
