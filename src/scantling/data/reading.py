"""Documents of files: text in blocks, pairs and conversations, with every fault named by its place."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from scantling.data.sources import Form, Source, Sources, open_dataset
from scantling.errors import ScantlingInputError, nearest, need

BLOCK_CHARS = 2**20
_LONGEST_BLOCK = 2**24
_PART_ROWS = 2**13


@dataclass(frozen=True)
class Part:
    """What one process reads at a time: a file, or a range of it.

    Attributes:
        name, path, form: of the source.
        version: the source's hash.
        start, end: bytes of JSON lines and TSV, row groups of a Parquet file, rows of a dataset; a text file is whole.
    """

    name: str
    path: str
    form: Form
    version: str
    start: int
    end: int


Messages: TypeAlias = Sequence[Mapping[str, Any]]
Place: TypeAlias = Callable[[], str]
"""Says where a record stands; asked only when a fault is told, as lines must be counted for it."""


@dataclass(frozen=True)
class Text:
    """A document: its text in blocks, so that a long one never lies in memory whole."""

    blocks: Iterable[str]


@dataclass(frozen=True)
class Pair:
    """A source and its target."""

    source: str
    target: str


@dataclass(frozen=True)
class Chat:
    """A conversation, and where it stands."""

    messages: Messages
    place: Place


Document: TypeAlias = Text | Pair | Chat


def own_text(document: Document) -> Iterable[str]:
    """What tells a document from others, whatever the tokenizer or the chat template; uses a `Text` up."""
    if isinstance(document, Text):
        return document.blocks
    if isinstance(document, Pair):
        return (document.source, "\0", document.target)
    return (json.dumps(document.messages, ensure_ascii=False, sort_keys=True),)


def parts_of(source: Source, size: int) -> Iterator[Part]:
    """The ranges of a source, of `size` bytes where its form has records that can be found in the middle."""
    total, step = source.size, size
    if source.form == "text":
        step = total
    elif source.form == "parquet":
        total, step = _parquet(source.path).num_row_groups, 1
    elif source.form == "dataset":
        step = _PART_ROWS
    for start in range(0, total, max(step, 1)):
        yield Part(source.name, source.path, source.form, source.sha256, start, min(start + step, total))


def read(part: Part, sources: Sources) -> Iterator[Document]:
    """The documents of a part, in order. A `Text` must be used up before the next document is asked for.

    Raises:
        ScantlingInputError: bytes that are no UTF-8, a line that is no JSON, a field that is missing or no text, or a
            file that cannot be read; each with its place.
    """
    try:
        if part.form == "text":
            blocks = _blocks(part, sources.encoding_errors)
            if sources.separator is None:
                yield Text(blocks)
            else:
                yield from _separated(blocks, sources.separator)
        elif part.form == "tsv":
            yield from _tsv(part, sources)
        else:
            records = _jsonl(part, sources) if part.form == "jsonl" else _rows(part, sources)
            for record, place in records:
                yield _document(record, place, sources)
    except OSError as error:
        raise ScantlingInputError(f"{part.name}: cannot be read: {error.strerror or error}") from None


def _blocks(part: Part, errors: str) -> Iterator[str]:
    """The text of a file, cut where one line ends and the next begins with a letter, as vocabularies cut there, too."""
    decoder, fed, held = codecs.getincrementaldecoder("utf-8")(errors), 0, ""
    with Path(part.path).open("rb") as file:
        while True:
            data = file.read(BLOCK_CHARS)
            data = data.removeprefix(codecs.BOM_UTF8) if fed == 0 else data
            fed = file.tell()
            try:
                held += decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                at = fed - len(error.object) + error.start
                _not_utf8(part.name, at, error.object[error.start])
            if not data:
                break
            if len(held) >= BLOCK_CHARS:
                cut = _line_between_letters(held)
                if cut or len(held) >= _LONGEST_BLOCK:
                    yield held[: cut or len(held)]
                    held = held[cut:] if cut else ""
    if held:
        yield held


def _line_between_letters(text: str) -> int:
    """The last place where a line begins with a letter after one that ends with a letter or digit; 0 for none."""
    place = text.rfind("\n", 1, len(text) - 1)
    while place > 0 and not (text[place - 1].isalnum() and text[place + 1].isalpha()):
        place = text.rfind("\n", 1, place)
    return place + 1 if place > 0 else 0


def _separated(blocks: Iterable[str], separator: str) -> Iterator[Text]:
    held = ""
    for block in blocks:
        *whole, held = (held + block).split(separator)
        yield from (Text((text,)) for text in whole)
    yield Text((held,))


def _lines(part: Part, errors: str) -> Iterator[tuple[str, int]]:
    """Lines that begin inside the part, with the byte at which each begins; blank ones are passed over."""
    with Path(part.path).open("rb") as file:
        if part.start:
            file.seek(part.start - 1)
            file.readline()
        while (at := file.tell()) < part.end:
            line = file.readline()
            line = line.removeprefix(codecs.BOM_UTF8) if at == 0 else line
            if not line.strip():
                continue
            try:
                yield line.decode(errors=errors).rstrip("\r\n"), at
            except UnicodeDecodeError as error:
                _not_utf8(part.name, at + error.start, line[error.start])


def _not_utf8(name: str, at: int, byte: int) -> NoReturn:
    raise ScantlingInputError(
        f"{name}: byte {at:,} (0x{byte:02x}) is no UTF-8; convert the file, or read such bytes as U+FFFD with "
        "--encoding-errors replace"
    ) from None


def _line_number(path: str, at: int) -> int:
    with Path(path).open("rb") as file:
        return file.read(at).count(b"\n") + 1


def _tsv(part: Part, sources: Sources) -> Iterator[Pair]:
    for line, at in _lines(part, sources.encoding_errors):
        source, tab, target = line.partition("\t")
        if not tab or "\t" in target or not source.strip() or not target.strip():
            raise ScantlingInputError(f"{_line_place(part, at)} is no pair: a source, one tab and a target are needed")
        yield Pair(source, target)


def _jsonl(part: Part, sources: Sources) -> Iterator[tuple[Any, Place]]:
    for line, at in _lines(part, sources.encoding_errors):
        place = partial(_line_place, part, at)
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ScantlingInputError(f"{place()} is no JSON: {error}") from None
        yield record, place


def _rows(part: Part, sources: Sources) -> Iterator[tuple[Any, Place]]:
    """Rows of a table."""
    columns = [column.partition(".")[0] for column in sources.columns]
    if part.form == "dataset":
        rows = _dataset(part.path, sources.split, part.version)
        _check_columns(part.name, columns, rows.column_names)
        for number in range(part.start, part.end):
            yield rows[number], partial(_row_place, part, number)
        return
    file = _parquet(part.path)
    _check_columns(part.name, columns, file.schema_arrow.names)
    first = sum(file.metadata.row_group(group).num_rows for group in range(part.start))
    for group in range(part.start, part.end):
        for number, row in enumerate(file.read_row_group(group, columns=columns).to_pylist(), first):
            yield row, partial(_row_place, part, number)


@lru_cache(maxsize=2)
def _dataset(name: str, split: str, version: str) -> Any:
    """A dataset, which is slow to open and has many parts; `version` keeps one that has changed from being used."""
    return open_dataset(name, split)


def _check_columns(name: str, wanted: Sequence[str], known: Sequence[str]) -> None:
    for column in wanted:
        if column not in known:
            raise ScantlingInputError(
                f"{name}: no column {column!r}; it has {', '.join(known)}{nearest(column, known)} (--field names one)"
            )


def _parquet(path: str) -> Any:
    library = need("pyarrow.parquet", "read Parquet files")
    try:
        return library.ParquetFile(path)
    except Exception as error:  # the library's own types, and OSError
        raise ScantlingInputError(
            f"{path}: is no Parquet file that can be read: {str(error).splitlines()[0]}"
        ) from None


def _line_place(part: Part, at: int) -> str:
    return f"{part.name}: line {_line_number(part.path, at)}"


def _row_place(part: Part, number: int) -> str:
    return f"{part.name}: row {number}"


def _document(record: Any, place: Place, sources: Sources) -> Document:
    values = [_field(record, name, place) for name in sources.columns]
    if sources.kind == "chat":
        if not isinstance(values[0], list) or not values[0]:
            raise ScantlingInputError(f"{place()}: field {sources.columns[0]!r} is no list of messages")
        return Chat(json.loads(_plain(json.dumps(values[0], ensure_ascii=False, default=str), place, sources)), place)
    for name, value in zip(sources.columns, values, strict=True):
        if not isinstance(value, str):
            raise ScantlingInputError(f"{place()}: field {name!r} is {type(value).__name__}, not text")
    texts = [_plain(value, place, sources) for value in values]
    if sources.kind == "text":
        return Text(texts)
    if not all(text.strip() for text in texts):
        raise ScantlingInputError(f"{place()}: the source or the target is empty")
    return Pair(*texts)


def _plain(text: str, place: Place, sources: Sources) -> str:
    """Text without halves of surrogate pairs, which JSON can spell and no encoding can carry."""
    if sources.encoding_errors == "replace":
        text = re.sub("[\ud800-\udfff]", "\ufffd", text)
    try:
        return text.encode().decode()
    except UnicodeEncodeError:
        raise ScantlingInputError(f"{place()}: has half of a surrogate pair, which is no character") from None


def _field(record: Any, name: str, place: Place) -> Any:
    """The value of a field; dots lead into nested records."""
    value = record
    for key in name.split("."):
        if not isinstance(value, Mapping) or key not in value:
            known = (
                ", ".join(map(str, value)) if isinstance(value, Mapping) else f"no fields, but {type(value).__name__}"
            )
            raise ScantlingInputError(f"{place()}: there is no field {name!r}; it has {known} (--field names another)")
        value = value[key]
    return value
