"""Files from elsewhere: opened with care, recognised by their first bytes, and quoted in messages."""

from __future__ import annotations

import os
import reprlib
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, NoReturn, TypeAlias

from scantling.errors import ScantlingInputError

CONVERT = "weights must be safetensors or GGUF: convert it where it is trusted, with safetensors.torch.save_file"
"""What a message about pickled weights ends with."""

_FOREIGN = (
    (b"version https://git-lfs", "a git-lfs pointer, not the file it points to; fetch that with: git lfs pull"),
    (b"GGUF", "a GGUF file, not safetensors; name it .gguf and read it as one"),
    (b"PK\x03\x04", f"a zip archive, as torch.save writes; {CONVERT}"),
    (b"\x80", f"a Python pickle; {CONVERT}"),
    (b"\x1f\x8b", "a gzip archive; unpack it first"),
    (b"\x89HDF", "an HDF5 file; weights are read from safetensors or GGUF only"),
    (b"\x93NUMPY", "a NumPy file; weights are read from safetensors or GGUF only"),
    (b"{", "JSON text, not tensors; a folder of shards is read by the folder's name"),
)

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 120
_repr.maxlong = 40


class Elsewhere:
    """A file that is not on a disk of this machine; `str` names it in messages."""

    name: str
    suffix: str

    def with_name(self, name: str) -> Elsewhere:
        """The file of that name beside this one."""
        raise NotImplementedError(type(self).__name__)

    def exists(self) -> bool:
        """Whether it is there."""
        raise NotImplementedError(type(self).__name__)

    def opened(self) -> tuple[BinaryIO, int]:
        """A file object that reads it, and its size in bytes."""
        raise NotImplementedError(type(self).__name__)


Place: TypeAlias = Path | Elsewhere


def is_address(name: str) -> bool:
    """Whether this is the address of something on the web."""
    return name.startswith(("http://", "https://"))


def here(place: Place) -> Path:
    """The path of a file on this machine.

    Raises:
        ScantlingInputError: it is on another one.
    """
    if isinstance(place, Elsewhere):
        refuse(place, "is on another machine; fetch it first")
    return place


def exists(place: Place) -> bool:
    """Whether there is anything at that place, a link that leads nowhere included."""
    return place.exists() if isinstance(place, Elsewhere) else os.path.lexists(place)


def foreign_kind(head: bytes) -> str | None:
    """What a file is that begins with `head` and is not what its name says, with the way out; None if unknown."""
    # A header length below 4 GiB has four zero bytes here, and must not be taken for another format's magic.
    if not any(head[4:8]) and head[:3] not in (b"\x80\x04\x95", b"\x80\x05\x95"):
        return None
    if head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"<":
        return "an HTML or XML page, not weights: the download failed or asks for a login; download it again"
    return next((kind for magic, kind in _FOREIGN if head.startswith(magic)), None)


def open_regular(path: Place) -> tuple[BinaryIO, int]:
    """Open a regular file for reading; returns it and its size in bytes.

    Raises:
        ScantlingInputError: it is missing, unreadable, empty, a directory, a pipe or a device.
    """
    if isinstance(path, Elsewhere):
        return path.opened()
    try:
        # Asked before opening: opening a pipe would wait for its writer.
        file = path.open("rb") if stat.S_ISREG(path.stat().st_mode) else None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ScantlingInputError(f"{path}: cannot be read: {reason}") from None
    if file is None:
        refuse(path, "is not a regular file; give the path of one file")
    size = os.fstat(file.fileno()).st_size
    if size == 0:
        file.close()
        refuse(path, "is empty (0 bytes); download or save it again")
    return file, size


def shown(value: object) -> str:
    """``repr``, cut short: values from files go into messages through this."""
    return repr(value) if type(value) is str and len(value) <= 100 else _repr.repr(value)


def listed(names: Iterable[str]) -> str:
    """The first eight names, quoted, and how many there are besides."""
    names = list(names)
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(map(shown, names[:8])) + more


def refuse(path: Place, problem: str) -> NoReturn:
    """Raise the `ScantlingInputError` that says `problem` of the file at `path`."""
    raise ScantlingInputError(f"{path}: {problem}")
