"""Real weights: the recorded perplexity of SmolLM2, and that adapters lower its loss on text of one kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import DATA

import scantling as sc
from scantling.checkpoint.find import default_model
from scantling.cli.main import _run
from scantling.train.evaluate import score, windows_for
from scantling.train.watch import read_metrics

LICENSE = (DATA / "cpython-license.txt").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_perplexity_is_that_of_transformers(smollm: Any, tmp_path: Path) -> None:
    """1,024 tokens of the licence of CPython, the same ids in both."""
    from transformers import AutoModelForCausalLM

    ids = smollm.tokenizer.encode(LICENSE)[:1024]
    found = score(smollm, ids, windows_for(smollm, size=1024))
    sc.save(smollm, tmp_path / "model")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    rows = torch.tensor([ids])
    with torch.no_grad():
        wanted = float(theirs(rows, labels=rows).loss)
    assert found.tokens == 1023
    assert found.loss == pytest.approx(wanted, abs=2e-5)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_adapters_lower_the_loss_of_text_of_one_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Squares, written one way: the untouched model does not know the way, and the adapted one does."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    texts = tmp_path / "texts"
    texts.mkdir()
    for n in range(40):
        lines = [f"<{i}> squared makes [{i * i}] ; " for i in range(10 * n, 10 * n + 8)]
        (texts / f"{n}.txt").write_text("".join(lines))
    run = tmp_path / "run"
    command = ["train", str(default_model()), "--data", str(texts), "--out", str(run), "--steps", "12", "--batch", "1"]
    command += ["--tokens", "128", "--lr", "0.002", "--eval-every", "6", "--plain", "--held-out", "0.2"]
    command += ["--set", "lora={rank: 8, targets: [q, v]}", "--set", "evaluation.samples=0"]
    assert _run([*command, "--set", "evaluation.tokens=600"]) == 0
    held = [r["loss"] for r in read_metrics(run) if r["kind"] == "evaluation"]
    plain = _scored(texts, default_model())
    tuned = _scored(texts, run / "latest")
    assert held[-1] < held[0]
    assert tuned < 0.7 * plain
    config = json.loads((run / "step-12" / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["target_modules"]) == (8, ["q_proj", "v_proj"])


def _scored(texts: Path, model: Path) -> float:
    """The loss over the first texts."""
    from scantling.data import Sources, prepare
    from scantling.train.evaluate import score_documents

    lm = sc.load(model)
    assert lm.tokenizer is not None
    corpus = prepare(Sources((str(texts),)), lm.tokenizer, held_out=0.0, workers=1)
    return score_documents(lm, corpus.train, windows_for(lm, size=256), 600).loss
