"""What a run tells: records to files, and to whoever looks at it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec

from scantling.errors import ScantlingInputError

METRICS = "metrics.jsonl"

Record = Mapping[str, Any]
"""Plain JSON with its `kind`: ``begin``, ``step``, ``evaluation``, ``sample``, ``saved``, ``note`` or ``end``."""


class Watcher(Protocol):
    """Gets every record of a run, in order."""

    def record(self, record: Record) -> None:
        """Take one."""

    def close(self) -> None:
        """There are no more."""


class Metrics:
    """Records as lines of JSON in RUN/metrics.jsonl.

    A run that goes on from update `after` drops the lines of later ones, which it will write again.

    Raises:
        ScantlingInputError: the file of the run that goes on is damaged, or the disk does not take a line.
    """

    def __init__(self, run: Path, after: int) -> None:
        self._path = run / METRICS
        try:
            self._begin(run, after)
        except OSError as error:
            raise self._full(error) from None

    def _begin(self, run: Path, after: int) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = [json.dumps(r) for r in read_metrics(run) if r.get("step", 0) <= after] if after else []
        fresh = self._path.with_name(f".{METRICS}.part")
        fresh.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        fresh.replace(self._path)
        self._file = self._path.open("a", encoding="utf-8")

    def record(self, record: Record) -> None:
        """Write a line; it is with the system before the next update begins."""
        try:
            self._file.write(json.dumps(plain_json(record)) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._full(error) from None

    def close(self) -> None:
        """Close the file; a line that the disk did not take was told of before."""
        with suppress(OSError):
            self._file.close()

    def _full(self, error: OSError) -> ScantlingInputError:
        return ScantlingInputError(
            f"{self._path}: cannot be written: {error.strerror}; the run ends, and its checkpoints are as they were"
        )


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The records of a run; a last line that was cut off is left out.

    Raises:
        ScantlingInputError: another line is no record.
    """
    path = run / METRICS
    try:
        whole, _, _ = path.read_bytes().rpartition(b"\n")
    except FileNotFoundError:
        return []
    records = []
    for number, line in enumerate(whole.split(b"\n") if whole else [], 1):
        try:
            records.append(msgspec.json.decode(line, type=dict[str, Any]))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise ScantlingInputError(
                f"{path}: line {number} is no record of a run; move the file away, and the run goes on with a new one"
            ) from None
    return records


def plain_json(value: Any) -> Any:
    """The same with numbers that JSON does not have as text, and tuples as lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: plain_json(item) for key, item in value.items()}
    return [plain_json(item) for item in value] if isinstance(value, list | tuple) else value
