"""One prompt to text, as its tokens come: from the compiled pass without PyTorch where it can, else from PyTorch."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scantling.errors import ScantlingInputError, need
from scantling.generate import plain
from scantling.generate.room import encoded, room
from scantling.generate.sampling import Sampling
from scantling.generate.settings import Chosen, Generation, Options
from scantling.generate.writer import Writer
from scantling.text.template import render

if TYPE_CHECKING:
    from scantling.generate.sample import Logprob
    from scantling.model import Model


def complete(
    model: Model,
    prompt: str,
    max_new_tokens: int,
    sampling: Sampling,
    options: Options | None = None,
    *,
    show: Callable[[str], Any] | None = None,
) -> Generation:
    """Continue one prompt to text.

    Args:
        show: called with each piece of text as soon as it is certain.

    Raises:
        ScantlingInputError: no tokenizer, an empty prompt, one that fills the context, or a limit below 1.
    """
    making = streamed(model, prompt, max_new_tokens, sampling, options)
    while True:
        try:
            piece = next(making)
        except StopIteration as end:
            made: Generation = end.value
            return made
        if show:
            show(piece)


def streamed(
    model: Model, prompt: str, max_new_tokens: int, sampling: Sampling, options: Options | None = None
) -> Generator[str, None, Generation]:
    """The same piece by piece, each as soon as it is certain; the generator's value is the whole.

    Raises:
        ScantlingInputError: as `complete`; what is wrong with the prompt and the limit before a piece is asked for.
    """
    options = options or Options()
    for name, given, kind in (("sampling", sampling, Sampling), ("options", options, Options)):
        if not isinstance(given, kind):
            raise ScantlingInputError(f"{name} is {given!r}; a scantling.generate.{kind.__name__} is needed")
    text = Text(encoded(model, prompt, max_new_tokens), max_new_tokens, Writer(model, options))
    room(model, len(text.prompt), max_new_tokens)
    if plain.is_enough(model, sampling, options):
        return text.made_of(model, plain.tokens(model, text.prompt, max_new_tokens), options)
    need("torch", "draw tokens")
    from scantling.generate.engine import one_by_one

    return text.made_of(model, one_by_one(model, text.prompt, max_new_tokens, sampling, options), options)


def templated(model: Model, messages: list[dict[str, str]], what: str = "a conversation") -> str:
    """The prompt that the model's chat template makes of messages.

    Raises:
        ScantlingInputError: the model has no template, or the template refuses the messages.
    """
    tokenizer = model.tokenizer
    if tokenizer is None or tokenizer.chat_template is None:
        raise ScantlingInputError(f"{what} needs a chat template, and the model has none; name a chat model")
    return render(tokenizer.chat_template, messages, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)


@dataclass(frozen=True)
class Text:
    """A text on its way.

    Attributes:
        prompt: its ids.
        asked: new tokens at most.
    """

    prompt: list[int]
    asked: int
    writer: Writer

    def made_of(self, model: Model, tokens: Iterable[Chosen], options: Options) -> Generator[str, None, Generation]:
        """The pieces of text that come of the tokens, which are made as they are taken; and the whole."""
        writer, found, ledger = self.writer, list["Logprob"](), None
        limit = room(model, len(self.prompt), self.asked, options.contrastive is not None)
        cache_bytes, fulfilled, rows = 0, False, 1
        began = first = time.perf_counter()
        for chosen in tokens:
            if not writer.ids:
                first, cache_bytes, rows = time.perf_counter(), chosen.cache_bytes, chosen.rows
            if chosen.logprob is not None:
                found.append(chosen.logprob)
            if piece := writer.push(chosen.id):
                yield piece
            ledger, fulfilled = chosen.ledger, chosen.fulfilled
            if writer.reason or fulfilled:
                break
        if piece := writer.finish("stop" if fulfilled else "length"):
            yield piece
        end = time.perf_counter()
        return Generation(
            writer.text,
            writer.ids,
            len(self.prompt),
            len(writer.ids),
            writer.reason or "length",
            first - began,
            end - first,
            cache_bytes,
            limit,
            writer.reason == "length" and limit < self.asked,
            tuple(found) if options.logprobs is not None else None,
            ledger,
            rows,
        )
