"""Conversations through the chat template, with what the assistant says told apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from scantling.errors import ScantlingInputError
from scantling.text.template import render
from scantling.text.tokenizer import Tokenizer

Conversation = tuple[Sequence[Mapping[str, Any]], Callable[[], str]]


def encode_chats(
    tokenizer: Tokenizer, conversations: Sequence[Conversation]
) -> list[tuple[str, list[int], list[bool]]]:
    """Each conversation as its text, its ids, and whether the assistant speaks at each of them."""
    template = tokenizer.chat_template
    if template is None:
        raise ScantlingInputError("the tokenizer has no chat template, and the data are conversations")
    found = []
    for messages, _ in conversations:
        write = partial(render, template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
        text = write(messages, add_generation_prompt=False)
        spans = []
        for place, message in enumerate(messages):
            if message.get("role") == "assistant":
                before = write(messages[:place], add_generation_prompt=True)
                whole = write(messages[: place + 1], add_generation_prompt=False)
                spans.append((len(before), len(whole)))
        ids, chars = tokenizer.encode_spans(text)
        found.append((text, ids, [any(a <= s and e <= b and s < e for a, b in spans) for s, e in chars]))
    return found
