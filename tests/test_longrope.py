"""Generating past the trained length of LongRoPE, where the divisors change, against the original implementation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.conftest import GOLDEN

import scantling as sc

TRAINED = 12


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The tiny Phi-3 whose divisors change at 12 tokens."""
    source = GOLDEN / "tiny" / "phi3-longrope-long"
    config = json.loads((source / "config.json").read_text())
    config["original_max_position_embeddings"] = TRAINED
    config["rope_parameters"]["original_max_position_embeddings"] = TRAINED
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copyfile(source / "model.safetensors", tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("prompt", [4, TRAINED - 1, TRAINED, TRAINED + 1])
def test_the_cache_is_filled_anew_when_the_divisors_change(folder: Path, prompt: int) -> None:
    transformers = pytest.importorskip("transformers")
    original: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    ids = load_file(GOLDEN / "tiny" / "phi3-longrope-long" / "io.safetensors")["input_ids"][:1, :prompt]
    asked = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    wanted = original.generate(ids, attention_mask=torch.ones_like(ids), **asked)
    lm = sc.load(folder)
    found = lm.generate(ids, 20, ignore_eos=True)
    assert torch.equal(found, wanted)
    for end in range(prompt, prompt + 20):
        assert int(lm.logits(found[:, :end])[0, -1].argmax()) == int(found[0, end])
