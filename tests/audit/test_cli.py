"""`scantling audit` as a user meets it: tables, JSON, the page, exit status, one sentence for every wrong input."""

from __future__ import annotations

import html
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import GOLDEN

import scantling as sc
from scantling.audits import Finding, Report, Verdict
from scantling.audits.finding import Verdict as AnyVerdict
from scantling.audits.probes import PROBES
from scantling.audits.report import html as page_of
from scantling.cli.main import _run

LLAMA = str(GOLDEN / "tiny" / "llama-gqa")
FAST = ("--probe", "future", "--probe", "order")


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = _run(["audit", *words])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_sound_model_ends_with_status_0(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(capsys, LLAMA, *FAST)
    assert status == 0
    assert "llama-gqa: 2 clean" in out
    assert "no logit depends on a later token" in out
    assert err.splitlines() == ["1/2 future", "2/2 order"]


def test_json_has_the_keys_that_others_read(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, LLAMA, *FAST, "--json")
    told = json.loads(out)
    assert status == 0
    assert {"name", "counts", "findings"} <= told.keys()
    assert sum(told["counts"].values()) == len(told["findings"])
    for finding in told["findings"]:
        assert {"probe", "verdict", "size", "where", "message"} <= finding.keys()
        assert finding["verdict"] in {str(v) for v in AnyVerdict}
    assert {f["probe"] for f in told["findings"]} == {"future", "order"}


def test_a_defect_ends_with_status_1_and_shows_its_smallest_input(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, LLAMA, "--library", "transformers", "--probe", "packing")
    assert status == 1
    assert "another first document moves the second" in out
    assert "smallest input" in out
    assert re.search(r"document_ids: \[0, 0, 1, 1\]", out)
    status, out, _ = call(capsys, LLAMA, "--library", "transformers", "--probe", "packing", "--json")
    assert status == 1
    assert json.loads(out)["counts"]["defect"] == 3


def test_two_implementations(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, _ = call(capsys, LLAMA, "--against", "transformers", "--probe", "reference")
    assert status == 0
    assert "both implementations give the same logits" in out


def test_cards_are_audited_with_initial_weights(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, "tiny", "--probe", "future", "--tokens", "6", "--longest", "8")
    assert status == 0
    assert "initial weights" in out


def test_the_page_stands_alone_and_says_what_the_table_says(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "audit.html"
    status, out, err = call(capsys, LLAMA, *FAST, "--json", "--html", str(path))
    page = path.read_text()
    assert status == 0
    assert f"page: {path}" in err
    for finding in json.loads(out)["findings"]:
        assert html.escape(finding["message"]) in page
    assert page.count("<svg") == 1
    assert not re.search(r"(?:src|href)=|<script|https?://", page)
    assert list(tmp_path.iterdir()) == [path]


def test_a_page_escapes_what_others_wrote() -> None:
    nasty = '<script>alert("x")</script>&'
    data = {nasty: nasty, "curve": [[0, 1.0], [1, 2.0]], "grid": ["x.", "xx"], "flat": [[0, 1.0]], "by": {nasty: 1.5}}
    finding = Finding("future", Verdict.DEFECT, nasty, float("inf"), nasty, nasty, {nasty: [nasty]}, data)
    page = page_of(Report(nasty, ("future", "other"), (finding,)))
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 7
    assert "polyline" in page
    assert page.count("<rect") == 4
    assert finding.as_json()["size"] == "inf"
    json.dumps(finding.as_json(), allow_nan=False)


def test_certify_counts_and_can_be_asked_of_one_probe(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(capsys, "--certify", "--probe", "ends")
    plants = PROBES["ends"].plants
    faults = sum(plant.faulty for plant in plants)
    assert status == 0
    assert f"1 probes: {faults} of {faults} faults caught, {len(plants) - faults} of" in out
    assert len(err.splitlines()) == len(plants)
    status, out, _ = call(capsys, "--certify", "--probe", "ends", "--json")
    told = json.loads(out)
    assert status == 0
    assert told == {
        "rows": [{"probe": "ends", "planted": faults, "caught": faults, "near": len(plants) - faults, "let_pass": 3}],
        "failed": [],
    }


def test_certify_ends_with_status_1_where_a_fault_is_missed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    blind = replace(PROBES["ends"], run=lambda subject, effort: [Finding("ends", Verdict.CLEAN, "looked away")])
    monkeypatch.setitem(PROBES, "ends", blind)
    status, out, _ = call(capsys, "--certify", "--probe", "ends")
    assert status == 1
    assert "ends: padding is scored: missed" in out
    assert "0 of 4 faults caught, 2 of 3 near-faults let pass" in out


@pytest.mark.parametrize("library", ["scantling", "transformers"])
def test_a_hub_id_is_fetched_at_its_revision(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    import huggingface_hub

    asked = []

    def fetched(repo: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((repo, revision, "*.safetensors" in allow_patterns))
        return LLAMA

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    words = ("someone/a-model", "--revision", "v2", "--library", library, "--probe", "future")
    status, out, _ = call(capsys, *words)
    assert status == 0
    assert "no logit depends on a later token" in out
    assert set(asked) == {("someone/a-model", "v2", True)}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("nothing-of-that-name",), "nothing-of-that-name"),
        ((LLAMA, "--probe", "pading"), "did you mean 'padding'"),
        ((LLAMA, "--certify"), "takes no MODEL"),
        ((LLAMA, "--tokens", "50", "--longest", "20"), "--longest 20 is less than --tokens 50"),
        ((LLAMA, "--library", "llama.cpp"), "llama.cpp"),
        (("--library", "transformers"), "name one"),
        ((LLAMA, "--tokens", "1"), "1"),
        ((LLAMA, "--dtype", "int3"), "int3"),
        ((LLAMA, *FAST, "--html", "/nowhere/at/all.html"), "/nowhere"),
    ],
)
def test_wrong_usage_gets_one_sentence(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str) -> None:
    status, out, err = call(capsys, *words)
    assert status == 2
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith("error: ")
    assert says in last
    assert "Traceback" not in err


def test_a_checkpoint_without_what_it_needs_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "empty"
    shutil.copytree(LLAMA, folder)
    (folder / "model.safetensors").unlink()
    status, out, err = call(capsys, str(folder), *FAST)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")


def test_audit_is_a_public_name() -> None:
    assert "audit" in sc.__all__
    assert callable(sc.audit)
    told: Any = sc.audit(sc.load(LLAMA), probes=["order"])
    assert isinstance(told, Report)
