"""YAML that a user wrote, read without trust: text of a bounded file to plain values, each error one sentence."""

from __future__ import annotations

import reprlib
import stat
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import ConstructorError, SafeConstructor
from ruamel.yaml.error import YAMLError
from ruamel.yaml.events import AliasEvent, CollectionStartEvent, DocumentStartEvent, ScalarEvent

from scantling.errors import ScantlingInputError

MAX_BYTES = 256 * 1024
MAX_DEPTH = 32
MAX_VALUES = 10_000
MAX_SCALAR = 2048

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxlong = _repr.maxother = 60


def shown(value: object) -> str:
    """``repr``, cut short: values from files go into messages through this."""
    text = _repr.repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def file_text(path: Path, what: str) -> str:
    """The text of a YAML file; `what` says what it should be (``a card``).

    Raises:
        ScantlingInputError: no such file, no regular one, too large, or not UTF-8.
    """
    try:
        info = path.stat()
        if info.st_size > MAX_BYTES:
            raise ScantlingInputError(f"{path}: {info.st_size} bytes; {what} has at most {MAX_BYTES}")
        # Asked before opening: opening a pipe would wait for its writer.
        if not stat.S_ISREG(info.st_mode):
            raise ScantlingInputError(f"{path}: not a regular file; {what} is a YAML text file")
        return path.read_text(encoding="utf-8")
    except ScantlingInputError:
        raise
    except UnicodeDecodeError as error:
        raise ScantlingInputError(f"{path}: not UTF-8 at byte {error.start}; {what} is a YAML text file") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ScantlingInputError(f"{path}: cannot be read: {reason}") from None


class _Constructor(SafeConstructor):
    """Says where a value stands that looks like a number or date and is none."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, ArithmeticError) as error:
            raise ConstructorError(None, None, str(error), node.start_mark) from None


def parse(text: str, where: str, what: str) -> Any:
    """Plain values of YAML 1.2 text; `where` names it in messages and `what` says what it should be (``a card``).

    Raises:
        ScantlingInputError: too long or deep, not YAML, or with anchors, tags, merge keys or another dialect.
    """
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise ScantlingInputError(f"{where}: longer than {MAX_BYTES} bytes, the limit of {what}")
    try:
        _check_events(text, where, what)
        yaml = YAML(typ="safe", pure=True)
        yaml.Constructor = _Constructor
        return yaml.load(text)
    except YAMLError as error:
        raise ScantlingInputError(f"{where}: not valid YAML{_line(error, text)}: {_problem(error)}") from None
    except RecursionError as error:
        raise ScantlingInputError(f"{where}: not valid YAML: {error}") from None


def _line(error: YAMLError, text: str) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark:
        return f" at line {mark.line + 1}, column {mark.column + 1}"
    position = getattr(error, "position", None)
    return "" if position is None else f" at line {text.count(chr(10), 0, position) + 1}"


def _problem(error: YAMLError) -> str:
    text = getattr(error, "problem", None) or str(error)
    return text.splitlines()[0][:200]


def _check_events(text: str, where: str, what: str) -> None:
    """Refuse aliases, tags, other dialects, deep nesting and sheer numbers before anything is built from them."""
    depth = 0
    for n, event in enumerate(YAML(typ="safe", pure=True).parse(text)):
        line = event.start_mark.line + 1
        if n > MAX_VALUES:
            raise ScantlingInputError(f"{where}: line {line} goes on past {MAX_VALUES} keys and values")
        if isinstance(event, DocumentStartEvent) and (event.tags or event.version not in (None, (1, 2))):
            raise ScantlingInputError(f"{where}: line {line} follows a directive; {what} is plain YAML 1.2")
        if isinstance(event, AliasEvent) or getattr(event, "anchor", None):
            raise ScantlingInputError(f"{where}: line {line} uses an anchor or alias; write the value out")
        if isinstance(event, ScalarEvent | CollectionStartEvent) and event.tag:
            raise ScantlingInputError(
                f"{where}: line {line} uses the tag {shown(event.tag)}; {what} has plain values only"
            )
        if isinstance(event, ScalarEvent) and event.implicit[0] and event.value == "<<":
            raise ScantlingInputError(f"{where}: line {line} uses the merge key <<; write the keys out")
        if isinstance(event, ScalarEvent) and len(event.value) > MAX_SCALAR:
            raise ScantlingInputError(f"{where}: line {line} has a value of more than {MAX_SCALAR} characters")
        depth += isinstance(event, CollectionStartEvent)
        if depth > MAX_DEPTH:
            raise ScantlingInputError(f"{where}: line {line} is nested deeper than {MAX_DEPTH} levels")
        depth -= type(event).__name__ in ("MappingEndEvent", "SequenceEndEvent")
