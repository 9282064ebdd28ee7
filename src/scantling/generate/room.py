"""What a model may write: whether it writes at all, how much fits, and which tokens there are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scantling.cards.rules import position_limit, positions_text
from scantling.errors import ScantlingInputError

if TYPE_CHECKING:
    from scantling.model import Model


def room(model: Model, prompt: int, max_new_tokens: int, reads_last: bool = False) -> int:
    """New tokens that a prompt of that many tokens may have.

    Of an encoder-decoder, the prompt is a source: the target starts anew, and has a limit where positions do.

    Args:
        reads_last: the last new token goes through the model too, as the candidates of a contrastive search do.

    Raises:
        ScantlingInputError: the prompt leaves no room in the context.
    """
    context = model.card.context
    if model.parts.two_stacks:
        limit = position_limit(model.card)
        if limit is None:
            return max_new_tokens
        if prompt > limit:
            raise ScantlingInputError(f"the source has {prompt} tokens and the model has {positions_text(model.card)}")
        # A target begins with a token that is not new, and one that is not read needs no position.
        return min(max_new_tokens, limit - int(reads_last))
    if prompt >= context:
        raise ScantlingInputError(
            f"the prompt has {prompt} tokens and the context holds {context}: at most {context - 1} leave room"
        )
    return min(max_new_tokens, context - prompt)


def needed(model: Model, prompt: int, max_new_tokens: int) -> tuple[int, int]:
    """Positions that a prompt of so many tokens and what is written come to at most: of the text, and of a source.

    Raises:
        ScantlingInputError: as `room`.
    """
    new = room(model, prompt, max_new_tokens)
    # A target has one token before those that are written.
    return (1 + new, prompt) if model.parts.two_stacks else (prompt + new, 0)


def check_writes(model: Model) -> None:
    """Refuse a model that writes no text.

    Raises:
        ScantlingInputError: it has no decoder, or its head scores no vocabulary.
    """
    if model.card.head.kind != "lm" or model.parts.decoder is None:
        what = f"{model.card.name} is a card of family {model.card.family} with a head of kind {model.card.head.kind}"
        raise ScantlingInputError(f"text is written by a decoder that scores a vocabulary, and {what}")


def encoded(model: Model, prompt: str, max_new_tokens: int) -> list[int]:
    """The ids of a prompt that is text.

    Raises:
        ScantlingInputError: a model that writes no text, no tokenizer, an empty prompt, or a limit below 1.
    """
    check_writes(model)
    if model.tokenizer is None:
        raise ScantlingInputError(
            "the model has no tokenizer (no tokenizer.json beside its weights): give token ids instead of text"
        )
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ScantlingInputError(f"max_new_tokens is {max_new_tokens}; at least 1 is needed")
    found = model.tokenizer.encode(prompt)
    if not found or not prompt:
        raise ScantlingInputError("the prompt is empty: at least one token is needed to go on from")
    return found


def known_tokens(model: Model) -> int:
    """Tokens that may be chosen: rows of the table past the tokenizer's last id stand for none."""
    return model.card.vocab_size if model.tokenizer is None else model.tokenizer.vocab_size
