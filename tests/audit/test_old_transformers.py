"""A release of transformers that lets four decoders of BERT's kind see the future: all four are found, others pass."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

VERSION = "5.16.0"
SHAPE = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
CODE = f"""
import json, sys, torch, transformers as t
import scantling as sc
shape = {SHAPE!r}
bert = dict(shape, max_position_embeddings=64, is_decoder=True)
made = {{
    "roformer": lambda: t.RoFormerForCausalLM(t.RoFormerConfig(**bert, embedding_size=32)),
    "bigbird": lambda: t.BigBirdForCausalLM(t.BigBirdConfig(**bert, attention_type="original_full")),
    "rembert": lambda: t.RemBertForCausalLM(t.RemBertConfig(**bert, input_embedding_size=32, output_embedding_size=32)),
    "megatron-bert": lambda: t.MegatronBertForCausalLM(t.MegatronBertConfig(**bert)),
    "bert": lambda: t.BertLMHeadModel(t.BertConfig(**bert)),
    "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**shape)),
    "gpt-neox": lambda: t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**shape, max_position_embeddings=64)),
}}
told = {{}}
for name, make in made.items():
    torch.manual_seed(0)
    told[name] = sc.audit(make(), probes=["future"]).as_json()
print(json.dumps({{"version": t.__version__, "torch": torch.__version__, "told": told}}))
"""
LEAKING = {"roformer", "bigbird", "rembert", "megatron-bert"}


def audited(folder: Path | None) -> dict[str, object]:
    """The seven models, audited with the transformers of `folder` in front of the installed one."""
    paths = [os.fspath(folder)] if folder else []
    paths += [p for p in (*os.environ.get("PYTHONPATH", "").split(os.pathsep), *sys.path) if p]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def verdicts(told: dict[str, object]) -> dict[str, set[str]]:
    return {name: {f["verdict"] for f in one["findings"]} for name, one in told["told"].items()}  # type: ignore[attr-defined]


@pytest.mark.slow
def test_the_installed_release_is_clean() -> None:
    assert verdicts(audited(None)) == {name: {"clean"} for name in [*LEAKING, "bert", "llama", "gpt-neox"]}


@pytest.mark.slow
def test_four_decoders_of_an_older_release_see_the_future(tmp_path: Path) -> None:
    """MASK-11. It installs that release, and what it needs besides torch, into a folder of its own."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", os.fspath(tmp_path)]
    for wanted in (["--no-deps", f"transformers=={VERSION}"], ["--upgrade", "huggingface-hub<2"]):
        done = subprocess.run([*pip, *wanted], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"the package index cannot be reached: {done.stderr.strip().splitlines()[-1][:200]}")
    assert not (tmp_path / "torch").exists()
    told = audited(tmp_path)
    assert told["version"] == VERSION
    found = verdicts(told)
    assert {name for name, said in found.items() if said == {"defect"}} == LEAKING
    assert {name for name, said in found.items() if said == {"clean"}} == {"bert", "llama", "gpt-neox"}
    for name in LEAKING:
        for finding in told["told"][name]["findings"]:  # type: ignore[index]
            assert len(finding["smallest"]["ids"]) == 2
