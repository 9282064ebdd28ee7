"""Ten thousand tokens in one sitting, and a context that fills up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.generate.test_commands import answer, tiny  # noqa: F401

MIB = 2**20
WARM = 1_000
"""Tokens until every buffer has its size."""
CHILD = """
import sys, json, torch
import scantling as sc
from scantling.benches.resident import most_resident
from scantling.cards.read import read_text
from scantling.generate.engine import Options, tokens
from scantling.generate.sample import Sampling

how, count, warm = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
card = read_text('''
name: long
family: decoder
n_layers: 1
d_model: 32
vocab_size: 4096
context: 16384
attention: {kind: multi_head, n_heads: 2, d_head: 16}
position: {kind: rope, theta: 10000.0}
norm: {kind: rmsnorm, eps: 1.0e-5, at: [in]}
mlp: {kind: gated, act: silu, d_ff: 64}
tied: true
''', "a test")
lm = sc.new(card, seed=1)
if how == "packed":
    lm.pack()
kept, marks = [], []
options, ids = Options(ignore_eos=True), lm.ids([[5, 6, 7]])
with torch.inference_mode():
    for i, drawn in enumerate(tokens(lm, ids, count, Sampling(0.8, seed=1), None, options), 1):
        if how == "leak":
            kept.append(drawn.logits.clone())
        if i in (warm, count):
            marks.append(most_resident())
print(json.dumps({"tokens": i, "marks": marks}))
"""


def growth(how: str, tokens: int) -> int:
    """Bytes by which the high-water mark of a process rises between `WARM` tokens and the last."""
    command = [sys.executable, "-c", CHILD, how, str(tokens), str(WARM)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["tokens"] == tokens
    first, last = found["marks"]
    return int(last - first)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the high-water mark is read from /proc")
def test_10_000_tokens_in_one_sitting_leak_no_memory() -> None:
    """20 s idle. The logits of a token are 16 KiB: were they kept, the mark would rise by 140 MiB."""
    assert growth("torch", 10_000) < 8 * MIB


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the high-water mark is read from /proc")
def test_10_000_tokens_of_the_compiled_pass_leak_no_memory() -> None:
    """15 s idle."""
    from scantling.native.library import missing

    if missing() is not None:
        pytest.skip(str(missing()))
    assert growth("packed", 10_000) < 8 * MIB


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the high-water mark is read from /proc")
def test_a_leak_would_be_seen() -> None:
    """5 s idle: 2,000 tokens whose logits are kept, 16 KiB each."""
    assert growth("leak", WARM + 2_000) > 24 * MIB


@pytest.mark.parametrize("asked", [20, 6, 5])
def test_a_context_that_fills_up_says_so(tiny: Path, capsys: pytest.CaptureFixture[str], asked: int) -> None:  # noqa: F811
    """58 tokens of a context of 64: the text ends there, and says whether the context or the caller set the limit."""
    made = answer(capsys, tiny, "w5 " * 57, "--max-new-tokens", str(asked))
    assert made["prompt_tokens"] == 58
    assert (made["finish_reason"], made["new_tokens"]) == ("length", min(asked, 6))
    assert made["context_full"] == (asked > 6)
