"""The likeliest tokens of one text, straight from the compiled pass: all that a first token needs, without PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from scantling.generate.room import check_writes, known_tokens, room
from scantling.generate.settings import Chosen

if TYPE_CHECKING:
    from scantling.generate.sampling import Sampling
    from scantling.generate.settings import Options
    from scantling.model import Model


def is_enough(model: Model, sampling: Sampling, options: Options) -> bool:
    """Whether nothing is asked for but the likeliest tokens of a packed model."""
    special = (options.keeping, options.chunk, options.logprobs, options.shape, options.drafting, options.contrastive)
    plain = special == (None,) * 6
    return model.packed is not None and plain and sampling.greedy and not sampling.looks_back


def tokens(model: Model, prompt: list[int], max_new_tokens: int) -> Iterator[Chosen]:
    """Token after token behind the prompt, until nobody takes them or there is room for no more."""
    check_writes(model)
    limit, known = room(model, len(prompt), max_new_tokens), known_tokens(model)
    assert model.packed is not None
    texts = model.packed.texts(1, len(prompt) + limit)
    logits = texts.read([(0, token) for token in prompt], [False] * (len(prompt) - 1) + [True])
    for i in range(limit):
        token = int(logits[0, :known].argmax())
        yield Chosen(token, texts.decoder.cache_nbytes)
        if i + 1 < limit:
            logits = texts.read([(0, token)], [True])
