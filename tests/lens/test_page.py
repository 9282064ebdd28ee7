"""docs/lens.md shows what the commands print, and the README what docs/lens.md shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.lens.page import BLOCK, PATH, page, pieces

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_every_example_has_its_output() -> None:
    found = list(BLOCK.finditer(PATH.read_text(encoding="utf-8")))
    assert len(found) == 6
    assert all(block[0].count("\n") > 5 for block in found)


@pytest.mark.slow
def test_the_page_is_up_to_date() -> None:
    """``make docs``, or ``python -m tests.lens.page --write``, rewrites it. Numbers may be rounded apart."""
    words, numbers = pieces(PATH.read_text(encoding="utf-8"))
    wanted_words, wanted = pieces(page())
    assert words == wanted_words
    assert numbers == pytest.approx(wanted, rel=0.02, abs=2e-3)


def test_the_readme_shows_a_part_of_it() -> None:
    blocks = [block for _, block in re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)]
    (block,) = (block for block in blocks if "$ scantling lens" in block)
    lines = [line for line in block.splitlines() if line != "..."]
    assert len(lines) > 5
    assert set(lines) <= set(PATH.read_text(encoding="utf-8").splitlines())
