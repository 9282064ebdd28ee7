"""Commands as tests run them: in this process, with what they print."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scantling.cli.main import _run


def call(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    status = _run(list(args))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def answer(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    """What a command that goes well, and in silence, says in JSON."""
    status, out, err = call(capsys, *args, "--json")
    assert (status, err) == (0, "")
    return json.loads(out)
