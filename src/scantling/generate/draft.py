"""Who proposes tokens: a smaller model, the first layers of the same one, or what was read and written already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from scantling.cards.rules import position_limit, positions_text
from scantling.errors import ScantlingInputError
from scantling.generate.keeping import Keeping
from scantling.generate.room import known_tokens
from scantling.generate.session import Session, Source, start

if TYPE_CHECKING:
    from scantling.model import Model
    from scantling.parts.transformer import Transformer

Pick = Callable[[int, Tensor], tuple[int, Tensor]]
"""From the place of a proposal and the drafter's logits (1, V): the token, and the odds (V) it was drawn by."""


class Drafter(Protocol):
    """Proposes what comes next."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values beside those of the model that judges."""

    def propose(self, text: Sequence[int], count: int, pick: Pick) -> tuple[list[int], list[Tensor | None]]:
        """At most `count` tokens after `text`, with the distributions (V) that they were drawn from.

        Of an encoder-decoder the text is the target with what it begins with. None stands for certainty: the token is
        no draw.
        """


class LookupDraft:
    """What followed where the text, or the source, reads as the text ends now (prompt lookup decoding).

    The longest ending that is found counts; of one length a place in the source comes first, of several there the one
    nearest to where a copy would be that went on since the last proposal. In the text the last place counts. Where
    nothing is found right after a proposal from the source, a token stands in place of the source's, and the copy goes
    on behind it.

    Attributes:
        longest: tokens of the ending that is looked for; shorter endings are tried after it.
        source: of an encoder-decoder; empty where there is none.
    """

    nbytes = 0

    def __init__(self, longest: int = 3, source: Sequence[int] = ()) -> None:
        self.longest, self.source = longest, list(source)
        # A text begins with a token that is not of the source.
        self._ahead, self._copies = -1, False

    def propose(self, text: Sequence[int], count: int, pick: Pick) -> tuple[list[int], list[Tensor | None]]:
        """See `Drafter`."""
        found = self._found(list(text))[:count]
        return found, [None] * len(found)

    def _found(self, text: list[int]) -> list[int]:
        copied, self._copies = self._copies, False
        for length in range(min(self.longest, len(text)), 0, -1):
            ending = text[len(text) - length :]
            if read := _after(self.source, ending):
                place = min(read, key=lambda at: abs(at - len(text) - self._ahead))
                self._ahead, self._copies = place - len(text), True
                return self.source[place:]
            if written := _after(text, ending):
                return text[written[-1] :]
        return self.source[len(text) + self._ahead :] if copied else []


def _after(text: list[int], ending: list[int]) -> list[int]:
    """Where something follows the same tokens."""
    length = len(ending)
    starts = (at for at in range(len(text) - length) if text[at] == ending[0])
    return [at + length for at in starts if text[at : at + length] == ending]


class ModelDraft:
    """A model with a cache of its own; an encoder-decoder encodes the source with its own encoder."""

    def __init__(
        self, model: Model, capacity: int, keeping: Keeping | None = None, source: Sequence[int] | None = None
    ) -> None:
        """source: of an encoder-decoder.

        Raises:
            ScantlingInputError: the model has no positions for the source, or nobody says with what its target begins.
        """
        limit = position_limit(model.card)
        self._capacity = capacity if limit is None else min(capacity, limit)
        self._start, read = list[int](), None
        if source is not None:
            if limit is not None and len(source) > limit:
                raise ScantlingInputError(
                    f"{model.card.name} cannot draft: the source has {len(source)} tokens and it has "
                    f"{positions_text(model.card)}"
                )
            read, self._start = Source(model.ids(list(source))), start(model, 1)[0].tolist()
        self._session = Session(model, 1, self._capacity, source=read, keeping=keeping)
        self._known, self._read = known_tokens(model), list[int]()

    @property
    def nbytes(self) -> int:
        """See `Drafter`."""
        return self._session.cache.nbytes

    def propose(self, text: Sequence[int], count: int, pick: Pick) -> tuple[list[int], list[Tensor | None]]:
        """See `Drafter`; nothing past the model's own positions."""
        # Its targets may begin with another token than those of the model that judges.
        text = [*self._start, *text[len(self._start) :]]
        # The last proposal is not read.
        count = min(count, self._capacity - len(text) + 1)
        if count < 1:
            return [], []
        self._go_back(text)
        device, tokens, drawn_from = self._session.model.device, list[int](), list[Tensor | None]()
        new = text[len(self._read) :]
        for i in range(count):
            logits = self._session.score(torch.tensor([new], device=device), last_only=True)[:, -1, : self._known]
            self._read += new
            token, odds = pick(i, logits)
            tokens.append(token)
            drawn_from.append(odds)
            new = [token]
        return tokens, drawn_from

    def _go_back(self, text: list[int]) -> None:
        """To where its own proposals and the text part; at least the last token is read again."""
        same = 0
        while same < min(len(self._read), len(text) - 1) and self._read[same] == text[same]:
            same += 1
        if len(self._read) > same:
            self._session.rewind(len(self._read) - same)
            del self._read[same:]


class ExitDraft:
    """The first layers of the model that judges, over its own cache.

    They keep of a position what the whole model keeps of it in these layers, so what it has read need not be read by
    them, nor the source be encoded again; what they write of their proposals, the model writes anew when it judges.
    """

    nbytes = 0

    def __init__(self, short: Model, session: Session) -> None:
        """short: what `early_exit` makes of the model of the session."""
        self._short, self._session, self._known = short, session, known_tokens(short)

    def propose(self, text: Sequence[int], count: int, pick: Pick) -> tuple[list[int], list[Tensor | None]]:
        """See `Drafter`; the session has read all of the text but its last token."""
        device, tokens, drawn_from, last = self._short.device, list[int](), list[Tensor | None](), text[-1]
        for i in range(count):
            read = torch.tensor([[last]], device=device)
            logits = self._session.score(read, last_only=True, net=self._short.net)[:, -1, : self._known]
            last, odds = pick(i, logits)
            tokens.append(last)
            drawn_from.append(odds)
        self._session.rewind(len(tokens))
        return tokens, drawn_from


def early_exit(model: Model, layers: int) -> Model:
    """The model that ends after its first `layers` blocks: the same weights, none copied (arXiv:2309.08168, section 3).

    Of an encoder-decoder, the decoder's blocks; its encoder stays whole.

    Raises:
        ScantlingInputError: no decoder, or not fewer layers than it has.
    """
    stack = model.parts.decoder
    if stack is None:
        raise ScantlingInputError(f"{model.card.name}: an early exit needs a decoder")
    if isinstance(layers, bool) or not isinstance(layers, int) or not 1 <= layers < len(stack.blocks):
        raise ScantlingInputError(
            f"an early exit after {layers!r} layers: a number from 1 to {len(stack.blocks) - 1} is needed"
        )
    parts = ended(model.parts, layers)
    net = parts.build(device="meta")
    weights = model.net.state_dict()
    net.load_state_dict({name: weights[name] for name in net.state_dict()}, strict=True, assign=True)
    return replace(model, parts=parts, net=net.eval().requires_grad_(False), notes=())


def ended(parts: Transformer, layers: int) -> Transformer:
    """The parts of which the decoder ends after its first `layers` blocks."""
    assert parts.decoder is not None
    return replace(parts, decoder=replace(parts.decoder, blocks=parts.decoder.blocks[:layers]))


def check_pair(model: Model, draft: Model) -> None:
    """Refuse a draft model that writes other tokens.

    Raises:
        ScantlingInputError: another vocabulary, no decoder, or one that reads a source where the model reads none, or
            none where it reads one.
    """
    both = model.parts.two_stacks
    if draft.parts.decoder is None or draft.parts.two_stacks != both or draft.card.head.kind != "lm":
        needed = "an encoder-decoder" if both else "a decoder"
        raise ScantlingInputError(
            f"{draft.card.name} cannot draft for {model.card.name}: {needed} that scores a vocabulary is needed"
        )
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
