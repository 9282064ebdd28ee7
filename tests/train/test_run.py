"""The loop: what it writes, how it ends, and that a run that goes on is the run that never stopped."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.small import fresh

import scantling as sc
from scantling.cards.read import training_of
from scantling.cards.training import Training
from scantling.data import Corpus, byte_tokenizer, prepare
from scantling.train import checkpoints
from scantling.train.run import Summary, TrainingStopped
from scantling.train.start import train
from scantling.train.watch import Metrics, read_metrics

SMALL: dict[str, Any] = {
    "steps": 8,
    "batch": 3,
    "tokens": 48,
    "accumulation": 2,
    "save_every": 4,
    "optimizer.kind": "adamw",
    "optimizer.lr": 1e-2,
    "evaluation.tokens": 600,
    "evaluation.sample_tokens": 4,
}


def settings(**changes: Any) -> Training:
    keys = {name.replace("__", "."): value for name, value in changes.items()}
    return training_of(sc.card("tiny"), {**SMALL, "evaluation.every": 0, **keys}, "test")


def model(dtype: str = "float32", dropout: float = 0.1, **changes: Any) -> sc.Model:
    lm = fresh(dropout, vocab_size=320, tied=True, dtype=dtype, **changes)
    lm.tokenizer = byte_tokenizer()
    return lm


class Killer:
    """Sends a signal to this process at an update, or ends it there by an exception."""

    def __init__(self, step: int, number: int | None) -> None:
        self.step, self.number = step, number

    def record(self, record: Mapping[str, Any]) -> None:
        if record["kind"] == "step" and record["step"] == self.step:
            if self.number is None:
                raise KeyboardInterrupt
            os.kill(os.getpid(), self.number)

    def close(self) -> None:
        pass


def go(lm: sc.Model, corpus: Corpus, plan: Training, out: Path, *watchers: Any) -> Summary:
    """Train, going on where the folder has a checkpoint."""
    found = checkpoints.newest(out)
    metrics = Metrics(out, 0 if found is None else found.step)
    try:
        return train(lm, corpus, plan, out, [metrics, *watchers], found)
    finally:
        metrics.close()


def losses(out: Path) -> list[tuple[Any, ...]]:
    """What must be the same to the bit: floats go through JSON without a loss."""
    return [
        (r["step"], r["loss"], r["objective"], r["norm"], r["lr"], r["tokens"])
        for r in read_metrics(out)
        if r["kind"] == "step"
    ]


def content(folder: Path) -> dict[str, bytes]:
    """Weights, optimizer, and where the run stands, but for its clock."""
    state = json.loads((folder / "training" / "state.json").read_text())
    del state["progress"]["seconds"]
    return {
        "weights": (folder / "model.safetensors").read_bytes(),
        "optimizer": (folder / "training" / "optimizer.safetensors").read_bytes(),
        "state": json.dumps(state).encode(),
    }


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "autocast": {"precision": "bf16-mixed"},
    "copies": {"precision": "bf16-master", "optimizer.kind": "muon"},
    "bfloat16": {"precision": "bf16", "boundary": "concatenated"},
    "curriculum": {"curriculum": [{"tokens": 16, "until": 0.3}, {"tokens": 32, "until": 0.8}], "ema": 0.9},
    "eight bits": {"optimizer.kind": "adamw-8bit", "precision": "bf16"},
    "padded": {"boundary": "padded", "optimizer.kind": "sgd", "z_loss": 1e-4, "label_smoothing": 0.1},
}


@pytest.mark.parametrize("name", list(CONFIGURATIONS))
def test_a_run_that_was_killed_goes_on_to_the_bit(name: str, corpus: Corpus, tmp_path: Path) -> None:
    """Killed at update 6, it goes on from the checkpoint of update 4 in the middle of an epoch, dropout on."""
    plan = settings(**CONFIGURATIONS[name])
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    go(model(), corpus, plan, straight)
    with pytest.raises(KeyboardInterrupt):
        go(model(), corpus, plan, broken, Killer(6, None))
    assert checkpoints.steps(broken) == [4]
    assert len(losses(broken)) == 6
    # Other weights and other random numbers before it: all comes from the checkpoint.
    torch.manual_seed(77)
    go(fresh_other(), corpus, plan, broken)
    assert losses(broken) == losses(straight)
    assert [step for step, *_ in losses(straight)] == list(range(1, 9))
    assert content(broken / "step-8") == content(straight / "step-8")


def test_the_first_update_after_going_on_counts_as_one_of_all(corpus: Corpus, tmp_path: Path) -> None:
    """What is left is told by the mean of all updates so far, where this process has measured none yet."""
    go(model(), corpus, settings(steps=4), tmp_path)
    before = json.loads((tmp_path / "step-4" / "training" / "state.json").read_text())["progress"]["seconds"]
    go(model(), corpus, settings(), tmp_path)
    first = next(r for r in read_metrics(tmp_path) if r["kind"] == "step" and r["step"] == 5)
    assert 3 / 5 * before < first["remaining_seconds"] <= 3 / 5 * (before + first["seconds"])


def fresh_other() -> sc.Model:
    lm = fresh(0.1, seed=5, vocab_size=320, tied=True)
    lm.tokenizer = byte_tokenizer()
    return lm


def test_the_training_loss_falls(corpus: Corpus, tmp_path: Path) -> None:
    summary = go(model(dropout=0.0), corpus, settings(steps=30, save_every=0), tmp_path)
    first, *_, last = [loss for _, loss, *_ in losses(tmp_path)]
    # ln 320 = 5.77 is what knowing nothing costs.
    assert first == pytest.approx(5.77, abs=0.1)
    assert last < first - 1.5
    assert summary.loss < first - 1.5
    assert summary.reason == "done"
    assert summary.step == 30
    assert summary.folder == tmp_path / "step-30"
    assert summary.mfu > 0
    assert summary.tokens_per_second > 0


def test_a_damaged_newest_checkpoint_costs_one_interval(corpus: Corpus, tmp_path: Path) -> None:
    plan = settings(save_every=2, keep=3)
    go(model(), corpus, plan, tmp_path)
    wanted = losses(tmp_path)
    with (tmp_path / "step-8" / "model.safetensors").open("r+b") as file:
        file.seek(2000)
        file.write(b"\x55")
    go(model(), corpus, plan, tmp_path)
    assert losses(tmp_path) == wanted
    notes = [r["text"] for r in read_metrics(tmp_path) if r["kind"] == "note" and "skipped" in r["text"]]
    assert len(notes) == 1
    assert "step-8 is skipped: model.safetensors is not what was written" in notes[0]
    assert checkpoints.fault_of(tmp_path / "step-8") is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_ends_within_an_update(number: signal.Signals, corpus: Corpus, tmp_path: Path) -> None:
    before = signal.getsignal(number)
    summary = go(model(), corpus, settings(save_every=0), tmp_path, Killer(3, number))
    assert (summary.reason, summary.step) == (number.name, 3)
    assert checkpoints.steps(tmp_path) == [3]
    assert signal.getsignal(number) is before
    go(model(), corpus, settings(save_every=0), tmp_path)
    straight = tmp_path / "straight"
    go(model(), corpus, settings(save_every=0), straight)
    assert losses(tmp_path) == losses(straight)


def test_a_saved_step_opens_in_transformers(corpus: Corpus, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    summary = go(model(), corpus, settings(), tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(summary.folder)
    ours = sc.load(summary.folder)
    tokenizer = AutoTokenizer.from_pretrained(summary.folder)
    ids = tokenizer("import os", return_tensors="pt").input_ids
    assert ids[0].tolist() == ours.tokenizer.encode("import os")  # type: ignore[union-attr]
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, ours.logits(ids), atol=5e-5, rtol=1e-4)
    assert sc.card(summary.folder / "card.yaml").training == settings()


def test_what_is_not_finite_stops_the_run_and_keeps_the_old_checkpoint(corpus: Corpus, tmp_path: Path) -> None:
    lm = model()

    class Poison(Killer):
        def record(self, record: Mapping[str, Any]) -> None:
            if record["kind"] == "saved":
                with torch.no_grad():
                    lm.net.get_parameter("decoder.blocks.1.mlp.up.weight")[0, 0] = float("nan")

    with pytest.raises(TrainingStopped, match=r"update 5 was not made: the loss is nan.*blocks.1.mlp.up.*step 4"):
        go(lm, corpus, settings(), tmp_path, Poison(0, None))
    assert checkpoints.steps(tmp_path) == [4]
    assert "nan" in str(losses(tmp_path)[-1])


def test_bad_updates_are_skipped_up_to_a_limit(corpus: Corpus, tmp_path: Path) -> None:
    """Every gradient is not a number: three are skipped, and the run stops at the third in a row."""
    lm = model()
    lm.net.get_submodule("decoder.blocks.0.mlp.down").register_full_backward_hook(
        lambda m, grads, out: (grads[0] * float("nan"),)
    )
    before = {name: weight.detach().clone() for name, weight in lm.net.named_parameters()}
    with pytest.raises(
        TrainingStopped, match=r"update 3 was not made \(3 in a row\): the gradient of decoder.blocks.0"
    ):
        go(lm, corpus, settings(bad__policy="skip", bad__most=3), tmp_path)
    assert all(torch.equal(weight, before[name]) for name, weight in lm.net.named_parameters())
    notes = [r["text"] for r in read_metrics(tmp_path) if r["kind"] == "note" and "skipped" in r["text"]]
    assert [note.split(":")[0] for note in notes] == ["update 1 is skipped", "update 2 is skipped"]


def test_patience_ends_a_run_that_does_not_improve(corpus: Corpus, tmp_path: Path) -> None:
    plan = settings(
        steps=50,
        optimizer__lr=1e-12,
        evaluation__every=2,
        evaluation__patience=2,
        save_every=0,
        optimizer__weight_decay=0,
    )
    summary = go(model(), corpus, plan, tmp_path)
    assert summary.reason == "patience"
    assert summary.step < 20


def test_the_best_checkpoint_stays(corpus: Corpus, tmp_path: Path) -> None:
    """The rate is so high after the second update that everything later is worse."""
    plan = settings(
        steps=8, evaluation__every=2, save_every=2, keep=1, optimizer__lr=5e-2, schedule__kind="constant",
        schedule__warmup=0, clip=None, optimizer__kind="sgd",
    )  # fmt: skip
    go(model(dropout=0.0), corpus, plan, tmp_path)
    held = {r["step"]: r["loss"] for r in read_metrics(tmp_path) if r["kind"] == "evaluation"}
    best = min(held, key=lambda step: held[step])
    assert set(checkpoints.steps(tmp_path)) == {best, 8}


def test_rows_grow_by_the_curriculum(corpus: Corpus, tmp_path: Path) -> None:
    """Judged tokens follow the length of the rows: 16 for the first half, then 48."""
    plan = settings(curriculum=[{"tokens": 16, "until": 0.5}], boundary="concatenated", save_every=0)
    go(model(), corpus, plan, tmp_path)
    assert [tokens for *_, tokens in losses(tmp_path)] == [6 * 16] * 4 + [6 * 48] * 4


REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "card": ({"mlp": {"d_ff": 32}}, {}, "is a checkpoint of another card"),
    "precision": ({}, {"precision": "bf16-master"}, "another precision"),
    "optimizer": ({}, {"optimizer.kind": "sgd"}, "this optimizer keeps momentum_buffer"),
    "seed": ({}, {"seed": 9}, "the place in the data is of other data, or of another seed"),
}


@pytest.mark.parametrize("name", list(REFUSALS))
def test_a_checkpoint_of_something_else_is_refused(name: str, corpus: Corpus, tmp_path: Path) -> None:
    card, changes, message = REFUSALS[name]
    go(model(), corpus, settings(steps=4), tmp_path)
    before = content(tmp_path / "step-4")
    with pytest.raises(sc.ScantlingInputError, match=message):
        go(model(**card), corpus, settings(**changes), tmp_path)
    assert content(tmp_path / "step-4") == before


def test_a_checkpoint_of_other_data_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    go(model(), corpus, settings(steps=4), tmp_path)
    text = tmp_path / "other.txt"
    text.write_text("One text.\n" * 200)
    other = prepare([str(text)], byte_tokenizer(), tmp_path / "other", workers=1)
    with pytest.raises(sc.ScantlingInputError, match="was trained on other data"):
        go(model(), other, settings(), tmp_path)


def test_a_longer_plan_goes_on_and_says_so(corpus: Corpus, tmp_path: Path) -> None:
    go(model(), corpus, settings(steps=4), tmp_path)
    assert go(model(), corpus, settings(steps=6), tmp_path).step == 6
    *_, note = [r["text"] for r in read_metrics(tmp_path) if r["kind"] == "note"]
    assert note.startswith("training is not as it was: steps")


def test_the_mean_of_the_weights_is_evaluated_and_kept(corpus: Corpus, tmp_path: Path) -> None:
    """With a decay of nearly 1 the mean stays where the weights began, and so does the held-out loss."""
    lm = model(dropout=0.0)
    start = {name: weight.detach().clone() for name, weight in lm.net.named_parameters()}
    summary = go(lm, corpus, settings(steps=20, ema=0.999999), tmp_path)
    assert summary.loss == pytest.approx(5.77, abs=0.1)
    assert losses(tmp_path)[-1][1] < 5.0
    weight = lm.net.get_parameter("embed.weight")
    assert not torch.equal(weight, start["embed.weight"])
    from safetensors.torch import load_file

    means = load_file(summary.folder / "training" / "optimizer.safetensors")
    torch.testing.assert_close(means["ema/embed.weight"], start["embed.weight"], atol=1e-4, rtol=0)
    saved = sc.load(summary.folder / "ema")
    assert torch.equal(saved.net.get_parameter("embed.weight"), means["ema/embed.weight"])
    assert isinstance(saved.generate("import", max_new_tokens=2), str)
    assert torch.equal(sc.load(summary.folder).net.get_parameter("embed.weight"), weight)
    assert checkpoints.fault_of(summary.folder) is None


def test_a_full_disk_ends_the_run_and_keeps_what_was_saved(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    from scantling.train import state

    write = state.write

    def full(folder: Path, progress: state.Progress, *rest: Any) -> None:
        if progress.step == 8:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(folder, progress, *rest)

    monkeypatch.setattr(state, "write", full)
    with pytest.raises(sc.ScantlingInputError, match=r"step-8: .*No space left on device; the older ones are as they"):
        go(model(), corpus, settings(), tmp_path)
    assert checkpoints.steps(tmp_path) == [4]
    assert checkpoints.fault_of(tmp_path / "step-4") is None
    monkeypatch.undo()
    straight = tmp_path / "straight"
    go(model(), corpus, settings(), straight)
    go(model(), corpus, settings(), tmp_path)
    assert losses(tmp_path) == losses(straight)


def test_without_held_out_text_the_last_loss_is_said(corpus: Corpus, tmp_path: Path) -> None:
    from scantling.data import open_corpus

    whole = open_corpus(corpus.folder, held_out=0.0)
    summary = go(model(), whole, settings(steps=2), tmp_path)
    assert summary.loss == losses(tmp_path)[-1][1]
    assert summary.bits_per_byte is None


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    lm = fresh(vocab_size=100)
    with pytest.raises(sc.ScantlingInputError, match="the tokenizer has 259 tokens, and vocab_size of small is 100"):
        go(lm, corpus, settings(), tmp_path)


def test_rows_longer_than_the_context_are_refused(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(sc.ScantlingInputError, match="rows of 65 tokens are longer than the context of small, 64"):
        go(model(), corpus, settings(tokens=65), tmp_path)


def test_metrics_are_cut_where_the_run_goes_on(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, 0)
    for step in range(1, 5):
        metrics.record({"kind": "step", "step": step, "loss": float("inf")})
    metrics.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "st')
    Metrics(tmp_path, 2).close()
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2]
    assert read_metrics(tmp_path)[0]["loss"] == "inf"
    shutil.rmtree(tmp_path)
    assert read_metrics(tmp_path) == []


@pytest.mark.parametrize(("narrow", "said"), [(5e10, "0.25 times"), (1.9e11, None)])
def test_slow_narrow_products_are_told(monkeypatch: pytest.MonkeyPatch, narrow: float, said: str | None) -> None:
    from scantling.train import setup, speed

    rates = {torch.float32: 2e11, torch.bfloat16: narrow}
    monkeypatch.setattr(setup, "peak", lambda _, dtype: speed.Peak(rates[dtype], "a test"))
    note = setup.slow_products_note("bf16-mixed", "cpu")
    assert note is None if said is None else said in (note or "")
    assert setup.slow_products_note("fp32", "cpu") is None


KEPT = """
from resource import RUSAGE_SELF, getrusage
import torch
from scantling.tensor.pages import kept_pages

def faults():
    before = getrusage(RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.ones(2**23)
    return getrusage(RUSAGE_SELF).ru_minflt - before

with kept_pages(2**27) as kept:
    faults()
    with kept_pages(2**20):
        pass
    inside = min(faults() for _ in range(5))
print(kept, inside, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps pages as it likes")
def test_pages_that_are_kept_come_once() -> None:
    """After a first round the same tensors cost no page faults; outside, the system maps them anew each time."""
    found = subprocess.run([sys.executable, "-c", KEPT], capture_output=True, text=True, check=True, timeout=100)
    kept, inside, outside = found.stdout.split()
    assert kept == "True"
    assert int(inside) < 100
    assert int(outside) > 4 * 100
