"""`scantling train` as a user meets it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import scantling as sc
from scantling.cards import to_yaml
from scantling.cli.main import _run
from scantling.train.checkpoints import steps
from scantling.train.watch import read_metrics

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of short texts, and a place of its own for everything else."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(12):
        (folder / f"{i}.txt").write_text("".join(f"Line {n} of text {i} says {n * i}.\n" for n in range(20)))
    return folder


QUICK = ["--steps", "4", "--batch", "2", "--tokens", "32", "--eval-every", "2", "--save-every", "2"]


def test_a_run_from_new_weights(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["train", "tiny", "--data", str(texts), *QUICK, "--tokenizer", "bytes"]) == 0
    out, err = capsys.readouterr()
    (last,) = out.splitlines()
    final = json.loads(last)
    assert final["step"] == 4
    assert {"loss", "tokens_per_second", "mfu"} <= set(final)
    run = Path("runs/tiny")
    assert final["folder"] == str(run / "step-4")
    assert (run / "latest").resolve() == (run / "step-4").resolve()
    assert "held out: loss" in err
    assert "4/4 loss" in err
    lm = sc.load(run / "latest")
    assert isinstance(lm.generate("Line", max_new_tokens=3), str)
    held = [r for r in read_metrics(run) if r["kind"] == "evaluation"]
    assert held[-1]["loss"] == final["loss"]
    assert (run / "report.html").exists()
    # A second run does not touch the first.
    assert _run(["train", "tiny", "--data", str(texts), *QUICK, "--tokenizer", "bytes", "--seed", "3"]) == 0
    assert steps(Path("runs/tiny-2")) == [2, 4]
    capsys.readouterr()
    assert _run(["train", "tiny", "--data", str(texts), "--out", str(run)]) == 2
    assert "has checkpoints; add --resume to go on" in capsys.readouterr().err


def test_a_run_goes_on_with_the_settings_and_the_data_that_it_was_begun_with(
    texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = ["train", "tiny", "--data", "texts", *QUICK, "--tokenizer", "bytes", "--lr", "0.01"]
    begun += ["--schedule", "constant", "--set", "schedule.warmup=0"]
    assert _run([*begun, "--out", "a"]) == 0
    assert _run(["train", "tiny", "--resume", "--out", "a", "--steps", "6"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["step"] == 6
    rates = [r["lr"] for r in read_metrics(Path("a")) if r["kind"] == "step"]
    assert rates == [0.01] * 6


def test_a_vocabulary_is_learned_where_the_card_has_none(texts: Path) -> None:
    assert _run(["train", "tiny", "--data", str(texts), *QUICK]) == 0
    lm = sc.load("runs/tiny/latest")
    assert lm.tokenizer is not None
    assert 259 < lm.tokenizer.vocab_size <= 2048
    assert len(lm.tokenizer.encode("Line 3 of text", add_special=False)) < 14


def test_a_checkpoint_is_trained_further_with_adapters(texts: Path) -> None:
    assert _run(["train", "tiny", "--data", str(texts), *QUICK, "--tokenizer", "bytes"]) == 0
    more = ["--set", "lora={rank: 2, targets: [q, v]}", "--out", "tuned"]
    assert _run(["train", "runs/tiny/latest", "--data", str(texts), *QUICK, *more]) == 0
    config = json.loads(Path("tuned/step-4/adapter/adapter_config.json").read_text())
    assert config["target_modules"] == ["q_proj", "v_proj"]
    assert sc.load("tuned/latest").parts == sc.load("runs/tiny/latest").parts


def test_the_commands_of_the_readme(texts: Path) -> None:
    """Each line of its section on training, made short."""
    section = README[README.index("## Training") : README.index("## Measuring")]
    (block,) = re.findall(r"```console\n(.*?)```", section, re.DOTALL)
    Path("notes.txt").write_text("".join(f"Note {n}: {n * n} is the square of {n}.\n" for n in range(200)))
    for line in block.splitlines():
        words = [word.strip('"') for word in re.findall(r'"[^"]*"|\S+', line.partition(" #")[0])]
        assert words[0] == "scantling"
        if words[1] == "train":
            words += [] if "--data" in words else ["--data", str(texts)]
            words += [*QUICK[:6], *(["--tokenizer", "bytes"] if words[2] == "tiny" else [])]
        assert _run(words[1:]) == 0, line


BAD = {
    "an unknown key": (["--set", "optimizer.rate=1"], "unknown key 'training.optimizer.rate'; known here: kind, lr"),
    "an unknown section": (["--set", "speed=1"], "unknown key 'training.speed'"),
    "no sign": (["--set", "steps"], "a key and its value are needed"),
    "a kind": (["--optimizer", "adam"], "training.optimizer.kind is 'adam'; allowed: adamw"),
    "steps": (["--steps", "0"], "training.steps is 0"),
    "rows": (["--tokens", "9999"], "rows of 9999 tokens are longer than the context of tiny, 256"),
    "no such tokenizer": (
        ["--tokenizer", "nowhere.model"],
        "nowhere.model: no such file or folder to read a tokenizer",
    ),
    "a stage without an end": (
        ["--set", "curriculum=[{tokens: 8, until: 1.5}]"],
        "training.curriculum[0].until is 1.5",
    ),
    "a stage longer than the context": (
        ["--set", "curriculum=[{tokens: 300, until: 0.5}]"],
        "rows of 300 tokens are longer than the context of tiny, 256",
    ),
    "a missing file": (["--data", "nowhere.txt"], "nowhere.txt"),
    "nothing to go on from": (["--resume", "--out", "new"], "new: has no checkpoint to go on from"),
    "a device": (["--device", "tpu"], "no device 'tpu' on this machine"),
    "warm-up": (["--set", "schedule.warmup=50", "--steps", "20"], "take more updates than the 20"),
    "an objective of another family": (["--objective", "seq2seq"], "seq2seq"),
    "a tracker that is not installed": (["--track", "trackio"], "trackio is needed to track a run with trackio and"),
    "whole words": (["--set", "whole_words=true"], "training.whole_words goes with the objective masked, not with"),
    "adapters": (["--set", "lora={targets: [attn]}"], "no linear map of the blocks is named 'attn'"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_bad_input_gets_one_sentence(name: str, texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given, message = BAD[name]
    data = [] if "--data" in given else ["--data", str(texts)]
    assert _run(["train", "tiny", "--tokenizer", "bytes", *data, *given]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert message in line
    assert not list(Path().glob("**/step-*"))


@pytest.mark.parametrize(("content", "message"), [(b"", "empty"), (b"caf\xe9 au lait " * 50, "UTF-8")])
def test_bad_text_gets_one_sentence(
    content: bytes, message: str, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bad.txt").write_bytes(content)
    assert _run(["train", "tiny", "--tokenizer", "bytes", "--data", "bad.txt"]) == 2
    assert message in capsys.readouterr().err


def test_bytes_that_are_no_text_can_be_replaced(texts: Path) -> None:
    """The option that the refusal names."""
    Path("bad.txt").write_bytes(b"caf\xe9 au lait " * 50)
    command = ["train", "tiny", "--tokenizer", "bytes", "--data", "bad.txt", *QUICK[:6]]
    assert _run([*command, "--encoding-errors", "replace"]) == 0


def test_a_context_curriculum_is_one_line_of_the_card(texts: Path) -> None:
    """Rows of 16 tokens for the first half of the updates, then of 64; the held-out loss is below that of a guess."""
    card = to_yaml(sc.card("tiny")).partition("training:")[0] + (
        "training:\n"
        "  curriculum: [{tokens: 16, until: 0.5}]\n"
        "  tokens: 64\n  batch: 2\n  steps: 20\n  boundary: concatenated\n  optimizer: {lr: 0.01}\n"
    )
    Path("grows.yaml").write_text(card)
    assert _run(["train", "grows.yaml", "--data", str(texts), "--tokenizer", "bytes", "--out", "grown"]) == 0
    records = read_metrics(Path("grown"))
    assert [r["tokens"] for r in records if r["kind"] == "step"] == [2 * 16] * 10 + [2 * 64] * 10
    (held,) = [r["loss"] for r in records if r["kind"] == "evaluation"]
    assert held < 4.0


def test_conversations_are_learned_by_a_new_model(texts: Path) -> None:
    """A tokenizer that is made for them has a template that marks the assistant's words."""
    lines = []
    for n in range(12):
        turns = [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"{n} is {n}."}]
        lines.append(json.dumps({"messages": turns}))
    Path("chats.jsonl").write_text("\n".join(lines))
    command = ["train", "tiny", "--data", "chats.jsonl", "--kind", "chat", "--tokenizer", "bytes", *QUICK]
    assert _run([*command, "--tokens", "64"]) == 0
    judged = [r["tokens"] for r in read_metrics(Path("runs/tiny")) if r["kind"] == "step"]
    # "n is n." and its end are 8 to 11 bytes of a conversation of about 60.
    assert all(0 < tokens < 64 for tokens in judged)


def test_a_damaged_record_of_a_run_is_named_and_kept(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun = ["train", "tiny", "--data", str(texts), *QUICK, "--tokenizer", "bytes", "--out", "run"]
    assert _run(begun) == 0
    metrics = Path("run/metrics.jsonl")
    damaged = metrics.read_text().replace('"kind": "saved"', '"kind": saved', 1)
    metrics.write_text(damaged)
    assert _run(["train", "tiny", "--resume", "--out", "run", "--steps", "6"]) == 2
    assert "is no record of a run; move the file away" in capsys.readouterr().err
    assert metrics.read_text() == damaged


def test_a_full_disk_is_said_where_it_is_met(
    texts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's own files first, then the lines of its updates; neither is taken for standard output."""
    begun = ["train", "tiny", "--data", str(texts), *QUICK, "--tokenizer", "bytes", "--out", "run"]
    Path("run").mkdir()
    Path("run/.data.json.part").symlink_to("/dev/full")
    assert _run(begun) == 2
    assert "error: run/data.json: cannot be written: No space left on device" in capsys.readouterr().err
    Path("run/.data.json.part").unlink()
    from scantling.train.watch import Metrics

    whole = Metrics._begin

    def full(metrics: Metrics, *given: Any) -> None:
        whole(metrics, *given)
        metrics._file.close()
        metrics._file = open("/dev/full", "a")  # noqa: SIM115

    monkeypatch.setattr(Metrics, "_begin", full)
    assert _run(begun) == 2
    wanted = "error: run/metrics.jsonl: cannot be written: No space left on device; the run ends"
    assert wanted in capsys.readouterr().err


def test_a_second_signal_ends_the_process_at_once(texts: Path) -> None:
    """The first one alone would wait for an update, which never comes here."""
    code = """
import sys, time
from scantling.train import step
def never(*args):
    print("in the update", flush=True)
    try:
        time.sleep(600)
    except BaseException:
        pass
    time.sleep(600)
step.Stepper.update = never
from scantling.cli.main import main
sys.argv = ["scantling", "train", "tiny", "--tokenizer", "bytes", "--data", "texts"]
main()
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert child.stdout is not None
    assert child.stdout.readline().strip() == "in the update"
    child.send_signal(signal.SIGTERM)
    time.sleep(1)
    assert child.poll() is None
    child.send_signal(signal.SIGTERM)
    assert child.wait(60) == -signal.SIGTERM
    child.stdout.close()
    assert os.path.exists("runs/tiny/metrics.jsonl")
