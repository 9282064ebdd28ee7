"""Files behind http addresses, read piece by piece: only the bytes that are asked for are fetched."""

from __future__ import annotations

import http.client
import io
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit, urlunsplit
from urllib.request import HTTPRedirectHandler, OpenerDirector, Request, build_opener

from scantling.checkpoint.files import Elsewhere, is_address, refuse
from scantling.errors import ScantlingInputError

FIRST = 32 * 1024
"""Bytes of the first request for a file: the header of most shards fits."""
TIMEOUT = 15.0
"""Seconds that a server may be silent."""
SMALL = 16 * 2**20
"""Bytes of the largest file that is fetched whole."""
_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})")


class _Redirects(HTTPRedirectHandler):
    """Follows to http and https only, and takes no credentials to another host."""

    def redirect_request(self, req: Request, *rest: Any) -> Request | None:
        new = super().redirect_request(req, *rest)
        if new is None or not is_address(new.full_url):
            return None
        if urlsplit(new.full_url).netloc != urlsplit(req.full_url).netloc:
            new.remove_header("Authorization")
        return new


class Address(Elsewhere):
    """A file behind an http address.

    Attributes:
        text: the address.
        headers: sent with every request.
    """

    def __init__(self, text: str, headers: Mapping[str, str] | None = None) -> None:
        parts = urlsplit(text)
        if not is_address(text) or not parts.hostname:
            raise ScantlingInputError(f"{text}: no address; it must begin with http:// or https:// and a host")
        self.text, self.headers = text, dict(headers or {})
        self.name = PurePosixPath(parts.path).name
        self.suffix = PurePosixPath(parts.path).suffix
        self._first: _Answer | None = None

    def __str__(self) -> str:
        parts = urlsplit(self.text)
        host = parts.netloc.rpartition("@")[2]
        return urlunsplit((parts.scheme, host, parts.path, "", ""))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Address) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)

    def with_name(self, name: str) -> Address:
        """The file of that name in the same folder."""
        parts = urlsplit(self.text)
        path = parts.path[: parts.path.rfind("/") + 1] + quote(name)
        return Address(urlunsplit((parts.scheme, parts.netloc, path, parts.query, "")), self.headers)

    def exists(self) -> bool:
        """Whether the server has it; its first bytes are kept for whoever opens it.

        Raises:
            ScantlingInputError: the server cannot be asked.
        """
        try:
            self._begin()
        except _Absent:
            return False
        return True

    def opened(self) -> tuple[BinaryIO, int]:
        """A file object that fetches what is read, and the file's size.

        Raises:
            ScantlingInputError: there is no such file, or the server cannot be asked.
        """
        try:
            first = self._begin()
        except _Absent:
            refuse(self, "there is no such file (the server answers 404)")
        if first.size == 0:
            refuse(self, "is empty (0 bytes)")
        return cast(BinaryIO, io.BufferedReader(_Reading(self, first), 1)), first.size

    def fetched(self) -> bytes:
        """All bytes of a small file.

        Raises:
            ScantlingInputError: it is absent, or larger than `SMALL`.
        """
        file, size = self.opened()
        with file:
            if size > SMALL:
                refuse(self, f"has {size} bytes; at most {SMALL} are fetched")
            return file.read(size)

    def _begin(self) -> _Answer:
        if self._first is None:
            self._first = self.piece(0, FIRST)
        return self._first

    def piece(self, start: int, length: int) -> _Answer:
        """The bytes from `start` on, at most `length`, and the file's size.

        Raises:
            ScantlingInputError: the server cannot be asked, or gives something else.
        """
        ask = Request(self.text, headers={**self.headers, "Range": f"bytes={start}-{start + length - 1}"})
        ask.add_header("Accept-Encoding", "identity")
        try:
            with _OPENER.open(ask, timeout=TIMEOUT) as answer:
                return self._read(answer, start, length)
        except HTTPError as error:
            with error:
                if error.code == 416 and start == 0:
                    return _Answer(b"", 0, True)
                if error.code == 404:
                    raise _Absent from None
                refuse(self, f"the server answers {error.code} {_line(error.reason)}")
        except ScantlingInputError:
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = error.reason if isinstance(error, URLError) else error
            refuse(self, f"cannot be fetched: {_line(reason) or type(error).__name__}")

    def _read(self, answer: Any, start: int, length: int) -> _Answer:
        if answer.status == 206:
            found = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
            if found is None or int(found[1]) != start or int(found[2]) >= int(found[3]):
                refuse(self, f"the server answers with the range {answer.headers.get('Content-Range')!r:.60}")
            return _Answer(answer.read(min(length, int(found[2]) - start + 1)), int(found[3]), True)
        size = answer.headers.get("Content-Length", "")
        if not size.isdecimal():
            refuse(self, "the server does not say how long the file is")
        if start:
            refuse(self, f"the server sends whole files only, and byte {start} is wanted")
        return _Answer(answer.read(min(length, int(size))), int(size), False)


def _line(reason: object) -> str:
    return " ".join(str(reason).split())[:200]


class _Absent(Exception):
    """The server has no such file."""


class _Answer:
    """Bytes of a file, its size, and whether the server gives pieces."""

    def __init__(self, data: bytes, size: int, pieces: bool) -> None:
        self.data, self.size, self.pieces = data, size, pieces


class _Reading(io.RawIOBase):
    """A file that is fetched as it is read."""

    def __init__(self, address: Address, first: _Answer) -> None:
        self._address, self._first, self._at = address, first, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._first.size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), self._first.size - self._at)
        if wanted <= 0:
            return 0
        data = self._first.data[self._at : self._at + wanted]
        if not data:
            data = self._address.piece(self._at, wanted).data
        if not data:
            refuse(self._address, f"the server sends nothing from byte {self._at} on of {self._first.size}")
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _opener() -> OpenerDirector:
    opener = build_opener(_Redirects)
    opener.addheaders = [("User-Agent", "scantling")]
    return opener


_OPENER = _opener()


def fetch_small(address: Address, folder: Path, names: tuple[str, ...]) -> list[str]:
    """Fetch those of some small files that exist beside an address into a folder; returns their names.

    Raises:
        ScantlingInputError: the server cannot be asked, or one is too large.
    """
    found = []
    for name in names:
        beside = address.with_name(name)
        if beside.exists():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(beside.fetched())
            found.append(name)
    return found
