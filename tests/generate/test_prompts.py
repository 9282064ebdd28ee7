"""Prompts from a file: what each gives alone, resumed after a kill at any byte, refused where it is something else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import GOLDEN
from tests.test_cli import call
from tests.test_translate import write_tokenizer

import scantling as sc

WORDS = ["w5 w9 w11", "w7", "w3 w4 w5 w6 w7 w8 w9 w10", "w5 w9 w12", "w100 w101"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import shutil

    folder = tmp_path_factory.mktemp("prompts") / "llama-gqa"
    shutil.copytree(GOLDEN / "tiny" / "llama-gqa", folder)
    write_tokenizer(folder)
    return folder


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    return path


def rows(path: Path) -> dict[int, dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len({row["index"] for row in found}) == len(found)
    return {row["index"]: row for row in found}


def test_each_line_gives_what_it_gives_alone(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = [{"prompt": "w5 w6", "id": "mine", "max_new_tokens": 3}, {"prompt": "w5", "temperature": 1.0, "seed": 7}]
    source, out = write(tmp_path / "in.jsonl", [*WORDS, *own]), tmp_path / "out.jsonl"
    args = ("generate", "--prompts", str(source), "--out", str(out), "-m", str(folder), "--max-new-tokens", "9")
    status, text, err = call(capsys, *args, "--rows", "3")
    assert (status, text) == (0, "")
    assert f"7 written to {out}, 0 were there" in err
    assert "7 of 7 prompts" in err
    found, lm = rows(out), sc.load(folder)
    for i, prompt in enumerate(WORDS):
        assert found[i]["text"] == lm.generate(prompt, 9)
        assert found[i]["prompt_tokens"] == len(prompt.split()) + 1
        assert found[i]["finish_reason"] in ("stop", "length")
    assert (found[5]["text"], found[5]["id"]) == (lm.generate("w5 w6", 3), "mine")
    assert found[6]["text"] == lm.generate("w5", 9, temperature=1.0, seed=7)
    status, _, err = call(capsys, *args)
    assert "0 written to" in err
    assert "7 were there" in err
    assert rows(out) == found


def test_a_kill_at_any_byte_loses_and_repeats_nothing(folder: Path, tmp_path: Path) -> None:
    from scantling.generate.prompts import limits_for, read_prompts, run_prompts
    from scantling.generate.request import Request

    lm, out = sc.load(folder), tmp_path / "out.jsonl"
    lines = read_prompts(write(tmp_path / "in.jsonl", WORDS[:3]), Request("", 2), "m")
    limits = limits_for(lm, lines, 2)
    assert run_prompts(lm, lines, out, limits) == (3, 0)
    whole, wanted = out.read_bytes(), rows(out)
    for cut in range(len(whole) + 1):
        out.write_bytes(whole[:cut])
        new, old = run_prompts(lm, lines, out, limits)
        assert old == whole[:cut].count(b"\n")
        assert new + old == 3
        assert rows(out) == wanted


def test_a_killed_process_goes_on(folder: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [f"w{i} w{i + 1}" for i in range(2, 102)])
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "scantling", "generate", "--prompts", str(source), "--out", str(out)]
    command += ["-m", str(folder), "--max-new-tokens", "40", "--rows", "2"]
    first = subprocess.Popen(command, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    while first.poll() is None and (not out.exists() or out.read_bytes().count(b"\n") < 5):
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.wait()
    there = out.read_bytes().count(b"\n")
    assert there >= 5
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"{100 - there} written to" in done.stderr
    assert set(rows(out)) == set(range(100))


def test_sources_of_an_encoder_decoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import shutil

    folder = tmp_path / "t5"
    shutil.copytree(GOLDEN / "tiny" / "t5-v1_1", folder)
    write_tokenizer(folder)
    own = {"prompt": "w5", "temperature": 1.0, "seed": 7, "max_new_tokens": 5}
    source, out = write(tmp_path / "in.jsonl", [*WORDS, own]), tmp_path / "out.jsonl"
    args = ("generate", "--prompts", str(source), "--out", str(out), "-m", str(folder), "--rows", "3")
    status, _, err = call(capsys, *args)
    assert (status, "6 of 6 prompts" in err) == (0, True)
    found, lm = rows(out), sc.load(folder)
    assert [found[i]["text"] for i in range(5)] == [lm.generate(w, 64) for w in WORDS]
    assert [found[i]["prompt_tokens"] for i in range(5)] == [len(w.split()) + 1 for w in WORDS]
    assert found[5]["text"] == lm.generate("w5", 5, temperature=1.0, seed=7)
    # Cut in the middle of a line, as a kill does.
    out.write_bytes(out.read_bytes()[:-9])
    assert "1 written to" in call(capsys, *args)[2]
    assert rows(out) == found


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "no prompt"),
        ("{", "line 1: no JSON"),
        ('"a"\n5\n', "line 2: a JSON string, or an object"),
        ('{"prompt": 5}', "line 1: a JSON string, or an object"),
        ('{"prompt": "w5", "tempreature": 1}', "unknown key 'tempreature'"),
        ('{"prompt": "w5", "temperature": -1}', "line 1: temperature is -1"),
        ('{"prompt": "w5", "max_new_tokens": 0}', "max_new_tokens is 0"),
        ('{"prompt": "w5", "stop": [""]}', "stop is"),
        ('"w5"\n""\n', "prompt 1: the prompt is empty"),
        (json.dumps("w5 " * 70), "prompt 0: the prompt has 71 tokens and the context holds 64"),
    ],
)
def test_files_that_are_no_prompts(
    content: str, words: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text(content)
    out = tmp_path / "out.jsonl"
    status, text, err = call(
        capsys, "generate", "--prompts", str(tmp_path / "in.jsonl"), "--out", str(out), "-m", str(folder)
    )
    assert (status, text) == (2, "")
    assert words in err
    assert not out.exists()


def test_an_output_of_something_else_is_left_alone(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write(tmp_path / "in.jsonl", WORDS[:2]), tmp_path / "out.jsonl"
    args = ("generate", "--prompts", str(source), "--out", str(out), "-m", str(folder), "--max-new-tokens")
    assert call(capsys, *args, "2")[0] == 0
    before = out.read_bytes()
    status, _, err = call(capsys, *args, "3")
    assert status == 2
    assert "made of another prompt, model or setting" in err
    assert out.read_bytes() == before
    for mine in ("something of mine\n", "something of mine", "{}", '{"index": 7, "text": "', '"w5"'):
        out.write_text(mine)
        status, _, err = call(capsys, *args, "2")
        assert status == 2
        assert "not an output of this command" in err
        assert out.read_text() == mine


@pytest.mark.parametrize("end", ["", "\n"])
def test_the_file_of_prompts_is_not_written_over(
    end: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('"w5 w6"' + end)
    status, _, err = call(capsys, "generate", "--prompts", str(source), "--out", str(source), "-m", str(folder))
    assert (status, "not an output of this command" in err) == (2, True)
    assert source.read_text() == '"w5 w6"' + end


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--prompts", "a"), "give a PROMPT, or --prompts FILE and --out FILE together"),
        (("text", "--prompts", "a", "--out", "b"), "give a PROMPT, or --prompts FILE and --out FILE together"),
        ((), "give a PROMPT, or --prompts FILE and --out FILE together"),
        (("--prompts", "no-such", "--out", "b"), "no-such: cannot be read"),
        (("--prompts", "a", "--out", "b", "--beams", "2"), "--beams is for one PROMPT"),
        (("--prompts", "a", "--out", "b", "--draft-lookup", "2"), "--draft-... is for one PROMPT"),
        (("--prompts", "a", "--out", "b", "--cache", "ring"), "--cache is for one PROMPT"),
    ],
)
def test_wrong_usage(args: tuple[str, ...], words: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = call(capsys, "generate", *args, "-m", str(folder))
    assert status == 2
    assert words in err
    assert err.count("\n") == 1
