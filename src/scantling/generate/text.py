"""One prompt to text, as its tokens come: from the compiled pass without PyTorch where it can, else from PyTorch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
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
    options = options or Options()
    text = Text(encoded(model, prompt, max_new_tokens), max_new_tokens, Writer(model, options, show))
    if plain.is_enough(model, sampling, options):
        return text.made_of(model, plain.tokens(model, text.prompt, max_new_tokens), options)
    need("torch", "draw tokens")
    from scantling.generate.engine import inference_mode, one_by_one

    with inference_mode():
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

    def made_of(self, model: Model, tokens: Iterable[Chosen], options: Options) -> Generation:
        """What comes of the tokens, which are made as they are taken."""
        writer, found, ledger = self.writer, list["Logprob"](), None
        limit = room(model, len(self.prompt), self.asked, options.contrastive is not None)
        cache_bytes, fulfilled, rows = 0, False, 1
        began = first = time.perf_counter()
        for chosen in tokens:
            if not writer.ids:
                first, cache_bytes, rows = time.perf_counter(), chosen.cache_bytes, chosen.rows
            if chosen.logprob is not None:
                found.append(chosen.logprob)
            writer.push(chosen.id)
            ledger, fulfilled = chosen.ledger, chosen.fulfilled
            if writer.reason or fulfilled:
                break
        writer.finish("stop" if fulfilled else "length")
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
