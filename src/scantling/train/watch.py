"""What a run tells: records to files, and to whoever looks at it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

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
    """

    def __init__(self, run: Path, after: int) -> None:
        self._path = run / METRICS
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in _whole_lines(self._path) if json.loads(line).get("step", 0) <= after] if after else []
        fresh = self._path.with_name(f".{METRICS}.part")
        fresh.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        fresh.replace(self._path)
        self._file = self._path.open("a", encoding="utf-8")

    def record(self, record: Record) -> None:
        """Write a line; it is with the system before the next update begins."""
        self._file.write(json.dumps(_plain(record)) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The records of a run; a last line that was cut off is left out."""
    return [json.loads(line) for line in _whole_lines(run / METRICS)]


def _whole_lines(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    whole, _, _ = text.rpartition("\n")
    return whole.splitlines()


def _plain(value: Any) -> Any:
    """The same with numbers that JSON does not have as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
