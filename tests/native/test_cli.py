"""`scantling generate --engine`."""

from __future__ import annotations

import json

import pytest

from scantling.cli.main import _run
from scantling.native import library

pytestmark = pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))
PROMPT = ["generate", "The three primary colours are", "--max-new-tokens", "12", "--json"]


def test_the_packed_engine_writes_the_text_of_pytorch(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(PROMPT) == 0
    plain = json.loads(capsys.readouterr().out)
    assert _run([*PROMPT, "--engine", "packed"]) == 0
    packed = json.loads(capsys.readouterr().out)
    assert packed["text"] == plain["text"]
    # 30 layers of keys and values, 3 heads of 64 floats; 5 and 12 positions fill two blocks of 16.
    assert packed["cache_bytes"] == packed["predicted"]["cache_bytes"] == 30 * 2 * 3 * 64 * 4 * 32
    # 106,168,320 numbers in blocks of 32 in 20 bytes, and a table of 49,152 x 576 in blocks of 34.
    blocks = 106_168_320 // 32 * 20 + 49_152 * 576 // 32 * 34
    assert 0 <= packed["predicted"]["weights_bytes"] - blocks - 4 * 61 * 576 < 64 * 300


def test_a_card_without_a_compiled_pass_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    from tests.conftest import GOLDEN

    assert _run(["generate", "x", "-m", str(GOLDEN / "tiny" / "deepseek-v2"), "--engine", "packed"]) == 2
    assert "the compiled pass does not know" in capsys.readouterr().err
