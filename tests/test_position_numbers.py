"""Angles and slopes of real models against the numbers recorded from the original rotary modules (float32)."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tests.conftest import GOLDEN, golden_json

import scantling as sc
from scantling.checkpoint.families import FAMILIES
from scantling.checkpoint.hf_config import card_of_config
from scantling.parts.position import ALiBi
from scantling.parts.rope import Dynamic, RoPE

POSITION = golden_json("position.json")
FLOAT32 = 2e-6


def config(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / "configs" / f"{name}.json").read_text())  # type: ignore[no-any-return]


MODELS = [name for name in POSITION["rope"] if config(name)["model_type"] in FAMILIES]


def ropes(name: str) -> list[RoPE]:
    """The distinct RoPEs of a model, in the order of their first layers."""
    card = card_of_config(config(name), name, name)
    found = [part.position for _, part, _ in sc.assemble(card).walk() if hasattr(part, "position")]
    return [rope for rope in dict.fromkeys(found) if isinstance(rope, RoPE)]


def factor(rope: RoPE) -> float:
    return 1.0 if rope.scaling is None else rope.scaling.factor_on_turns


def test_the_list_covers_every_scaling_of_the_families() -> None:
    assert len(MODELS) >= 31


@pytest.mark.parametrize("name", MODELS)
def test_angles_of_a_real_model(name: str) -> None:
    wanted, found = POSITION["rope"][name], ropes(name)
    by_kind = wanted.get("layer_types") or {"every": wanted}
    assert len(found) == len({str(kind) for kind in by_kind.values()})
    unmatched = list(found)
    for kind in by_kind.values():
        match = next(r for r in found if r.frequencies(1) == pytest.approx(kind["inv_freq"], rel=FLOAT32))
        assert factor(match) == pytest.approx(kind["attention_scaling"], rel=FLOAT32)
        unmatched.remove(match)
    assert unmatched == []


def test_longrope_beyond_the_trained_length() -> None:
    wanted, (rope,) = POSITION["rope"]["phi-3.5-mini"], ropes("phi-3.5-mini")
    assert rope.frequencies(4096) == pytest.approx(wanted["inv_freq"], rel=FLOAT32)
    assert rope.frequencies(4097) == pytest.approx(wanted["inv_freq_long"], rel=FLOAT32)
    assert factor(rope) == pytest.approx(wanted["attention_scaling_long"], rel=FLOAT32)


@pytest.mark.parametrize("length", POSITION["rope_dynamic_example"]["by_seq_len"])
def test_dynamic_angles_by_length(length: str) -> None:
    example = POSITION["rope_dynamic_example"]
    scaling = Dynamic(example["factor"], example["max_position_embeddings"])
    rope = RoPE(example["head_dim"], example["theta"], scaling=scaling)
    assert rope.frequencies(int(length)) == pytest.approx(example["by_seq_len"][length], rel=FLOAT32)
    assert factor(rope) == 1.0


@pytest.mark.parametrize("n_heads", POSITION["alibi_slopes"])
def test_alibi_slopes(n_heads: str) -> None:
    wanted, slopes = POSITION["alibi_slopes"][n_heads], ALiBi(int(n_heads)).slopes()
    assert slopes == pytest.approx(wanted["bloom"], rel=FLOAT32)
    assert slopes == pytest.approx(wanted["mpt_max8"], rel=FLOAT32)
    assert torch.tensor(slopes).bfloat16().tolist() == wanted["falcon_bf16"]
