"""Remarks on cards: each fires where it should, and on the models that are known not to be unusual none does."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

import scantling as sc
from scantling.cards.read import from_dict
from scantling.cards.schema import Card
from scantling.study.checks import checks

LLAMA = sc.card("llama-3-8b")


def codes(card: Card, devices: int = 8) -> list[tuple[str, str]]:
    return [(remark.code, remark.key) for remark in checks(card, devices)]


def laid(base: str, **changes: Any) -> Card:
    card = sc.card(base)
    sections = {k: replace(getattr(card, k), **v) if isinstance(v, dict) else v for k, v in changes.items()}
    return replace(card, **sections)


@pytest.mark.parametrize(
    "name", ["llama-2-7b", "llama-2-70b", "llama-3-8b", "llama-3.1-405b", "mistral-7b-v0.3", "mixtral-8x7b", "gemma-7b"]
)
def test_nothing_to_say(name: str) -> None:
    assert checks(sc.card(name)) == []


def test_a_vocabulary_gets_a_proposal_with_its_price() -> None:
    """GPT-2's 50,257 become the 50,304 that nanoGPT pads to: 47 rows of 768."""
    (remark,) = [r for r in checks(sc.card("gpt2")) if r.code == "vocabulary"]
    assert "50,304 for 36,096 more parameters" in remark.message
    assert 47 * 768 == 36096
    padded = laid("gpt2", embedding={"vocab_multiple": 128})
    assert sc.assemble(padded).params == 124439808 + 36096
    assert ("vocabulary", "vocab_size") not in codes(padded)
    (untied,) = [r for r in checks(laid("gpt2", tied=False)) if r.code == "vocabulary"]
    assert "72,192 more" in untied.message


@pytest.mark.parametrize(
    ("card", "wanted"),
    [
        (laid("llama-3-8b", d_model=4100), ("tile", "d_model")),
        (laid("llama-3-8b", d_model=4160), ("tile", "d_model")),
        (laid("llama-3-8b", mlp={"d_ff": 11000}), ("tile", "mlp.d_ff")),
        (laid("llama-3-8b", n_layers=200), ("depth", "n_layers")),
        (laid("llama-3-8b", n_layers=8), ("depth", "n_layers")),
        (laid("llama-3-8b", mlp={"d_ff": 4096}), ("expansion", "mlp.d_ff")),
        (laid("gpt2", mlp={"d_ff": 768}), ("expansion", "mlp.d_ff")),
        (laid("t5-11b"), ("expansion", "mlp.d_ff")),
        (laid("llama-3-8b", attention={"d_head": 100}), ("head_size", "attention.d_head")),
        (laid("llama-3-8b", attention={"n_heads": 28, "n_kv_heads": 4}), ("tensor_parallel", "attention.n_heads")),
        (laid("llama-3-8b", attention={"n_kv_heads": 4}), ("tensor_parallel", "attention.n_kv_heads")),
        (laid("llama-3-8b", vocab_size=128257), ("vocabulary", "vocab_size")),
    ],
)
def test_each_remark_fires_alone_and_not_on_the_base(card: Card, wanted: tuple[str, str]) -> None:
    base = codes(sc.card("llama-3-8b" if "gpt2" not in card.name and "t5" not in card.name else card.name))
    assert [found for found in codes(card) if found not in base or found[0] == "expansion"] == [wanted]


def test_devices_share_the_heads() -> None:
    assert codes(LLAMA, 8) == codes(LLAMA, 4) == codes(LLAMA, 2) == []
    (remark,) = checks(LLAMA, 16)
    assert "each is kept 2 times over" in remark.message
    (odd,) = checks(LLAMA, 3)
    assert "cannot be divided equally" in odd.message


def test_d_ff_of_gate_and_up_together() -> None:
    """d 8192 with d_ff 86,016 where 28,672 is meant: 10.5 d, and a hint why."""
    card = from_dict(
        {
            "name": "wide",
            "family": "decoder",
            "n_layers": 80,
            "d_model": 8192,
            "vocab_size": 128256,
            "context": 8192,
            "attention": {"kind": "multi_head", "n_heads": 64, "n_kv_heads": 8},
            "position": {"kind": "rope", "theta": 500000.0},
            "norm": {"kind": "rmsnorm", "eps": 1e-5},
            "mlp": {"kind": "gated", "act": "silu", "d_ff": 86016},
            "tied": False,
        },
        "wide",
    )
    (remark,) = checks(card)
    assert "10.5 d_model" in remark.message
    assert "one matrix" in remark.message
    meant = replace(card, mlp=replace(card.mlp, d_ff=28672))
    assert checks(meant) == []
    assert sc.assemble(meant).params == 70553706496


def test_experts_count_together() -> None:
    assert codes(sc.card("qwen3-30b-a3b")) == [("tensor_parallel", "attention.n_kv_heads")]
    lone = laid("mixtral-8x7b", mlp={"top_k": 8})
    assert ("expansion", "mlp.expert.d_ff") in codes(lone)


def test_layers_and_stacks_that_differ_are_looked_at_too() -> None:
    """Where each key stands, once: what a layer has in common with the card is said of the card alone."""
    local = {"attention": {"d_head": 144}, "mlp": {"d_ff": 9000}}
    card = sc.card("llama-3-8b")
    data = msgspec.to_builtins(card)
    patterned = from_dict({**data, "n_layers": 33, "pattern": [{}, local, {"mlp": {"d_ff": 14336}}]}, "patterned")
    assert codes(patterned) == [("tile", "pattern[1].mlp.d_ff"), ("head_size", "pattern[1].attention.d_head")]
    data = msgspec.to_builtins(sc.card("t5-base"))
    sides = {"encoder": {"mlp": {"d_ff": 256}}, "decoder": {"cross": {"d_head": 20}}}
    found = codes(from_dict({**data, **sides}, "sides"), 4)
    assert found == [("expansion", "encoder.mlp.d_ff"), ("head_size", "decoder.cross.d_head")]
    assert codes(sc.card("t5-base"), 4) == []
