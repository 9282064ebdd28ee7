"""A worker, seen from the process that asks it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import suppress
from types import TracebackType
from typing import Any

from scantling.errors import ScantlingError


class Child:
    """One worker process; a context manager that ends it."""

    def __init__(self) -> None:
        # What libraries print is kept for the sentence of a failure, and read by nobody else.
        self._noise = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        command = [sys.executable, "-m", "scantling.benches.worker"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._noise, text=True, encoding="utf-8"
        )

    def ask(self, do: str, **asked: Any) -> dict[str, Any]:
        """What the worker answers.

        Raises:
            ScantlingError: it could not do it, or it ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **asked}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._process.wait()
            self._noise.seek(0)
            last = [text.strip() for text in self._noise.read().splitlines() if text.strip()][-1:]
            raise ScantlingError(f"its process ended with status {self._process.returncode}: {''.join(last)[:160]}")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise ScantlingError(str(found["error"]))
        return found

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End it."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                # What it was not able to read any more.
                with suppress(BrokenPipeError):
                    stream.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._noise.close()
