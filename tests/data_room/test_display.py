"""How far tokenising is, told on standard error only."""

from __future__ import annotations

import sys

import pytest

from scantling.data import Progress, shown_progress


def test_plain_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with shown_progress() as report:
        for done in range(1, 101):
            report(Progress(done, 100, done * 1_000))
    told = capsys.readouterr()
    assert told.out == ""
    lines = told.err.splitlines()
    assert len(lines) == 10
    assert lines[0] == "tokenising: 10 of 100 shards, 10,000 tokens"
    assert lines[-1] == "tokenising: 100 of 100 shards, 100,000 tokens"


def test_a_bar_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with shown_progress() as report:
        report(Progress(1, 2, 12_300))
    told = capsys.readouterr()
    assert told.out == ""
    assert "1/2" in told.err
    assert "12.3" in told.err
