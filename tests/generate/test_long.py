"""Ten thousand tokens in one sitting, and a context that fills up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.conftest import GOLDEN
from tests.generate.test_commands import answer, tiny  # noqa: F401

import scantling as sc
from scantling.generate.engine import Options, tokens
from scantling.generate.keeping import Keeping, reaches
from scantling.generate.sample import Sampling

MIB = 2**20
WARM = 1_000
"""Tokens until every buffer has its size."""
CHILD = """
import sys, json, torch
import scantling as sc
from scantling.benches.resident import most_resident
from scantling.cards.read import read_text
from scantling.generate.batching import Engine, Limits
from scantling.generate.engine import Options, tokens
from scantling.generate.keeping import Keeping
from scantling.generate.request import Request
from scantling.generate.sample import Sampling

how, count, warm = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
card = read_text('''
name: long
family: decoder
n_layers: 1
d_model: 32
vocab_size: 4096
context: 16384
attention: {kind: multi_head, n_heads: 2, d_head: 16WINDOW}
position: {kind: rope, theta: 10000.0}
norm: {kind: rmsnorm, eps: 1.0e-5, at: [in]}
mlp: {kind: gated, act: silu, d_ff: 64}
tied: true
'''.replace("WINDOW", ", window: 64" if how == "ring" else ""), "a test")
lm = sc.new(card, seed=1)
if "packed" in how:
    lm.pack()
kept, marks, sampling = [], [], Sampling(0.8, seed=1)

def sitting():
    options, ids = Options(ignore_eos=True, keeping=Keeping("ring") if how == "ring" else None), lm.ids([[5, 6, 7]])
    with torch.inference_mode():
        for drawn in tokens(lm, ids, count, sampling, None, options):
            if how == "leak":
                kept.append(drawn.logits.clone())
            yield drawn.session.cache.nbytes

def batched():
    # Requests of 50 tokens each, 8 at once, one after the other through one engine.
    engine, sent = Engine(lm, Limits(rows=8, positions=1024)), 0
    while sent < count or engine.busy:
        while sent < count and len(engine.waiting) < 8:
            engine.submit(Request([sent % 97, 5], 50, sampling, Options(ignore_eos=True)))
            sent += 50
        for ended in engine.step():
            for _ in ended.ids:
                yield engine.cache.nbytes

for i, held in enumerate(batched() if "batch" in how else sitting(), 1):
    if i == warm:
        marks.append(most_resident())
marks.append(most_resident())
print(json.dumps({"tokens": i, "marks": marks, "held": held}))
"""


def growth(how: str, tokens: int) -> int:
    """Bytes by which the high-water mark of a process rises between `WARM` tokens and the last."""
    command = [sys.executable, "-c", CHILD, how, str(tokens), str(WARM)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["tokens"] == tokens
    first, last = found["marks"]
    if how == "ring":
        # 64 positions of 2 heads of 16 floats, keys and values, whatever the length of the text.
        assert found["held"] == 2 * 64 * 2 * 16 * 4
    return int(last - first)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the high-water mark is read from /proc")
def test_10_000_tokens_in_one_sitting_leak_no_memory() -> None:
    """20 s idle. The logits of a token are 16 KiB: were they kept, the mark would rise by 140 MiB."""
    assert growth("torch", 10_000) < 8 * MIB


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the high-water mark is read from /proc")
def test_a_window_is_never_full() -> None:
    """20 s idle: 10,000 tokens through a ring of 64 positions, which holds 64 from the first to the last."""
    assert growth("ring", 10_000) < 8 * MIB


@pytest.mark.slow
@pytest.mark.parametrize("how", ["packed", "packed batch"])
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the high-water mark is read from /proc")
def test_10_000_tokens_of_the_compiled_pass_leak_no_memory(how: str) -> None:
    """15 s idle each: in one text, and in 200 requests of which 8 are decoded together."""
    from scantling.native.library import missing

    if missing() is not None:
        pytest.skip(str(missing()))
    assert growth(how, 10_000) < 8 * MIB


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the high-water mark is read from /proc")
def test_10_000_tokens_of_a_batch_leak_no_memory() -> None:
    """15 s idle: 200 requests that join and leave, 8 at once."""
    assert growth("batch", 10_000) < 8 * MIB


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


@pytest.mark.parametrize("kind", ["full", "ring"])
def test_a_window_ends_where_the_context_ends(kind: str) -> None:
    """Rings have room for ever; no position beyond the context was trained, so the text ends there all the same."""
    lm = sc.load(GOLDEN / "tiny" / "mistral-swa")
    made = next(iter(reaches(lm.parts).values()))
    assert made is not None
    assert made < lm.card.context == 64
    with torch.inference_mode():
        options = Options(ignore_eos=True, keeping=Keeping(kind))
        drawn = list(tokens(lm, lm.ids([[7] * 60]), 10, Sampling(), None, options))
    assert len(drawn) == 4
