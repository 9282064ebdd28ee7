"""A position in a GGUF file, moved by reads that check every declared size first."""

from __future__ import annotations

import mmap
import struct
from typing import BinaryIO, NoReturn

from scantling.checkpoint.files import Place, refuse
from scantling.checkpoint.gguf_types import U64

_PIECE = 2**20
"""Bytes that are fetched at least."""


class Cursor:
    """A position in a file, and reads that fail with a sentence instead of going past the end.

    The file is mapped, or lies elsewhere and is fetched from its beginning as far as it is read.

    Attributes:
        end: bytes of the whole file.
        have: bytes of it that `data` holds.
    """

    __slots__ = ("_source", "data", "end", "have", "path", "pos", "strings")

    def __init__(self, path: Place, data: mmap.mmap | bytearray, end: int, source: BinaryIO | None = None) -> None:
        self.path, self.data, self.end, self._source = path, data, end, source
        self.pos, self.have, self.strings = 0, len(data), 0

    def fetch(self, upto: int) -> int:
        """Have the first `upto` bytes, which are no more than the file has; returns how many there are."""
        if upto > self.have and self._source is not None and isinstance(self.data, bytearray):
            more = min(max(upto - self.have, self.have, _PIECE), self.end - self.have)
            self.data += self._source.read(more)
            self.have = len(self.data)
        if upto > self.have:
            self.fail(self.have, f"no more of the file could be fetched; {self.end - self.have} bytes are missing")
        return self.have

    def fail(self, at: int, problem: str) -> NoReturn:
        """Refuse the file for the `problem` that begins at byte `at`."""
        refuse(self.path, f"at byte {at}, {problem}")

    def room(self, nbytes: int, what: str) -> int:
        """Step over `nbytes`; returns where they begin."""
        at = self.pos
        if nbytes > self.end - at:
            self.fail(at, f"{what} needs {nbytes} bytes and {self.end - at} are left; the file is cut short or damaged")
        self.pos = at + nbytes
        if self.pos > self.have:
            self.fetch(self.pos)
        return at

    def number(self, form: struct.Struct, what: str) -> int:
        """One number of that layout."""
        value: int = form.unpack_from(self.data, self.room(form.size, what))[0]
        return value

    def text(self, what: str, limit: int) -> str:
        """A string of at most `limit` bytes, behind its 64-bit length."""
        length = self.number(U64, f"the length of {what}")
        if length > limit:
            self.fail(self.pos - 8, f"{what} declares {length} bytes, over the limit of {limit}")
        at = self.room(length, what)
        try:
            return bytes(self.data[at : self.pos]).decode()
        except UnicodeDecodeError as error:
            self.fail(at + error.start, f"{what} is not UTF-8 ({error.reason})")

    def count(self, what: str, limit: int, least: int) -> int:
        """A 64-bit count of things that take at least `least` bytes each."""
        count = self.number(U64, what)
        if count > limit:
            self.fail(self.pos - 8, f"{what} is {count}, over the limit of {limit}")
        if count * least > self.end - self.pos:
            self.fail(
                self.pos - 8,
                f"{what} is {count}, which takes at least {count * least} bytes, and {self.end - self.pos} are left",
            )
        return count
