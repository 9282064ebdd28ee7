"""The page on training data does what it shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from scantling.data import OBJECTIVES
from scantling.data.layout import MODES
from scantling.data.vocabulary import _ROLES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
LINES = (ROOT / "tests" / "data" / "cpython-license.txt").read_text().splitlines()


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    for number in range(30):
        Path("texts", f"{number}.txt").write_text("\n".join(LINES[number * 5 : number * 5 + 9]))
    names: dict[str, Any] = {}
    exec(code, names)
    assert capsys.readouterr().out.splitlines()[0].startswith("(4, 64) ")
    assert next(names["rest"]).cursor["step"] == 4
    assert names["judged"] == names["corpus"].held_out.tokens + len(names["corpus"].held_out)
    assert 0.0 < names["shared"] < 1.0
    assert {path.suffix for path in Path("corpus").iterdir()} == {".json", ".bin", ".docs"}


def test_every_choice_is_on_the_page() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert set(rows) == set(OBJECTIVES) | set(MODES)
    for purpose in _ROLES:
        assert f"`{purpose}`" in PAGE
