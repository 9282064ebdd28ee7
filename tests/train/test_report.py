"""The report of a run, and TensorBoard's files."""

from __future__ import annotations

import base64
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.train.test_prove import MOE
from tests.train.test_run import fresh, go, model, settings

from scantling.data import Corpus, byte_tokenizer
from scantling.train.report import accounts, write_report
from scantling.train.sinks import Spare, TensorBoard, Tracker
from scantling.train.watch import read_metrics


def test_the_account_is_predicted_and_counted_alike(corpus: Corpus, tmp_path: Path) -> None:
    go(model(), corpus, settings(steps=3, save_every=0), tmp_path)
    (account,) = [r for r in read_metrics(tmp_path) if r["kind"] == "account"]
    # 3 rows of 48 in 2 blocks: products of weights (q, o; k, v; the MLP; the head), and scores with their mix.
    weights = 2 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48) + 32 * 320
    assert account["flops_counted"] == 3 * (2 * 144 * weights + 2 * 4 * 3 * 48 * 48 * 32)
    assert account["flops_predicted"] == account["flops_counted"]
    assert account["seconds"] > account["seconds_at_peak"] > 0
    assert account["memory_predicted"] > 16 * model().parts.params
    assert "equal;" in accounts(read_metrics(tmp_path))[0][3]


def test_the_report_is_one_file_with_its_plots(corpus: Corpus, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lm = fresh(vocab_size=320, mlp=MOE)
    lm.tokenizer = byte_tokenizer()
    go(lm, corpus, settings(steps=4, evaluation__every=2), tmp_path)
    text = write_report(tmp_path, "a <small> run").read_text()
    assert "a &lt;small&gt; run" in text
    assert "FLOPs of a micro-batch" in text
    assert not re.search(r"(src|href)=\"(?!data:)", text)
    images = re.findall(r'base64,([^"]+)"', text)
    assert len(images) == 5
    assert all(base64.b64decode(image).startswith(b"\x89PNG") for image in images)
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == [
        "entropy-of-the-routers.png",
        "learning-rate.png",
        "loss.png",
        "norm-of-the-gradient.png",
        "speed.png",
    ]


def test_experts_are_watched(corpus: Corpus, tmp_path: Path) -> None:
    """The router of block 0 is made to choose experts 0 and 1 alone: the others are dead."""
    lm = fresh(vocab_size=320, mlp=MOE)
    lm.tokenizer = byte_tokenizer()
    lm.net.get_submodule("decoder.blocks.0.mlp.router").register_forward_hook(
        lambda m, args, out: (out[0], torch.zeros_like(out[1]) + torch.tensor([0, 1]))
    )
    go(lm, corpus, settings(steps=1, router_balance=0.0), tmp_path)
    (step,) = [r for r in read_metrics(tmp_path) if r["kind"] == "step"]
    router = step["routers"]["decoder.blocks.1.mlp.router"]
    assert sum(router["shares"]) == pytest.approx(1.0)
    assert 0 < router["entropy"] <= 1.3863
    assert set(step["routers"]) == {f"decoder.blocks.{i}.mlp.router" for i in (0, 1)}


def test_tensorboard_reads_the_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path)
    record: dict[str, Any] = {"kind": "step", "loss": 2.5, "norms": {"embed": 0.5}, "text": "x", "memory_bytes": None}
    for step in (1, 2):
        board.record({**record, "step": step})
    board.record({"kind": "note", "step": 2, "text": "nothing for it"})
    board.close()
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert sorted(read.Tags()["scalars"]) == ["step/loss", "step/norms/embed"]
    assert [(event.step, event.value) for event in read.Scalars("step/loss")] == [(1, 2.5), (2, 2.5)]


def test_a_full_disk_ends_tensorboard_and_not_the_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    board, calls, said = TensorBoard(tmp_path), list[Any](), list[str]()
    spare = Spare("tensorboard", lambda: board, said.append)

    def full(*given: Any) -> None:
        calls.append(given)
        raise OSError(28, "No space left on device")

    board._writer.add_scalar = full
    spare.record({"kind": "step", "step": 1, "loss": 1.0})
    spare.record({"kind": "step", "step": 2, "loss": 1.0})
    spare.close()
    board.close()
    assert calls == [("step/loss", 1.0, 1)]
    assert said == [
        "tensorboard is not written from here on (No space left on device); the run goes on, and metrics.jsonl has all "
        "of it"
    ]


def test_a_sink_that_cannot_begin_is_said_once_and_one_that_cannot_end() -> None:
    said: list[str] = []

    class Ends:
        def record(self, record: Any) -> None:
            return

        def close(self) -> None:
            raise RuntimeError("no network")

    def nothing() -> Ends:
        raise OSError(28, "No space left on device")

    for make in (nothing, Ends):
        spare = Spare("it", make, said.append)
        spare.record({"kind": "step", "step": 1})
        spare.close()
        spare.close()
    assert [text.split(";")[0] for text in said] == [
        "it is not written from here on (No space left on device)",
        "it is not written from here on (no network)",
    ]


@pytest.mark.parametrize("library", ["wandb", "trackio"])
def test_trackers_get_the_numbers_of_updates(
    library: str,
    tmp_path: Path,
    corpus: Corpus,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The calls that both libraries document: init, log with a step, finish; what they print is no result."""
    calls: list[tuple[str, dict[str, Any]]] = []
    fake: Any = ModuleType(library)
    for name in ("init", "log", "finish"):

        def call(*given: Any, _name: str = name, **more: Any) -> None:
            print("a greeting")
            calls.append((_name, {"given": given, **more}))

        setattr(fake, name, call)
    monkeypatch.setitem(sys.modules, library, fake)
    run = tmp_path / "run"
    tracker = Tracker(library, run, "small", {"steps": 2})
    go(model(), corpus, settings(steps=2), run, tracker)
    tracker.close()
    more = {"dir": str(run)} if library == "wandb" else {}
    assert calls[0] == ("init", {"given": (), "project": "small", "name": "run", "config": {"steps": 2}, **more})
    assert calls[-1] == ("finish", {"given": ()})
    losses = [(c["step"], c["given"][0]["step/loss"]) for _, c in calls[1:-1] if "step/loss" in c["given"][0]]
    assert losses == [(r["step"], r["loss"]) for r in read_metrics(run) if r["kind"] == "step"]
    assert any("evaluation/loss" in c["given"][0] for _, c in calls[1:-1])
    assert capsys.readouterr().out == ""
