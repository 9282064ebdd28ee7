"""`scantling measure` at the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import GOLDEN

from scantling.cli import measure as verb
from scantling.cli.main import _run
from scantling.measure import FIGURES

SHORT = ("--tokens", "8,16", "--steps", "1", "--passes", "1")


def figures(capsys: pytest.CaptureFixture[str], *asked: str) -> dict[str, Any]:
    assert _run(["measure", *asked, "--json"]) == 0
    return {figure["name"]: figure for figure in json.loads(capsys.readouterr().out)["figures"]}


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "mixtral"])
def test_four_models_of_all_families(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(capsys, str(GOLDEN / "tiny" / name), *SHORT)
    # None of them has layers by fours.
    wanted = set(FIGURES) - (set() if name == "mixtral" else {"routing"}) - {"shape"}
    assert set(found) == wanted
    assert found["parameters"]["equal"] is True
    assert all(row["equal"] for row in found["checklist"]["rows"])
    for figure in found.values():
        assert figure["rows"]
    for row in found["memory"]["rows"]:
        assert row["peak bytes"] > 0
        assert row["predicted"] > 0


def test_names_are_those_of_the_figures() -> None:
    assert tuple(FIGURES) == verb.NAMES


def test_what_allocates_nothing_works_at_any_size(capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(capsys, "llama-3.1-405b", "--only", "parameters,checklist")
    assert [*found] == ["checklist", "parameters"]
    assert sum(row["built"] for row in found["parameters"]["rows"]) == 405_853_388_800


def test_what_does_not_fit_is_refused_with_its_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["measure", "llama-3.1-405b"]) == 2
    error = capsys.readouterr().err
    # The weights alone in float32, and what the figures need besides.
    needed = int(error.split(" needs about ")[1].split(" ")[0].replace(",", ""))
    assert needed > 4 * 405_853_388_800
    assert "are free: --only checklist,parameters needs none" in error


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("tiny", "--only", "tme"), "--only: no figure 'tme'; did you mean 'time'?"),
        (("tiny", "--only", "routing"), "--only routing: tiny has no such figure"),
        (("tiny", "--tokens", "8"), "at least two different lengths"),
        (("tiny", "--tokens", "8,x"), "at least two different lengths"),
        (("gpt2", "--tokens", "8,2048"), "rows of 2,048 are asked for and gpt2 has"),
        (("tiny", "--device", "meta"), "device 'meta' holds no values"),
        (("tiny", "--html", "/no/such/folder/x.html"), "the folder /no/such/folder does not exist"),
    ],
)
def test_bad_input_is_one_sentence(asked: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["measure", *asked]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert captured.err.count("\n") == 1


def test_a_table_plots_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plots, page = tmp_path / "plots", tmp_path / "page.html"
    asked = ("--only", "memory,outliers", *SHORT, "--png", str(plots), "--html", str(page))
    assert _run(["measure", "tiny", *asked]) == 0
    out = capsys.readouterr().out
    assert "tiny: Peak memory of a pass against T" in out
    assert "kurtosis" in out
    assert sorted(path.name for path in plots.iterdir()) == ["memory.png", "outliers.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in plots.iterdir())
    text = page.read_text(encoding="utf-8")
    assert text.count("<h2>") == text.count("data:image/png;base64") == 2
    assert "http" not in text.replace("http-equiv", "")
