"""A strict JSON reader for files from elsewhere: no duplicate keys, no NaN, and faults named by their byte."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import NoReturn

from scantling.checkpoint.files import Place, refuse, shown

_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN_STRING = re.compile(r'[ \t\n\r]*"([^"\\\x00-\x1f]*)"')
_PLAIN_KEY = re.compile(r'[ \t\n\r]*"([^"\\\x00-\x1f]*)"[ \t\n\r]*:[ \t\n\r]*')
_FEW = 8
"""Objects in a text that is read at once."""
_COMMA = re.compile(r"[ \t\n\r]*,[ \t\n\r]*")


def natural(value: object) -> bool:
    """Whether it is an integer from 0 to 2^63-1, and no bool."""
    return type(value) is int and 0 <= value < 2**63


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"duplicate key {shown(twice)}")
    return found


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)


class JsonReader:
    """A pull parser over one JSON text: it builds one small value at a time, so memory stays near the text's size."""

    def __init__(self, path: Place, raw: bytes, base: int) -> None:
        self.path, self.base, self.pos = path, base, 0
        try:
            self.text = raw.decode()
        except UnicodeDecodeError as error:
            refuse(path, f"at byte {base + error.start}, the JSON text is not UTF-8 ({error.reason})")

    def fail(self, problem: str, at: int | None = None) -> NoReturn:
        """Refuse the file for the `problem` at that character, or at the current one."""
        at = self.pos if at is None else at
        refuse(self.path, f"at byte {self.base + len(self.text[:at].encode())}, {problem}")

    def peek(self) -> str:
        """The next character that is not white space, or the empty string at the end."""
        char = self.text[self.pos : self.pos + 1]
        if char.isspace():
            space = _SPACE.match(self.text, self.pos)
            assert space is not None
            self.pos = space.end()
            char = self.text[self.pos : self.pos + 1]
        return char

    def members(self, where: str, noun: str) -> Iterator[str]:
        """The keys of an object; the caller consumes each value before it asks for the next key."""
        if self.peek() != "{":
            self.fail(f"{where} must be a JSON object")
        self.pos += 1
        seen: set[str] = set()
        char = self.peek()
        while char != "}":
            at, plain = self.pos, _PLAIN_KEY.match(self.text, self.pos)
            key = plain[1] if plain else self.string(f"a {noun} in {where}")
            if key in seen:
                self.fail(f"duplicate {noun} {shown(key)} in {where}; each may appear once", at)
            seen.add(key)
            if plain:
                self.pos = plain.end()
            elif self.peek() != ":":
                self.fail(f"{noun} {shown(key)} in {where} needs a ':' after it")
            else:
                self.pos += 1
                self.peek()
            yield key
            if comma := _COMMA.match(self.text, self.pos):
                char, self.pos = ",", comma.end()
            elif (char := self.peek()) != "}":
                self.fail(f"{where} needs ',' or '}}' after {shown(key)}")
        self.pos += 1

    def strings(self, where: str, noun: str, value: str) -> dict[str, str]:
        """An object whose values are strings; `value` is what they are, for messages."""
        if "\\" not in self.text and "[" not in self.text and self.text.count("{") <= _FEW:
            # So few objects and no array cannot take much more memory than their text.
            try:
                found, end = _DECODER.raw_decode(self.text, self.pos)
            except ValueError:
                found, end = None, self.pos
            if type(found) is dict and set(map(type, found.values())) <= {str}:
                self.pos = end
                return found
        return {key: self.string(value) for key in self.members(where, noun)}

    def string(self, where: str) -> str:
        """A string, of characters only."""
        if plain := _PLAIN_STRING.match(self.text, self.pos):
            self.pos = plain.end()
            return plain[1]
        if self.peek() != '"':
            self.fail(f"{where} must be a string in double quotes")
        try:
            value, end = _DECODER.raw_decode(self.text, self.pos)
            value.encode()
        except json.JSONDecodeError as error:
            self.fail(f"{where} is not a JSON string ({error.msg})", error.pos)
        except UnicodeEncodeError:
            self.fail(f"{where} holds half of a surrogate pair, which is no character")
        assert isinstance(value, str)
        self.pos = end
        return value

    def small(self, where: str, limit: int) -> object:
        """Any value of at most `limit` characters."""
        self.peek()
        piece = self.text[self.pos : self.pos + limit]
        try:
            value, used = _DECODER.raw_decode(piece)
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            longer = f", or is longer than {limit} characters" if self.pos + limit < len(self.text) else ""
            self.fail(f"{where} is not valid JSON ({reason}){longer}")
        self.pos += used
        return value

    def finish(self) -> None:
        """Refuse the file if anything but white space is left."""
        if self.peek():
            self.fail(f"there is {shown(self.text[self.pos : self.pos + 20])} after the end of the JSON object")
