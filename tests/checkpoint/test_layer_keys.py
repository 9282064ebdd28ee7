"""Config keys that tell layers apart, and keys that only some relatives of Llama have."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import GOLDEN

import scantling as sc
from scantling.assembly import assemble
from scantling.cards import Card
from scantling.checkpoint.hf_config import card_of_config
from scantling.checkpoint.layer_keys import FULL, SLIDING, pattern
from scantling.parts.rope import RoPE


def card_of(name: str, spelling: str = "config.json", **changed: Any) -> Card:
    """The card of a recorded config with some keys changed; `...` removes one."""
    config = json.loads((GOLDEN / "tiny" / name / spelling).read_text()) | changed
    return card_of_config({key: value for key, value in config.items() if value is not ...}, name, name)


def assert_refused(name: str, *words: str, **changed: Any) -> None:
    with pytest.raises(sc.ScantlingInputError) as error:
        card_of(name, **changed)
    assert all(word in str(error.value) for word in words), error.value


def blocks(card: Card) -> tuple[Any, ...]:
    return assemble(card).decoder.blocks


def windows(card: Card) -> list[int | None]:
    return [block.children()["attn"].visibility.window for block in blocks(card)]


def dense(card: Card) -> list[bool]:
    return ["router" not in block.children()["mlp"].children() for block in blocks(card)]


def turned(card: Card) -> list[bool]:
    return [isinstance(block.children()["attn"].position, RoPE) for block in blocks(card)]


@given(st.lists(st.sampled_from([{}, {"position": {"kind": "none"}}, {"attention": {"window": 3}}]), max_size=12))
def test_a_pattern_repeated_and_cut_is_the_layers_it_came_from(layers: list[dict[str, Any]]) -> None:
    unit = [{k: v for k, v in entry.items() if k != "times"} for entry in pattern(layers) for _ in range(times(entry))]
    assert len(unit) <= len(layers)
    assert [unit[i % len(unit)] if unit else {} for i in range(len(layers))] == layers


def times(entry: dict[str, Any]) -> int:
    return int(entry.get("times", 1))


@settings(deadline=None)
@given(
    st.sampled_from(["qwen2", "qwen3", "smollm3"]),
    st.integers(1, 6),
    st.integers(0, 7),
    st.booleans(),
    st.sampled_from([None, 5]),
)
def test_windows_of_each_layer_are_those_of_the_original(
    name: str, layers: int, start: int, used: bool, window: int | None
) -> None:
    transformers = pytest.importorskip("transformers")
    keys: dict[str, Any] = {"num_hidden_layers": layers, "sliding_window": window, "use_sliding_window": used}
    keys |= {"no_rope_layer_interval": max(start, 1)} if name == "smollm3" else {"max_window_layers": start}
    kinds = {"qwen2": "Qwen2Config", "qwen3": "Qwen3Config", "smollm3": "SmolLM3Config"}
    original = getattr(transformers, kinds[name])(**keys)
    card = card_of(name, layer_types=..., no_rope_layers=..., **keys)
    assert windows(card) == [window if kind == SLIDING else None for kind in original.layer_types]
    if name == "smollm3":
        assert turned(card) == [bool(turns) for turns in original.no_rope_layers]


def test_listed_layer_types_win_over_max_window_layers() -> None:
    card = card_of("qwen2-swa", max_window_layers=0, layer_types=[FULL, SLIDING])
    assert windows(card) == [None, 6]
    assert_refused("qwen2-swa", "layer_types names 1 layers", layer_types=[FULL])
    assert_refused("qwen2-swa", "'linear_attention'", layer_types=[FULL, "linear_attention"])
    assert_refused("qwen2-swa", "a list of names", layer_types=[FULL, 1])
    assert_refused("qwen2", "no sliding_window is in use", layer_types=[FULL, SLIDING])
    assert_refused("smollm3", "no sliding_window is in use", layer_types=[FULL, SLIDING], sliding_window=4)


@pytest.mark.parametrize("name", ["qwen2", "qwen3-moe", "smollm3"])
def test_a_monstrous_number_of_layers_is_refused_at_once(name: str) -> None:
    assert_refused(name, "num_hidden_layers", num_hidden_layers=10**12, layer_types=...)


@pytest.mark.parametrize(
    ("step", "listed", "wanted"),
    [
        (1, [], [False, False, False, False]),
        (2, [], [True, False, True, False]),
        (2, [3], [True, False, True, True]),
        (1, [0, 2], [True, False, True, False]),
        (5, [], [True, True, True, True]),
    ],
)
def test_sparse_layers_of_qwen3_moe(step: int, listed: list[int], wanted: list[bool]) -> None:
    card = card_of("qwen3-moe", num_hidden_layers=4, decoder_sparse_step=step, mlp_only_layers=listed)
    assert dense(card) == wanted


def test_qwen3_moe_keys() -> None:
    assert windows(card_of("qwen3-moe", use_sliding_window=True, sliding_window=5)) == [5, 5]
    assert windows(card_of("qwen3-moe", use_sliding_window=False, sliding_window=5)) == [None, None]
    assert_refused("qwen3-moe", "max_window_layers", use_sliding_window=True, sliding_window=5, max_window_layers=1)
    assert_refused("qwen3-moe", "num_experts", "num_local_experts", "must agree", num_experts=4)
    assert_refused("qwen3-moe", "layer_types", layer_types=[FULL, FULL])
    assert_refused("qwen3-moe", "whole numbers", mlp_only_layers=["0"])


def test_smollm3_layers_without_rope() -> None:
    assert turned(card_of("smollm3", no_rope_layers=[0, 1, 1, 1])) == [False, True]
    assert_refused("smollm3", "no_rope_layers", no_rope_layers=[1])
    assert_refused("smollm3", "no_rope_layers", no_rope_layers=[1, 2])


def test_a_missing_key_means_what_the_original_takes_it_for() -> None:
    assert card_of("smollm3", "config_hub.json", rope_theta=...).position.theta == 2e6  # type: ignore[union-attr]
    assert card_of("olmo2", rms_norm_eps=...).norm.eps == 1e-5
    assert card_of("phi3", rms_norm_eps=...).norm.eps == 1e-5
    assert card_of("qwen2", num_key_value_heads=None).attention.n_kv_heads == 6  # type: ignore[union-attr]
    assert card_of("qwen3", head_dim=...).attention.d_head == 128  # type: ignore[union-attr]
    assert windows(card_of("qwen2-swa", sliding_window=...)) == [None, 4096]


def test_phi3_keys_that_the_original_does_not_act_on_are_refused() -> None:
    phi4_mini = {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False}
    assert card_of("phi3", **phi4_mini, attention_bias=False) == card_of("phi3")
    for key, value in {"full_attn_mod": 2, "lm_head_bias": True, "attention_bias": True, "embd_pdrop": 0.1}.items():
        assert_refused("phi3", key, **{key: value})


def test_phi3_scalings() -> None:
    assert_refused("phi3", "linear", rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0})
    lists = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    new = {"rope_type": "longrope", "rope_theta": 1e4, **lists}
    other = {**new, "original_max_position_embeddings": 8}
    assert_refused("phi3", "original_max_position_embeddings is 64 and 8", rope_parameters=other)
    assert_refused("phi3", "4096 and 8", original_max_position_embeddings=..., rope_parameters=other)
    assert card_of("phi3", "config_hub.json", rope_scaling={"type": "su", **lists}) == card_of(
        "phi3", rope_parameters=new
    )
    (rope,) = {block.children()["attn"].position for block in blocks(card_of("phi3", rope_parameters=new))}
    assert rope.scaling.factor_on_turns == 1.0
    (rope,) = {
        block.children()["attn"].position for block in blocks(card_of("phi3", rope_parameters={**new, "factor": 8.0}))
    }
    assert rope.scaling.factor_on_turns == math.sqrt(1 + math.log(8) / math.log(64))
