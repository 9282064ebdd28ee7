"""Where text comes from: files and folders, JSON lines, tables, Hugging Face datasets, or Python's own library."""

from __future__ import annotations

import hashlib
import os
import stat
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from scantling.errors import ScantlingInputError, need

Kind = Literal["text", "pairs", "chat"]
Form = Literal["text", "jsonl", "tsv", "parquet", "dataset"]

FIELDS: Mapping[str, tuple[str, ...]] = {"text": ("text",), "pairs": ("source", "target"), "chat": ("messages",)}
"""What is read of each record of JSON lines and tables, unless the user names other fields."""

_FORMS: Mapping[str, Form] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".tsv": "tsv"}
_LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
_MAGIC = (
    (b"\x1f\x8b", "a gzip archive; unpack it first"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive; unpack it first"),
    (b"PK\x03\x04", "a zip archive; unpack it first"),
    (b"\xff\xfe", "UTF-16 text; convert it to UTF-8 first"),
    (b"\xfe\xff", "UTF-16 text; convert it to UTF-8 first"),
)
_HEAD_BYTES = 2**16


@dataclass(frozen=True)
class Sources:
    """What to read, and how.

    Attributes:
        paths: files, folders and names of Hugging Face datasets; empty means the Python standard library's sources.
        kind: text; pairs of source and target; or chat, lists of messages.
        fields: names of the fields of JSON lines, tables and datasets; with dots into nested ones; empty for the usual
            ones (`FIELDS`).
        encoding_errors: strict refuses bytes that are no UTF-8; replace reads each as U+FFFD.
        separator: text that stands between the documents of a text file; None where a file is one document.
        split: of Hugging Face datasets.
    """

    paths: tuple[str, ...] = ()
    kind: Kind = "text"
    fields: tuple[str, ...] = ()
    encoding_errors: Literal["strict", "replace"] = "strict"
    separator: str | None = None
    split: str = "train"

    def __post_init__(self) -> None:
        if self.kind not in FIELDS:
            raise ScantlingInputError(f"kind of data {self.kind!r}: use one of {', '.join(FIELDS)}")
        if self.fields and len(self.fields) != len(FIELDS[self.kind]):
            wanted, given = len(FIELDS[self.kind]), ", ".join(self.fields)
            raise ScantlingInputError(
                f"data of kind {self.kind} has {wanted} field(s), and the fields named are {given}"
            )
        if self.encoding_errors not in ("strict", "replace"):
            raise ScantlingInputError(f"encoding errors {self.encoding_errors!r}: use strict or replace")
        if self.separator == "":
            raise ScantlingInputError("the separator of documents is empty")
        if not self.paths and self.kind != "text":
            raise ScantlingInputError(f"data of kind {self.kind} is needed: name its files")

    @property
    def columns(self) -> tuple[str, ...]:
        """The fields that are read."""
        return self.fields or FIELDS[self.kind]

    @property
    def options(self) -> dict[str, Any]:
        """What decides how a file is read, as JSON."""
        return {
            "kind": self.kind,
            "fields": list(self.columns),
            "encoding_errors": self.encoding_errors,
            "separator": self.separator,
        }


@dataclass(frozen=True)
class Source:
    """A file, or a dataset, that was found.

    Attributes:
        name: as a user knows it.
        path: where it is; of a dataset from the hub its name.
        form: how it is read.
        size: in bytes; of a dataset in rows.
        sha256: of the bytes; of a dataset its fingerprint.
    """

    name: str
    path: str
    form: Form
    size: int
    sha256: str


def find_sources(sources: Sources) -> tuple[list[Source], list[str]]:
    """The files behind the paths, in a fixed order, and notes on what was left out.

    Of a folder all files are read that are not hidden, sorted by path; binary and empty ones are left out with a note.
    A file that is named itself must be readable, not empty and no binary. `.jsonl` and `.ndjson` are JSON lines,
    `.parquet` are tables, `.tsv` are pairs (text where the kind is text); every other file is text.

    Raises:
        ScantlingInputError: a path that does not exist or cannot be read, or nothing to read.
    """
    notes: list[str] = []
    if not sources.paths:
        found = [_source(path, str(path.relative_to(_library())), sources.kind) for path in stdlib_files()]
        return found, ["no data is named: the Python standard library's own sources are read, without its tests"]
    found = [source for path in sources.paths for source in _expand(path, sources, notes)]
    if not found:
        raise ScantlingInputError(f"there is no text in {', '.join(sources.paths)}")
    return found, notes


def _library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def stdlib_files() -> list[Path]:
    """The .py files of this Python's standard library, sorted, without its tests and without installed packages."""
    root = _library()
    found = [path for path in root.rglob("*.py") if not _LEFT_OUT.intersection(path.relative_to(root).parts)]
    return sorted((path for path in found if path.stat().st_size), key=lambda path: path.relative_to(root).parts)


def _expand(name: str, sources: Sources, notes: list[str]) -> list[Source]:
    path = Path(name)
    if path.is_dir():
        if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
            return [_dataset(name, sources)]
        return _folder(path, sources, notes)
    if path.exists():
        return [_named(path, sources.kind)]
    if name.count("/") == 1 and not name.startswith((".", "/", "~")) and not path.suffix:
        return [_dataset(name, sources)]
    raise ScantlingInputError(f"{name}: no such file or folder (a dataset on the hub is named OWNER/NAME)")


def _folder(folder: Path, sources: Sources, notes: list[str]) -> list[Source]:
    found, binary, empty = [], [], []
    for path in sorted(folder.rglob("*"), key=lambda path: path.relative_to(folder).parts):
        inner = path.relative_to(folder)
        if not path.is_file() or any(part.startswith(".") or part == "__pycache__" for part in inner.parts):
            continue
        head = _head(path)
        if not head:
            empty.append(path)
        elif _form(path, sources.kind) != "parquet" and _is_binary(head):
            binary.append(path)
        else:
            found.append(_source(path, str(path), sources.kind))
    for paths, what in ((binary, "binary"), (empty, "empty")):
        if paths:
            more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
            notes.append(f"{folder}: left out as {what}: {paths[0].relative_to(folder)}{more}")
    return found


def _named(path: Path, kind: Kind) -> Source:
    head = _head(path)
    if not head:
        raise ScantlingInputError(f"{path}: is empty (0 bytes); a file with text is needed")
    if _form(path, kind) != "parquet" and _is_binary(head):
        what = next((what for magic, what in _MAGIC if head.startswith(magic)), "a binary file, not text")
        raise ScantlingInputError(f"{path}: is {what}")
    return _source(path, str(path), kind)


def _form(path: Path, kind: Kind) -> Form:
    form = _FORMS.get(path.suffix.lower(), "text")
    if form == "tsv" and kind == "text":
        return "text"
    if form in ("text", "tsv") and kind == "chat":
        raise ScantlingInputError(f"{path}: conversations are read from .jsonl, .parquet and datasets, not from text")
    return "tsv" if form == "text" and kind == "pairs" else form


def _source(path: Path, name: str, kind: Kind) -> Source:
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return Source(name, str(path.absolute()), _form(path, kind), os.fstat(file.fileno()).st_size, digest)
    except OSError as error:
        _unreadable(path, error)


def _head(path: Path) -> bytes:
    try:
        # Asked before opening: opening a pipe would wait for its writer.
        if not stat.S_ISREG(path.stat().st_mode):
            raise ScantlingInputError(f"{path}: is not a regular file; give the path of a file or a folder")
        with path.open("rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError as error:
        _unreadable(path, error)


def _is_binary(head: bytes) -> bool:
    return b"\x00" in head or any(head.startswith(magic) for magic, _ in _MAGIC)


def _unreadable(path: Path, error: OSError) -> NoReturn:
    raise ScantlingInputError(f"{path}: cannot be read: {error.strerror}") from None


def _dataset(name: str, sources: Sources) -> Source:
    rows = open_dataset(name, sources.split)
    return Source(name, name, "dataset", len(rows), str(rows._fingerprint))


def open_dataset(name: str, split: str) -> Any:
    """The rows of a Hugging Face dataset: a folder that `save_to_disk` wrote, or a name on the hub.

    Raises:
        ScantlingInputError: it cannot be loaded, or has no such split.
        MissingExtra: the `datasets` library is not installed.
    """
    library = need("datasets", f"read the dataset {name!r}")
    local = Path(name).is_dir()
    try:
        library.disable_progress_bars()
        rows = library.load_from_disk(name) if local else library.load_dataset(name, split=split)
    except Exception as error:  # the library raises many unrelated types
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        what = f"dataset {name!r}" if local else f"{name!r}: no such file, and as a dataset on the hub it"
        raise ScantlingInputError(f"{what} cannot be loaded: {reason}") from None
    if isinstance(rows, Mapping):
        if split not in rows:
            raise ScantlingInputError(f"dataset {name!r} has no split {split!r}; it has {', '.join(rows)}")
        rows = rows[split]
    return rows
