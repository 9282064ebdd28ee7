"""Conversations through the chat template, with what the assistant says told apart."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scantling.data.reading import Chat
from scantling.errors import ScantlingInputError
from scantling.text.template import BadTalk, Talk, render_many
from scantling.text.tokenizer import Tokenizer

_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Spoken:
    """A conversation as text and ids (n,), and whether the assistant speaks at each of them, (n,)."""

    text: str
    ids: list[int]
    spoken: NDArray[np.bool_]


def encode_chats(tokenizer: Tokenizer, chats: Sequence[Chat]) -> list[Spoken]:
    """Render conversations and find the assistant's turns in them.

    Where the template has the tag `generation`, a turn is what stands in it. Elsewhere it is what the template writes
    from the end of its generation prompt to the end of the message, end mark included; where the generation prompt is
    not what stands before the answer, the turn begins with the words of the message. A token is the assistant's if all
    of its characters are.

    Raises:
        ScantlingInputError: there is no template, it refuses a conversation, no assistant speaks in one, or the turns
            cannot be found.
    """
    template = tokenizer.chat_template
    if template is None:
        raise ScantlingInputError("the tokenizer has no chat template, which conversations need")
    try:
        found = (_tagged if _TAG.search(template) else _by_steps)(template, tokenizer, chats)
    except BadTalk as error:
        raise ScantlingInputError(f"{chats[error.number].place()}: {error}") from None
    return [_encoded(tokenizer, text, spans, chat) for (text, spans), chat in zip(found, chats, strict=True)]


_Found = list[tuple[str, list[tuple[int, int]]]]
"""Texts, and the characters [start, end) of each turn."""


def _encoded(tokenizer: Tokenizer, text: str, spans: Sequence[tuple[int, int]], chat: Chat) -> Spoken:
    ids, places = tokenizer.encode_spans(text)
    inside = np.zeros(len(text) + 1, np.int64)
    for start, end in spans:
        inside[start:end] = 1
    reach = np.concatenate([[0], np.cumsum(inside)])
    starts, ends = (np.array([place[side] for place in places], np.int64) for side in (0, 1))
    spoken = (ends > starts) & (reach[ends] - reach[starts] == ends - starts)
    if not spoken.any():
        raise ScantlingInputError(f"{chat.place()}: no token of the assistant's is in the conversation")
    return Spoken(text, ids, spoken)


def _talk(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], *, prompt: bool = False) -> Talk:
    return Talk(messages, prompt, tokenizer.bos_token, tokenizer.eos_token)


def _tagged(template: str, tokenizer: Tokenizer, chats: Sequence[Chat]) -> _Found:
    """Turns by the template's own tag."""
    secret = secrets.token_hex(8)
    marks = f"\ue000{secret}<", f"\ue000{secret}>"
    talks = [_talk(tokenizer, chat.messages) for chat in chats]
    plain, marked = (render_many(template, talks, marks=pair) for pair in (("", ""), marks))
    found = []
    for chat, text, with_marks in zip(chats, plain, marked, strict=True):
        spans, at = [], 0
        pieces = re.split(f"({re.escape(marks[0])}|{re.escape(marks[1])})", with_marks)
        for before, piece in zip(["", *pieces], pieces, strict=False):
            if before == marks[0]:
                spans.append((at, at + len(piece)))
            at += 0 if piece in marks else len(piece)
        if "".join(piece for piece in pieces if piece not in marks) != text:
            raise ScantlingInputError(f"{chat.place()}: the chat template changes what stands in its tag `generation`")
        found.append((text, spans))
    return found


def _by_steps(template: str, tokenizer: Tokenizer, chats: Sequence[Chat]) -> _Found:
    """Turns by what the template adds when a message is added."""
    owners: list[int] = []
    talks: list[Talk] = []
    for number, chat in enumerate(chats):
        steps = [_talk(tokenizer, chat.messages)]
        for turn in _turns(chat):
            past = chat.messages[:turn]
            steps += [_talk(tokenizer, past, prompt=True), _talk(tokenizer, past)] if past else []
            steps.append(_talk(tokenizer, chat.messages[: turn + 1]))
        talks += steps
        owners += [number] * len(steps)
    try:
        texts = iter(render_many(template, talks))
    except BadTalk as error:
        raise BadTalk(str(error), owners[error.number]) from None
    found = []
    for chat in chats:
        whole = next(texts)
        spans = []
        for turn in _turns(chat):
            opened, closed = (next(texts), next(texts)) if turn else ("", "")
            spans.append(_span(whole, (opened, closed, next(texts)), chat, turn, tokenizer.eos_token))
        found.append((whole, spans))
    return found


def _turns(chat: Chat) -> list[int]:
    """Which messages are the assistant's; what is no message is left to the template."""
    return [n for n, m in enumerate(chat.messages) if isinstance(m, Mapping) and m.get("role") == "assistant"]


def _span(whole: str, steps: tuple[str, str, str], chat: Chat, turn: int, end_mark: str) -> tuple[int, int]:
    """The characters of one turn.

    Args:
        whole: the conversation.
        steps: what comes before the turn, with and without the generation prompt, and all up to the turn's end.
    """
    opened, before, after = steps
    content = chat.messages[turn].get("content")
    words = content.strip() if isinstance(content, str) else ""
    # Some templates write an end mark after the last message only.
    ends = after, after.removesuffix(end_mark)
    closed = next((text for text in ends if whole.startswith(text)), "")
    if opened and closed.startswith(opened) and words in closed[len(opened) :] and closed != opened:
        return len(opened), len(closed)
    # Others write an answer otherwise once it is history: its words and what ends it are looked for.
    start = _alike(whole, before)
    for text in ends:
        tail = text.rpartition(words)[2] if words in text else ""
        at = whole.find(words + tail, start)
        if words and tail and at >= 0 and tail not in whole[start:at]:
            return at, at + len(words + tail)
    raise ScantlingInputError(
        f"{chat.place()}: the assistant's words in message {turn} cannot be found in what the chat template writes; "
        "use a template with the tag `generation`"
    )


def _alike(one: str, other: str) -> int:
    """Characters in which two texts begin alike."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
