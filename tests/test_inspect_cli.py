"""`scantling inspect` as a user meets it: text, JSON, the card, exit status, and what goes to which stream."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests import inspect_page
from tests.checkpoint.web import served
from tests.conftest import DATA, GOLDEN

import scantling as sc
from scantling.checkpoint.inspect.codes import CODES
from scantling.cli.main import _run

TINY = GOLDEN / "tiny"


def call(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    status = _run(["inspect", *args])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def answer(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    status, out, err = call(capsys, *args, "--json")
    assert (status, err) == (0, "")
    return json.loads(out)


def test_the_page_is_up_to_date() -> None:
    """``make docs``, or ``python -m tests.inspect_page --write``, rewrites it."""
    assert inspect_page.PATH.read_text() == inspect_page.page()
    assert all(f"| `{code}` |" in inspect_page.page() for code in CODES)


def test_the_readme_shows_what_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    root = inspect_page.PATH.parents[1]
    (block,) = re.findall(r"^```\n(\$ scantling inspect .*?)^```", (root / "README.md").read_text(), re.M | re.S)
    command, *lines = block.splitlines()
    monkeypatch.chdir(root)
    status, out, _ = call(capsys, *command.split()[3:])
    assert status == 1
    shown = {line.rstrip() for line in lines if line and line != "..."}
    assert len(shown) == 4
    assert {" ".join(line.split()) for line in shown} <= {" ".join(line.split()) for line in out.splitlines()}


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    data = answer(capsys, str(TINY / "qwen3"))
    assert data["findings"] == []
    assert data["complete"] is True
    assert (
        data["total_params"]
        == data["numbers"]
        == sum(data["by_part"].values())
        == sc.assemble(sc.card(TINY / "qwen3")).params
    )
    assert data["card"]["attention"]["n_heads"] == 6
    facts = {fact["key"]: fact for fact in data["facts"]}
    assert facts["d_head"] == {"key": "d_head", "what": "head size", "tensors": 14, "config": 14, "agree": True}
    assert facts["norm"]["tensors"] == "unknown"
    assert facts["norm"]["config"] == "rmsnorm"
    assert facts["norm"]["agree"] is None
    assert data["bytes"] == sum(kind["bytes"] for kind in data["dtypes"])
    assert data["files"][0]["bytes"] == (TINY / "qwen3" / "model.safetensors").stat().st_size
    assert data["checklist"]["residual order"] == "pre-norm"
    lines = data["reproduction"]
    assert list(lines) == [
        "architecture", "layers", "width", "attention", "position", "norm", "ffn", "training", "inference",
    ]  # fmt: skip
    assert lines["training"] == lines["inference"]["cache"] == "unknown"
    assert lines["inference"]["quantisation"] == "none"
    assert (lines["attention"]["heads"], lines["attention"]["head_dim"]) == (6, 14)


def test_findings_in_json_and_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(capsys, str(DATA / "checkpoints" / "shards-one-missing"), "--json")
    assert (status, err) == (1, "")
    data = json.loads(out)
    (finding,) = data["findings"]
    assert finding["code"] == "shard_missing"
    assert finding["severity"] == "error"
    assert set(finding) == {"code", "severity", "message", "cause"}
    assert data["complete"] is False
    assert data["card"]["d_model"] == 32
    status, out, _ = call(capsys, str(DATA / "checkpoints" / "compiled-ddp-prefix"), "--json")
    assert status == 0
    assert [finding["severity"] for finding in json.loads(out)["findings"]] == ["warning"]


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(capsys, str(TINY / "mixtral"))
    assert (status, err) == (0, "")
    assert "no findings" in out
    assert all(line == line.rstrip() for line in out.splitlines())
    rows = {line[:26].strip(): line[26:].split() for line in out.splitlines() if line.startswith(" ")}
    assert rows["experts"] == ["4", "4", "yes"]
    assert rows["heads"][:1] == ["unknown"]
    status, out, _ = call(capsys, str(DATA / "checkpoints" / "shards-extra-not-in-index"))
    assert status == 1
    assert "error: index_extra: 1 tensors" in out
    assert "likely cause: " in out


def test_the_card_on_standard_output_is_a_card(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, err = call(capsys, str(TINY / "deepseek-v3"), "--card")
    assert (status, err) == (0, "")
    path = tmp_path / "printed.yaml"
    path.write_text(out)
    assert sc.assemble(sc.card(path)) == sc.assemble(sc.card(TINY / "deepseek-v3"))
    assert "training: unknown\n" in out
    assert _run(["count", str(path), "--json"]) == 0
    (counted,) = json.loads(capsys.readouterr().out)
    data = answer(capsys, str(TINY / "deepseek-v3"))
    assert counted["total_params"] == data["total_params"]
    # The shift of the choice of experts is stored, and no gradient trains it.
    assert counted["total_params"] + counted["buffers"] == data["numbers"] == 58_494


def test_a_card_from_tensors_alone_says_what_it_lacks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shutil.copyfile(TINY / "llama-gqa" / "model.safetensors", tmp_path / "model.safetensors")
    status, out, err = call(capsys, str(tmp_path), "--card")
    assert status == 1
    assert "n_heads: unknown" in out
    assert err.splitlines()[-1].startswith("error: this is no complete card: there is no config")
    path = tmp_path / "printed.yaml"
    path.write_text(out)
    with pytest.raises(sc.ScantlingInputError):
        sc.card(path)


def test_findings_go_to_standard_error_beside_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(capsys, str(DATA / "checkpoints" / "compiled-ddp-prefix"), "--card")
    assert status == 0
    assert out.startswith("name: compiled-ddp-prefix\n")
    assert err.startswith("warning: names such as")


def test_tensors_are_rows_and_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """GGUF lists dimensions fastest first; here they are rows and columns."""
    path = DATA / "checkpoints" / "gguf-llama-gqa" / "model.gguf"
    found = {row["name"]: row for row in answer(capsys, str(path), "--tensors")["tensor_list"]}
    shapes = [found[name]["shape"] for name in ("token_embd.weight", "blk.0.ffn_down.weight", "blk.0.attn_k.weight")]
    assert shapes == [[64, 128], [128, 128], [32, 128]]
    assert found["blk.1.attn_k.weight"]["is"] == "decoder.blocks.1.attn.k.weight"
    _, out, _ = call(capsys, str(TINY / "gpt2"), "--tensors")
    (line,) = (line for line in out.splitlines() if "h.1.attn.c_attn.weight" in line)
    assert "decoder.blocks.1.attn.q.weight + decoder.blocks.1.attn.k.weight" in line


def test_checksums(capsys: pytest.CaptureFixture[str]) -> None:
    folder = DATA / "checkpoints" / "shards-good"
    status, out, err = call(capsys, str(folder), "--hash", "--json")
    assert status == 0
    files = {file["name"]: file["sha256"] for file in json.loads(out)["files"]}
    assert files == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.safetensors")}
    assert err.splitlines() == [f"sha256 of {name}" for name in sorted(files)]


def test_an_address(capsys: pytest.CaptureFixture[str]) -> None:
    with served(TINY) as server:
        data = answer(capsys, server.address + "llama-gqa")
    assert data["path"] == server.address + "llama-gqa/"
    assert data["qk_layout"] == "not looked at: the rows are on another machine"
    assert data["total_params"] == 50_064


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt2", "gpt2 is a preset and has no checkpoint: `scantling card gpt2` prints it"),
        ("absent", "absent: no such file or folder"),
        ("", "the path is empty"),
        ("absent/model.safetensors", "no such file or folder"),
        (str(TINY), "holds no weights"),
    ],
)
def test_what_is_no_checkpoint(name: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(capsys, name)
    assert (status, out) == (2, "")
    assert words in err
    assert len(err.splitlines()) == 1


def test_a_card_is_no_checkpoint(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "card.yaml").write_text("name: x\n")
    status, _, err = call(capsys, str(tmp_path / "card.yaml"))
    assert status == 2
    assert "a card has no tensors" in err


def test_a_long_header_needs_the_flag(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    body = b"{}" + b" " * (17 * 2**20)
    path.write_bytes(len(body).to_bytes(8, "little") + body)
    assert call(capsys, str(path))[0] == 2
    assert call(capsys, str(path), "--big")[0] == 0


def test_an_index_and_a_config_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    folder = DATA / "checkpoints" / "shards-good"
    whole = answer(capsys, str(folder))
    for name in ("model.safetensors.index.json", "config.json"):
        assert answer(capsys, str(folder / name))["facts"] == whole["facts"]
    assert answer(capsys, str(GOLDEN / "configs" / "llama-7b.json"))["card"]["n_layers"] == 32


def test_python() -> None:
    found = sc.inspect(TINY / "bert")
    assert isinstance(found, sc.Inspection)
    assert found.card is not None
    assert found.card.family == "encoder"
    assert found.findings == ()
