"""A prompt as a model reads it: ids, the words that they stand for, and the place that is looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from scantling.errors import ScantlingInputError
from scantling.lens.hooks import ALL_REAL, capture
from scantling.lens.points import stack_of
from scantling.passes import Given
from scantling.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from scantling.model import Model


@dataclass(frozen=True)
class Prompt:
    """One text that a model reads.

    Attributes:
        lm: the model.
        ids: (1, T); of an encoder-decoder the source, whose target is in `given`.
        given: what goes with them.
        position: of the token that is looked at, from 0, among those that `stack` reads.
        stack: the one that is looked into; by default the one that the head reads.
    """

    lm: Model
    ids: Tensor
    given: Given
    position: int
    stack: str | None = None

    @property
    def read(self) -> list[int]:
        """The ids that the stack reads: of the target, where there is one and it is no encoder."""
        source = self.given.decoder_ids is None or self.stack == "encoder"
        return [int(i) for i in (self.ids if source else self.given.decoder_ids)[0]]

    @property
    def words(self) -> list[str]:
        """What each of them stands for."""
        return [word(self.lm, i) for i in self.read]

    @property
    def source_words(self) -> list[str]:
        """The same of an encoder-decoder's source."""
        return [word(self.lm, int(i)) for i in self.ids[0]]

    def logits(self) -> Tensor:
        """(T, V) of the text."""
        return capture(self.lm, self.ids, [], self.given).out[0]


def word(lm: Model, token: int) -> str:
    """The text of a token, or ``#id`` where there is no tokenizer."""
    if lm.tokenizer is None or token >= lm.tokenizer.vocab_size:
        return f"#{token}"
    return lm.tokenizer.decode([token], skip_special=False) or lm.tokenizer.token(token)


def read_prompt(
    lm: Model,
    text: str,
    *,
    as_ids: bool = False,
    target: str | None = None,
    position: int | None = None,
    stack: str | None = None,
) -> Prompt:
    """A text, or ids as ``12 7 3``, for the lens.

    Args:
        target: of an encoder-decoder, how its answer begins; default not at all.
        position: of the token to look at, negative ones from the end; default the first mask, else the last token.
        stack: to look into; by default the one that the head reads.

    Raises:
        ScantlingInputError: an empty text, no tokenizer, no such position, or a target for a model that reads none.
    """
    stack_of(lm, stack)
    ids = lm.ids(_ids(lm, text, as_ids, "the prompt"))
    given = ALL_REAL
    if lm.parts.two_stacks:
        more = [] if not target else _ids(lm, target, as_ids, "the target", bare=True)
        given = Given(decoder_ids=lm.ids([*first_target(lm), *more]))
    elif target is not None:
        raise ScantlingInputError(f"{lm.card.name} is of family {lm.card.family} and has no target beside its prompt")
    read = Prompt(lm, ids, given, 0, stack).read
    mask = None if lm.tokenizer is None else lm.tokenizer.mask_id
    if position is None:
        position = read.index(mask) if lm.card.family == "encoder" and mask in read else len(read) - 1
    if not -len(read) <= position < len(read):
        raise ScantlingInputError(f"position {position}: there are {len(read)} tokens, 0 to {len(read) - 1}")
    return Prompt(lm, ids, given, position % len(read), stack)


def first_target(lm: Model) -> list[int]:
    """What the target of an encoder-decoder begins with.

    Raises:
        ScantlingInputError: nobody says.
    """
    if lm.start_id is None:
        raise ScantlingInputError("the checkpoint does not say with what a target begins (decoder_start_token_id)")
    return [lm.start_id]


def _ids(lm: Model, text: str, as_ids: bool, what: str, bare: bool = False) -> list[int]:
    if as_ids:
        try:
            found = [int(piece) for piece in text.replace(",", " ").split()]
        except ValueError:
            raise ScantlingInputError(f"{what} is {text[:40]!r}: ids are whole numbers, as in '12 7 3'") from None
    else:
        found = tokenizer_of(lm).encode(text, add_special=not bare)
    if not found or not text.strip():
        raise ScantlingInputError(f"{what} is empty: at least one token is needed")
    return found


def tokenizer_of(lm: Model) -> Tokenizer:
    """The model's tokenizer.

    Raises:
        ScantlingInputError: it has none.
    """
    if lm.tokenizer is None:
        raise ScantlingInputError(f"{lm.card.name} has no tokenizer beside it: give the prompt as ids (--ids)")
    return lm.tokenizer


def token_id(lm: Model, text: str) -> int:
    """The one token that a text is, or ``#id``.

    Raises:
        ScantlingInputError: it is several tokens, or none.
    """
    if text.startswith("#") and text[1:].isdigit():
        found = int(text[1:])
        if found >= lm.card.vocab_size:
            raise ScantlingInputError(f"token id {found} is outside the vocabulary of {lm.card.vocab_size}")
        return found
    ids = tokenizer_of(lm).encode(text, add_special=False)
    if len(ids) != 1:
        pieces = ", ".join(repr(word(lm, i)) for i in ids) or "none"
        raise ScantlingInputError(f"{text!r} is {len(ids)} tokens ({pieces}): name one token, mind its leading blank")
    return ids[0]
