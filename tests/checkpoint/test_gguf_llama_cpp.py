"""llama.cpp loads what we write and predicts what we predict."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from tests.checkpoint.gguf_tiny import recorded, tiny, vocabulary, with_attention, with_card
from tests.conftest import DATA

import scantling as sc
from scantling.checkpoint.gguf import read_gguf
from scantling.checkpoint.gguf_write import write_gguf

CHILD = Path(__file__).parents[1] / "llama_cpp_child.py"


def next_tokens(path: Path, batches: list[list[list[int]]], n_probs: int) -> list[list[dict[int, float]]]:
    """What llama.cpp expects after each prompt of each batch: log-probabilities by id, the likeliest first."""
    asked = json.dumps({"model": str(path), "batches": batches, "n_probs": n_probs})
    done = subprocess.run([sys.executable, CHILD], input=asked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (answer,) = (line for line in done.stdout.splitlines() if line.startswith("answer:"))
    found = json.loads(answer.removeprefix("answer:"))
    return [[{int(i): p for i, p in place.items()} for place in batch] for batch in found]


def normalised(lm: sc.Model) -> sc.Model:
    return with_card(lm, mlp=replace(lm.card.mlp, normalize=True))


def usual_scale(lm: sc.Model) -> sc.Model:
    """llama.cpp has no key for Gemma's scale: it is that of the head's width."""
    return with_attention(lm, scale=None)


def unlimited(lm: sc.Model) -> sc.Model:
    """llama.cpp does not apply Phi-3's window."""
    return with_attention(lm, window=None)


MODELS: dict[str, tuple[Any, float]] = {
    "llama-gqa": (None, 1e-4),
    "llama-mha-tied-bias": (None, 1e-4),
    "llama-rope-llama3": (None, 1e-4),
    "llama-rope-linear": (None, 1e-4),
    "llama-rope-yarn": (None, 1e-4),
    "mixtral": (None, 1e-4),
    "qwen2": (None, 1e-4),
    "qwen3": (None, 1e-4),
    "qwen3-moe-nonorm": (normalised, 1e-4),
    "phi3-longrope-long": (None, 1e-4),
    "phi3-partial-swa-tied": (unlimited, 1e-4),
    # GELU comes from a table of float16 there.
    "gemma": (None, 5e-3),
    "gemma2": (usual_scale, 5e-3),
    "gemma3-text": (usual_scale, 5e-3),
    "gpt2": (None, 5e-3),
}
"""How the recorded card is changed first, and how close the log-probabilities are."""


@pytest.mark.parametrize("name", MODELS)
def test_every_log_probability_is_that_of_llama_cpp(name: str, tmp_path: Path) -> None:
    change, atol = MODELS[name]
    lm = change(tiny(name)) if change else tiny(name)
    # By a name with phi3 in it llama.cpp looks for tokens that this vocabulary lacks.
    lm = with_card(lm, name="tiny")
    lm.tokenizer = vocabulary()
    write_gguf(lm, tmp_path / "model.gguf")
    ids = recorded(name)["input_ids"][0].tolist()
    answers = next_tokens(tmp_path / "model.gguf", [[ids[:n]] for n in range(1, len(ids) + 1)], 131)
    theirs = torch.tensor([[answer[i] for i in range(131)] for (answer,) in answers])
    torch.testing.assert_close(lm.logits(ids)[0].log_softmax(-1), theirs, atol=atol, rtol=0)


@pytest.mark.slow
def test_the_real_model_agrees_with_llama_cpp_on_a_real_text(smollm: Any, tmp_path: Path) -> None:
    """1,000 tokens of CPython's licence as ten pieces of 100, each token predicted from all before it in its piece."""
    path = tmp_path / "smollm.gguf"
    write_gguf(smollm, path)
    assert len(read_gguf(path).tensors) == 272
    ids = smollm.tokenizer.encode((DATA / "cpython-license.txt").read_text(encoding="utf-8"))[:1000]
    pieces = [ids[start : start + 100] for start in range(0, 1000, 100)]
    answers = next_tokens(path, [[piece[:n] for piece in pieces] for n in range(1, 101)], 1)
    theirs = torch.tensor([[next(iter(answer)) for answer in batch] for batch in answers]).T
    agreement = float((smollm.logits(pieces).argmax(-1) == theirs).float().mean())
    assert agreement >= 0.99
