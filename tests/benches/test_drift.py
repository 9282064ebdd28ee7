"""Drift: what is reported equals what two models give, and each way costs what its numbers allow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import GOLDEN
from tests.test_cli import call

import scantling as sc
from scantling.benches.drift import Drift, drifts, places, sample_ids
from scantling.cards.read import read_text
from scantling.native.library import missing

TINY = GOLDEN / "tiny"
CARD = """
name: narrow
family: decoder
n_layers: 2
d_model: 64
vocab_size: 256
context: 64
attention: {kind: multi_head, n_heads: 4, d_head: 16}
position: {kind: rope, theta: 10000.0}
norm: {kind: rmsnorm, eps: 1.0e-5, at: [in]}
mlp: {kind: gated, act: silu, d_ff: 96}
tied: true
"""


def by_way(found: list[Drift]) -> dict[tuple[str, int], Drift]:
    return {(row.way, row.tokens): row for row in found}


def rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt())


@pytest.mark.parametrize("name", ["mistral-swa", "bert"])
def test_the_drift_of_a_dtype_is_that_of_two_loaded_models(name: str) -> None:
    wide, narrow = sc.load(TINY / name, dtype="float32"), sc.load(TINY / name, dtype="bfloat16")
    ids = sample_ids(wide, 24, None)
    found, absent = drifts(wide, ids, [8, 24], lambda _: None)
    row = by_way(found)["bfloat16", 24]
    pairs = zip(wide.hidden([ids]), narrow.hidden([ids]), strict=True)
    assert row.layers == pytest.approx([rms(b.float() - a) / rms(a) for a, b in pairs], rel=1e-6)
    a, b = wide.logits([ids])[0], narrow.logits([ids])[0]
    assert row.logits == pytest.approx(rms(b - a) / float(a.double().std()), rel=1e-6)
    assert row.agree == float((a.argmax(-1) == b.argmax(-1)).double().mean())
    assert {row.tokens for row in found} == {8, 24}
    assert [line for line in absent if line.startswith("weights q8_0")]


@pytest.mark.parametrize("name", ["t5", "bart", "marian"])
def test_both_stacks_of_an_encoder_decoder_drift(name: str) -> None:
    wide, narrow = sc.load(TINY / name, dtype="float32"), sc.load(TINY / name, dtype="bfloat16")
    ids = sample_ids(wide, 20, None)
    rows, absent = drifts(wide, ids, [6, 20], lambda _: None)
    found = by_way(rows)
    for own in (None, [ids]):
        pairs = list(zip(wide.hidden([ids], decoder_ids=own), narrow.hidden([ids], decoder_ids=own), strict=True))
        named = [i for i, place in enumerate(places(wide)) if place.startswith("encoder" if own is None else "decoder")]
        assert len(named) == len(pairs) >= 3
        layers = found["bfloat16", 20].layers
        assert layers is not None
        assert [layers[i] for i in named] == pytest.approx([rms(b.float() - a) / rms(a) for a, b in pairs], rel=1e-6)
    exact = [found[way, 20].logits for way in ("reference", "full", "ring")]
    assert max(exact) < 5e-6 < found["full, int8", 20].logits < 0.2
    assert not [row for row in rows if row.kind == "engine"]
    assert [line for line in absent if "packed, exact does not run: the compiled pass does not know" in line]


def test_each_way_costs_what_its_numbers_allow() -> None:
    """Errors are first order in the last place: 2^-24, 2^-11 and 2^-8; 1/254 and 1/16 of the largest in blocks."""
    lm = sc.load(TINY / "mistral-swa", dtype="float32")
    found = by_way(drifts(lm, sample_ids(lm, 40, None), [40], lambda _: None)[0])
    exact = [found[way, 40].logits for way in ("reference", "full", "ring")]
    assert max(exact) < 2e-6
    assert 2e-6 < found["float16", 40].logits < found["bfloat16", 40].logits < 0.1
    assert 2e-6 < found["full, int8", 40].logits < 0.1
    assert found["full, int8", 40].layers[0] == 0.0  # type: ignore[index]


def test_blocks_and_the_compiled_pass() -> None:
    lm = sc.new(read_text(CARD, "a test"), seed=3)
    lm.net.requires_grad_(False).eval()
    rows, absent = drifts(lm, sample_ids(lm, 12, None), [12], lambda _: None)
    found = by_way(rows)
    assert 1e-4 < found["q8_0", 12].logits < found["q4_0", 12].logits
    assert found["q4_0", 12].layers[0] > 1e-3  # type: ignore[index]
    if missing() is not None:
        assert any(line.startswith("engine packed, exact") for line in absent)
        return
    assert found["packed, exact", 12].logits < 1e-5
    assert found["packed, exact", 12].layers is None
    assert found["packed, exact", 12].agree == 1.0


def test_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("bench", str(TINY / "gpt2"), "--drift", "--prompt", "4,9")
    status, out, err = call(capsys, *given, "--json")
    assert status == 0, err
    rows: list[dict[str, Any]] = json.loads(out)["rows"]
    assert {(row["kind"], row["tokens"]) for row in rows} >= {("dtype", 4), ("dtype", 9), ("cache", 9), ("kernel", 4)}
    status, out, err = call(capsys, *given)
    assert status == 0, err
    assert "how far each way is from a whole pass in float32" in out
    assert "running dtype bfloat16" in err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["llama-gqa", "--drift", "--against", "llama.cpp"], "--drift measures no times"),
        (["llama-gqa", "--text", "x.txt"], "--text is for --drift"),
        (["llama-gqa", "--drift", "--prompt", "100"], "100 tokens are asked for and llama-gqa has a context of 64"),
        (["bart", "--drift", "--prompt", "100"], "100 tokens are asked for and bart has 64 learned positions"),
        (["llama-gqa", "--drift", "--batch", "8"], "--drift measures no times: leave --batch out"),
        (["llama-gqa", "--drift", "--cache", "ring"], "--drift measures no times: leave --cache out"),
        (["llama-gqa", "--drift", "--prompt", "8", "--text", "missing.txt"], "missing.txt: cannot be read"),
    ],
)
def test_what_has_no_drift_is_refused(capsys: pytest.CaptureFixture[str], given: list[str], message: str) -> None:
    status, out, err = call(capsys, "bench", str(TINY / given[0]), *given[1:])
    assert (status, out) == (2, "")
    assert message in err


def test_a_text_needs_a_tokenizer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "words.txt"
    file.write_text("some words")
    status, _, err = call(capsys, "bench", str(TINY / "gpt2"), "--drift", "--prompt", "2", "--text", str(file))
    assert (status, "the model has no tokenizer" in err) == (2, True)
