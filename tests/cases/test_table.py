"""The table of cases: complete, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NUMBERS = {
    "PAR": (1, 3, 4, 6, 7, 9, 10, 12, 13, 14, 16),
    "FLP": (1, 3, 4, 5, 7, 9, 11, 13, 14, 15),
    "CFG": (1, 3, 4, 6, 7, 8, 10, 12, 13, 15, 16, 17, 19, 21, 22),
    "LOAD": (1, 2, 5, 8, 9, 12, 13, 14, 16, 18, 19, 20, 21, 23, 24, 25, 27, 28, 29, 30),
    "MASK": (1, 3, 4, 5, 6, 8, 9, 10, 11, 15),
    "CACHE": (1, 2, 3, 6, 7),
    "NUM": (1, 3, 5, 6, 7, 10, 11, 12, 13, 14, 16, 18, 19, 20),
    "TRAIN": (1, 3, 5, 6, 7, 8, 9, 11, 13, 15),
    "GEN": (1, 2, 4, 5, 7, 9, 10, 12, 14, 16, 17, 19, 20, 22, 23, 24),
    "EVAL": (1, 3, 4, 6),
    "FALSE": (1, 3, 5, 6, 8),
    "MEM": (1, 3, 4, 6, 8),
    "LENS": (1, 3, 4),
}
CASES = [f"{kind}-{number:02}" for kind, numbers in NUMBERS.items() for number in numbers]


def table() -> list[tuple[str, list[str], str]]:
    """Case, its tests, and what is open."""
    lines = (Path(__file__).parent / "README.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if re.match(r"\| [A-Z]+-\d", line)]
    return [(case, re.findall(r"`([^`]+::[^`]+)`", tests), left) for case, tests, left in rows]


@cache
def names(path: Path) -> set[str]:
    """``function`` and ``Class::method`` of every test in a file."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
    return found


def test_every_case_is_listed_once() -> None:
    assert [case for case, _, _ in table()] == CASES


@pytest.mark.parametrize(("case", "tests", "left"), table(), ids=[row[0] for row in table()])
def test_a_case_has_tests_that_exist_or_says_what_it_waits_for(case: str, tests: list[str], left: str) -> None:
    assert tests or left
    assert not left or left.startswith("later: ")
    for test in tests:
        file, _, name = test.partition("::")
        assert name.startswith(("test_", "Test")), test
        assert name in names(ROOT / file), test


def test_cases_named_in_a_docstring_are_those_of_the_table() -> None:
    """A test of this folder that says which case it holds stands in that case's row, and the other way round."""
    said = set()
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and path != Path(__file__):
                cases, _, _ = (ast.get_docstring(node) or "").partition(":")
                test = f"tests/cases/{path.name}::{node.name}"
                said |= {(case, test) for case in re.findall(r"[A-Z]+-\d\d", cases) if node.name.startswith("test_")}
    listed = {(case, test) for case, tests, _ in table() for test in tests if test.startswith("tests/cases/")}
    assert listed == said
