"""Several processes: their losses, weights and checkpoints are those of one, and what goes wrong ends all of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.train.ranks_child import drawn
from tests.train.test_run import go, settings

from scantling.data import Corpus
from scantling.train import prove
from scantling.train.checkpoints import steps
from scantling.train.watch import read_metrics

pytestmark = pytest.mark.slow

CLOSE = 1e-5
"""Largest relative difference of a loss in float32."""

PADDED = {"boundary": "padded", "batch": 4, "steps": 4, "save_every": 2, "keep": 9}
"""Rows of one document each, so that ranks and micro-batches have unequal numbers of judged tokens."""

ODD = {"vocab_size": 331, "mlp": {"d_ff": 50}, "attention": {"bias": ["q", "k", "v", "o"],
       "qk_norm": {"kind": "rmsnorm", "eps": 1e-5}}}  # fmt: skip
"""A table that no two ranks can share, and widths that four do not divide."""

CAPPED = {"head": {"kind": "lm", "softcap": 5.0, "bias": True}, "vocab_size": 322}
TERMS = {"z_loss": 1e-4, "label_smoothing": 0.1, "recompute": "block"}

JOBS: dict[str, dict[str, Any]] = {
    "plain": {"model": {}, "plan": PADDED},
    "odd": {"model": ODD, "plan": {**PADDED, **TERMS, "ema": 0.9}},
    "capped": {"model": CAPPED, "plan": {**PADDED, **TERMS}},
    "muon": {"model": {}, "plan": {**PADDED, "optimizer.kind": "muon", "boundary": None}},
    "adapters": {"model": {}, "plan": {**PADDED, "lora": {"rank": 2}}},
}
"""What is trained once by one process and then by several."""


def job(out: str, name: str, twist: str = "", **plan: Any) -> dict[str, Any]:
    changed = {key.replace("__", "."): value for key, value in plan.items()}
    return {"out": out, "model": JOBS[name]["model"], "plan": {**JOBS[name]["plan"], **changed}, "twist": twist}


Launch = Callable[..., Path]


@pytest.fixture(scope="module")
def launch(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Runs jobs by so many processes; returns the folder of their runs."""

    def started(count: int, jobs: Sequence[Mapping[str, Any]], folder: Path | None = None) -> Path:
        folder = tmp_path_factory.mktemp(f"by-{count}") if folder is None else folder
        shutil.copytree(corpus.folder, folder / "corpus")
        (folder / "jobs.json").write_text(json.dumps(jobs))
        processes = begun([["-m", "tests.train.ranks_child", str(folder)]] * count)
        try:
            said = [process.communicate(timeout=400)[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.communicate()
        assert [process.returncode for process in processes] == [0] * count, said
        return folder

    return started


def begun(commands: Sequence[Sequence[str]], **more: str) -> list[subprocess.Popen[str]]:
    """A Python process for each rank, with the variables that torchrun sets."""
    root = str(Path(__file__).parents[2])
    common = {**os.environ, **more, "WORLD_SIZE": str(len(commands)), "OMP_NUM_THREADS": "1", "PYTHONPATH":
              os.pathsep.join([root, f"{root}/src", os.environ.get("PYTHONPATH", "")])}  # fmt: skip
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    found = []
    for rank, command in enumerate(commands):
        environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        found.append(subprocess.Popen([sys.executable, *command], env=environment, **pipes))
    return found


@pytest.fixture(scope="module")
def one(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of one process."""
    folder = tmp_path_factory.mktemp("by-1")
    for name, asked in JOBS.items():
        go(drawn(asked["model"]), corpus, settings(**asked["plan"]), folder / name)
    return folder


@pytest.fixture(scope="module")
def two(launch: Launch) -> Path:
    """The runs of two processes, in one launch (about 25 s idle)."""
    return launch(
        2,
        [
            job("sharded", "plain"),
            job("tensor", "plain", parallel__tensor=2),
            job("tensor-odd", "odd", parallel__tensor=2),
            job("tensor-capped", "capped", parallel__tensor=2),
            job("replicated", "muon", parallel__replicated=2),
            job("adapters", "adapters", parallel__replicated=2),
            job("stopped", "plain", twist="rank 1 is told to stop"),
            job("clipped", "plain", twist="shards of the gradient"),
            job("broken", "plain", twist="a weight is not finite in rank 1"),
            job("rows", "plain", batch=3, accumulation=1),
            job("muon", "muon"),
        ],
    )


@pytest.fixture(scope="module")
def four(launch: Launch, two: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of four processes, one of which goes on from a checkpoint of two (about 30 s idle)."""
    folder = tmp_path_factory.mktemp("by-4")
    shutil.copytree(two / "sharded" / "step-2", folder / "went-on" / "step-2")
    shutil.copy(two / "sharded" / "metrics.jsonl", folder / "went-on")
    jobs = [
        job("both", "plain", parallel__tensor=2),
        job("both-odd", "odd", parallel__tensor=2),
        job("sharded-odd", "odd"),
        job("went-on", "plain"),
    ]
    return launch(4, jobs, folder)


def curve(run: Path) -> dict[int, tuple[float, float, float]]:
    """Loss, objective and norm by update."""
    return {r["step"]: (r["loss"], r["objective"], r["norm"]) for r in read_metrics(run) if r["kind"] == "step"}


def scores(run: Path) -> list[float]:
    return [r["loss"] for r in read_metrics(run) if r["kind"] == "evaluation"]


def assert_same_run(run: Path, wanted: Path) -> None:
    """Losses, norms and scores, and the tensors of the last checkpoint, file by file."""
    assert list(curve(run)) == list(curve(wanted)) == [1, 2, 3, 4]
    for step, values in curve(wanted).items():
        assert curve(run)[step] == pytest.approx(values, rel=CLOSE)
    assert scores(run) == pytest.approx(scores(wanted), rel=CLOSE)
    mean = ["ema/model.safetensors"] if (wanted / "step-4" / "ema").exists() else []
    for name in ("model.safetensors", "training/optimizer.safetensors", *mean):
        ours, theirs = load_file(run / "step-4" / name), load_file(wanted / "step-4" / name)
        assert ours.keys() == theirs.keys()
        for key, tensor in theirs.items():
            if not key.startswith("random/"):
                torch.testing.assert_close(ours[key], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("run", "name"),
    [
        ("sharded", "plain"),
        ("tensor", "plain"),
        ("tensor-odd", "odd"),
        ("tensor-capped", "capped"),
        ("replicated", "muon"),
        ("adapters", "adapters"),
    ],
)
def test_two_processes_are_one(run: str, name: str, one: Path, two: Path) -> None:
    """Shards (FSDP2), tensor ranks, and copies with Muon and with adapters."""
    assert_same_run(two / run, one / name)


@pytest.mark.parametrize(("run", "name"), [("both", "plain"), ("both-odd", "odd"), ("sharded-odd", "odd")])
def test_four_processes_are_one(run: str, name: str, one: Path, four: Path) -> None:
    """Two shards of two tensor ranks each, and four shards of widths that four do not divide."""
    assert_same_run(four / run, one / name)


def test_rows_have_unequal_numbers_of_tokens(one: Path) -> None:
    """Else a mean of the ranks' means would pass."""
    counts = {r["tokens"] for r in read_metrics(one / "plain") if r["kind"] == "step"}
    assert len(counts) > 1


def test_what_two_saved_four_go_on_with(one: Path, four: Path) -> None:
    assert_same_run(four / "went-on", one / "plain")


def test_what_two_saved_one_goes_on_with(corpus: Corpus, one: Path, two: Path, tmp_path: Path) -> None:
    shutil.copytree(two / "sharded" / "step-2", tmp_path / "step-2")
    shutil.copy(two / "sharded" / "metrics.jsonl", tmp_path)
    # Other weights before: all comes from the checkpoint.
    lm = drawn({"tied": True})
    with torch.no_grad():
        for weight in lm.net.parameters():
            weight.mul_(2)
    go(lm, corpus, settings(**PADDED), tmp_path)
    assert_same_run(tmp_path, one / "plain")


def test_shards_are_clipped_to_their_joint_norm(two: Path) -> None:
    """Shards (3) and (4), limit 1: the norm is 5 in both ranks, clipped they are 0.6 and 0.8."""
    found = [json.loads((two / "clipped" / f"clipped-{rank}.json").read_text()) for rank in range(2)]
    assert found[0] == pytest.approx([5.0, 0.6])
    assert found[1] == pytest.approx([5.0, 0.8])


def errors(run: Path) -> list[str]:
    return [(run / f"error-{rank}.txt").read_text() for rank in range(2)]


def test_all_ranks_agree_that_an_update_is_not_sound(two: Path) -> None:
    """The weight is not finite in the shard of rank 1 alone; rank 0 says so and both end."""
    said = errors(two / "broken")
    where = "the loss is nan: the weight decoder.blocks.1.mlp.up.weight holds a value that is not finite"
    assert said[0].startswith(f"TrainingStopped: update 1 was not made: {where}")
    assert said[1] == said[0].replace("TrainingStopped", "Told")


def test_a_signal_to_one_rank_ends_all_with_a_checkpoint(two: Path) -> None:
    assert list(curve(two / "stopped")) == [1, 2, 3]
    assert steps(two / "stopped") == [2, 3]


def test_what_cannot_be_shared_is_refused_by_rank_0_and_ends_all(two: Path) -> None:
    said = errors(two / "rows")
    assert said[0].startswith("ScantlingInputError: an update has 3 x 1 = 3 rows, which 2 ranks cannot share")
    assert said[1].startswith("Told: ")
    assert "muon needs whole matrices" in errors(two / "muon")[0]
    assert "parallel={replicated: 2}" in errors(two / "muon")[0]


def test_a_rank_that_dies_ends_the_others(corpus: Corpus, tmp_path: Path) -> None:
    shutil.copytree(corpus.folder, tmp_path / "corpus")
    (tmp_path / "jobs.json").write_text(json.dumps([job("dies", "plain", twist="rank 1 dies")]))
    left, gone = begun([["-m", "tests.train.ranks_child", str(tmp_path)]] * 2)
    _, said = left.communicate(timeout=300)
    gone.communicate(timeout=60)
    assert gone.returncode == 9
    assert left.returncode not in (0, None)
    assert "RankLost: another rank is gone or does not answer" in said


CARD = """
name: small
family: decoder
n_layers: 2
d_model: 32
vocab_size: 320
context: 64
attention: {kind: multi_head, n_heads: 4, n_kv_heads: 2}
position: {kind: rope, theta: 10000.0}
norm: {kind: rmsnorm, eps: 1.0e-5}
mlp: {kind: gated, act: silu, d_ff: 48}
tied: true
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`train` of a small card on short texts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for i in range(12):
        lines = (f"Line {n} of text {i} says {n * i}.\n" for n in range(3 + 2 * i))
        (tmp_path / "texts" / f"{i}.txt").write_text("".join(lines))
    (tmp_path / "small.yaml").write_text(CARD)
    asked = ["small.yaml", "--data", "texts", "--tokenizer", "bytes", "--boundary", "padded", "--batch", "4"]
    return ["train", *asked, "--tokens", "48", "--eval-every", "3", "--set", "evaluation.sample_tokens=4"]


def test_the_command_under_torchrun(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line of JSON, the losses of one process, a folder that opens, and one process that goes on (20 s idle)."""
    from scantling.cli.main import _run

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    by_two = [*torchrun, "-m", "scantling", *command, "--steps", "4", "--out", "two"]
    found = subprocess.run(by_two, env=environment, capture_output=True, text=True, timeout=500)
    assert found.returncode == 0, found.stderr
    (last,) = found.stdout.splitlines()
    assert json.loads(last)["folder"] == str(Path("two") / "step-4")
    assert found.stderr.count("saved two/step-4") == 1
    assert found.stderr.count("sample: ") == 2
    assert _run([*command, "--steps", "4", "--out", "one"]) == 0
    for step, values in curve(Path("one")).items():
        assert curve(Path("two"))[step] == pytest.approx(values, rel=CLOSE)
    assert scores(Path("two")) == pytest.approx(scores(Path("one")), rel=CLOSE)
    assert sorted(p.name for p in Path("two/step-4").iterdir()) == sorted(p.name for p in Path("one/step-4").iterdir())
    capsys.readouterr()
    assert _run(["train", "small.yaml", "--resume", "--out", "two", "--steps", "6"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 6


def test_ranks_that_were_told_other_things_end(command: list[str], tmp_path: Path) -> None:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    commands = [["-m", "scantling", *command, "--lr", rate, "--out", "run"] for rate in ("0.1", "0.2")]
    processes = begun(commands, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    said = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [2, 2]
    assert said[0] == (
        "",
        "error: rank 1 has another card or other settings than rank 0; all ranks of a run need the same\n",
    )
    assert said[1] == ("", "")
    assert not (tmp_path / "run").exists()


FAULT = """
from scantling.train import forward, step
whole = forward.forward
step.forward = lambda net, parts, batch, count, how: whole(net, parts, batch, batch.judged, how)
"""
"""Each micro-batch is divided by its own tokens: a mean of means."""


def test_the_proof_starts_two_processes_and_catches_a_mean_of_means(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ground = prove._ground(drawn({}), corpus, settings(), True)
    holds, message = prove.ranks(ground)
    assert holds, message
    assert "losses of 3 updates" in message
    # Python imports this file when it starts, so both processes have the fault and this one has not.
    (tmp_path / "sitecustomize.py").write_text(FAULT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    holds, message = prove.ranks(ground)
    assert holds is False, message
    assert "gradients" in message
