"""GGUF metadata as a card: every key is mapped, irrelevant, or refused by name."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from tests.conftest import DATA

import scantling as sc
from scantling.cards.schema import Llama3Scaling, LongRopeScaling, MoE
from scantling.checkpoint.families.gguf import card_of_gguf
from scantling.checkpoint.find import card_of
from scantling.checkpoint.gguf import read_gguf

COMMON = {
    "context_length": 64,
    "embedding_length": 48,
    "block_count": 4,
    "feed_forward_length": 76,
    "attention.head_count": 6,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
}


def read(name: str, tensors: dict[str, Any] | None = None, **changes: Any) -> sc.Card:
    keys = COMMON | {key.replace("__", "."): value for key, value in changes.items()}
    metadata = {f"{name}.{key}": value for key, value in keys.items() if value is not None}
    table = {"token_embd.weight": SimpleNamespace(shape=(131, 48))}
    return card_of_gguf({"general.architecture": name, **metadata}, table | (tensors or {}), "x.gguf")


def floats(*values: float) -> Any:
    return SimpleNamespace(shape=(len(values),), kind="F32", values=values)


def test_the_sizes_of_a_llama() -> None:
    card = read("llama", {"output.weight": SimpleNamespace(shape=(131, 48))})
    assert (card.n_layers, card.d_model, card.vocab_size, card.context) == (4, 48, 131, 64)
    assert (card.attention.n_heads, card.attention.n_kv_heads, card.attention.d_head) == (6, 2, 8)
    assert (card.norm.eps, card.mlp.d_ff, card.tied, card.attention.bias) == (1e-5, 76, False, [])
    assert read("llama", {"blk.0.attn_output.bias": 0}).attention.bias == ["o"]


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("llamma", {}, "general.architecture is 'llamma'; known: .*; did you mean 'llama'?"),
        ("gemma4", {}, "general.architecture is 'gemma4'; known: .*; did you mean 'gemma"),
        ("llama", {"block_count": None}, "llama.block_count is missing"),
        (
            "llama",
            {"rope__dimension_count": 4},
            "llama.rope.dimension_count is 4, which is not supported; it must be 8",
        ),
        ("llama", {"rope__scaling__type": "ntk"}, "llama.rope.scaling.type is 'ntk'; known: none, linear, yarn"),
        ("llama", {"rope__scaling__type": "longrope"}, "tensor 'rope_factors_long.weight' is missing"),
        ("llama", {"rope__scaling__attn_factor": 1.2}, "attn_factor is 1.2, which is not supported"),
        ("llama", {"rope__scaling__type": "yarn", "rope__scaling__yarn_ext_factor": 0.5}, "yarn_ext_factor is 0.5"),
        ("llama", {"attention__sliding_window": 7}, "'llama.attention.sliding_window' is not known"),
        ("llama", {"attention__causal": False}, "llama.attention.causal is False"),
        ("llama", {"attention__value_length": 9}, "llama.attention.value_length is 9"),
        ("llama", {"expert_count": 4}, "llama.expert_used_count is missing"),
        ("llama", {"logit_scale": 0.5}, "'llama.logit_scale' is not known"),
        ("llama", {"vocab_size": 130}, "llama.vocab_size is 130 and 'token_embd.weight' has 131 rows"),
        ("qwen2", {"attention__key_length": 10}, "qwen2.attention.key_length is 10"),
        ("qwen2", {"pooling_type": 3}, "qwen2.pooling_type is 3"),
        ("gemma2", {"rope__freq_base_swa": 500.0}, "it must be that of the other layers, 10000.0"),
        ("gemma2", {"attention__sliding_window_pattern": [True]}, "a true or false for each of the 4 layers"),
        ("gpt2", {}, "gpt2.attention.head_count_kv is 2"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(name: str, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(sc.ScantlingInputError, match=told):
        read(name, **changes)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("general.type", "mmproj", "general.type is 'mmproj'"),
        ("split.count", 3, "split.count is 3: one file of several"),
    ],
)
def test_what_is_no_whole_model_is_refused(key: str, value: Any, told: str) -> None:
    with pytest.raises(sc.ScantlingInputError, match=told):
        card_of_gguf({"general.architecture": "llama", key: value}, {}, "x.gguf")


def test_scalings_of_the_angles() -> None:
    linear = read("llama", rope__scaling__factor=4.0)
    assert (
        linear.position.scaling
        == read("llama", rope__scaling__type="linear", rope__scaling__factor=4.0).position.scaling
    )
    assert linear.position.scaling.factor == 4.0
    assert read("llama", rope__scaling__type="none", rope__scaling__factor=4.0).position.scaling is None
    keys = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 16}
    yarn = read("qwen3", **keys).position.scaling
    assert (yarn.factor, yarn.trained_length, yarn.beta_fast, yarn.beta_slow) == (4.0, 16, 32.0, 1.0)


def test_llama3_is_recognised_by_its_divisors() -> None:
    """Llama 3.1 8B: theta 500000, 128 channels, factor 8, trained for 8192, wavelengths bounded at 8192 and 2048."""
    divisors = []
    for i in range(64):
        wave = 2 * math.pi * 500000.0 ** (2 * i / 128)
        smooth = (8192 / wave - 1) / 3
        divisors.append(1.0 if wave < 2048 else 8.0 if wave > 8192 else 1 / ((1 - smooth) / 8 + smooth))
    changes = {"attention__key_length": 128, "rope__freq_base": 500000.0, "context_length": 131072}
    stored = [float(np.float32(value)) for value in divisors]
    card = read("llama", {"rope_freqs.weight": floats(*stored)}, **changes)
    assert card.position.scaling == Llama3Scaling(
        factor=8.0, trained_length=8192, low_freq_factor=1.0, high_freq_factor=4.0
    )
    other = read("llama", {"rope_freqs.weight": floats(*[1.5] * 32, *[3.0] * 32)}, **changes)
    assert isinstance(other.position.scaling, LongRopeScaling)
    assert other.position.scaling.short_factor == other.position.scaling.long_factor == [1.5] * 32 + [3.0] * 32
    assert other.position.scaling.attention_factor == 1.0


def test_divisors_must_fit() -> None:
    with pytest.raises(sc.ScantlingInputError, match=r"'rope_freqs.weight' is F32 of shape \[3\]; F32 of shape \[4\]"):
        read("llama", {"rope_freqs.weight": floats(1.0, 1.0, 2.0)})
    with pytest.raises(sc.ScantlingInputError, match=r"'rope_freqs\.weight' holds 0\.0; numbers above 0"):
        read("llama", {"rope_freqs.weight": floats(1.0, 1.0, 2.0, 0.0)})


def test_longrope_of_phi3() -> None:
    tensors = {"rope_factors_long.weight": floats(1.0, 2.0, 3.0, 4.0), "rope_factors_short.weight": floats(*[1.0] * 4)}
    keys = {"rope__scaling__original_context_length": 16, "attention__sliding_window": 12}
    usual = read("phi3", tensors, **keys, rope__scaling__attn_factor=float(np.float32(math.sqrt(1.5))))
    assert usual.position.scaling.long_factor == [1.0, 2.0, 3.0, 4.0]
    assert usual.position.scaling.attention_factor is None
    assert usual.attention.window == 12
    assert read("phi3", tensors, **keys, rope__scaling__attn_factor=1.5).position.scaling.attention_factor == 1.5
    assert read("phi3", attention__sliding_window=0).attention.window is None


def windows(card: sc.Card) -> list[int | None]:
    return [block.children()["attn"].visibility.window for block in sc.assemble(card).decoder.blocks]


def test_gemma_layers_with_a_window() -> None:
    assert windows(read("gemma2", attention__sliding_window=7)) == [7, None, 7, None]
    assert windows(read("gemma3", attention__sliding_window=7)) == [7, 7, 7, 7]
    assert windows(read("gemma3", attention__sliding_window=7, block_count=7)) == [7, 7, 7, 7, 7, None, 7]
    assert windows(read("gemma3")) == [None] * 4
    assert windows(read("gemma3", attention__sliding_window=7, attention__sliding_window_pattern=3)) == [7, 7, None, 7]
    listed = [False, True, True, False]
    assert windows(read("gemma2", attention__sliding_window_pattern=listed)) == [None, 4096, 4096, None]


def test_gemma_turns_near_layers_by_their_own_base_and_without_scaling() -> None:
    card = read("gemma3", attention__sliding_window=7, block_count=6, rope__freq_base=1e6, rope__scaling__factor=8.0)
    turns = [block.children()["attn"].position for block in sc.assemble(card).decoder.blocks]
    assert [turn.theta for turn in turns] == [10000.0] * 5 + [1000000.0]
    assert [turn.scaling is None for turn in turns] == [True] * 5 + [False]


def test_gemma_scales_by_the_head_and_the_largest_by_the_stream() -> None:
    assert read("gemma2", attention__key_length=16).attention.scale == 0.25
    assert read("gemma2", attention__key_length=16, attention__scale=0.5).attention.scale == 0.5
    assert read("gemma2", attention__key_length=16, block_count=46).attention.scale == 8**-0.5
    card = read("gemma2")
    assert (card.attention.softcap, card.head.softcap, card.embedding.scale) == (50.0, 30.0, math.sqrt(48))
    assert read("gemma3").head.softcap is None


def test_experts() -> None:
    mixtral = read("llama", expert_count=4, expert_used_count=2).mlp
    assert isinstance(mixtral, MoE)
    assert (mixtral.n_experts, mixtral.top_k, mixtral.expert.d_ff, mixtral.normalize) == (4, 2, 76, True)
    keys = {"expert_count": 4, "expert_used_count": 2}
    assert read("qwen3moe", **keys, expert_feed_forward_length=20).mlp.expert.d_ff == 20
    assert read("qwen3moe", **keys).mlp.expert.d_ff == 38


def test_dimensions_are_listed_fastest_first() -> None:
    """LOAD-28: the file lists (128, 64), (128, 128), (128, 32)."""
    path = DATA / "checkpoints" / "gguf-llama-gqa" / "model.gguf"
    listed = {tensor.name: tuple(tensor.shape) for tensor in gguf.GGUFReader(path).tensors}
    assert listed["token_embd.weight"] == (128, 64)
    shapes = {name: tensor.shape for name, tensor in read_gguf(path).tensors.items()}
    assert shapes["token_embd.weight"] == (64, 128)
    assert (shapes["blk.0.ffn_down.weight"], shapes["blk.0.attn_k.weight"]) == ((128, 128), (32, 128))


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    from scantling.checkpoint.gguf_write import write_gguf

    lm = sc.load(DATA / "checkpoints" / "gguf-llama-gqa" / "model.gguf")
    write_gguf(lm, tmp_path / "model.gguf")
    data = (tmp_path / "model.gguf").read_bytes()
    key = b"llama.feed_forward_length" + (4).to_bytes(4, "little")
    at = data.index(key) + len(key)
    (tmp_path / "other.gguf").write_bytes(data[:at] + (64).to_bytes(4, "little") + data[at + 4 :])
    told = r"tensor 'blk\.0\.ffn_gate\.weight' has shape \[128, 128\] and the config asks for \[64, 128\]"
    with pytest.raises(sc.ScantlingInputError, match=told):
        sc.load(tmp_path / "other.gguf")
    assert card_of(tmp_path / "other.gguf").mlp.d_ff == 64
