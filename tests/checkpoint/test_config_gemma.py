"""Configs of Gemma, gpt-oss, StableLM and Phi in the spellings that exist, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import GOLDEN

import scantling as sc
from scantling.cards import Card, to_yaml
from scantling.checkpoint.find import card_of
from scantling.checkpoint.hf_config import card_of_config

GONE = object()


def config(name: str, **changes: Any) -> dict[str, Any]:
    """A recorded config with some keys changed or, by GONE, taken away."""
    data = json.loads((GOLDEN / "tiny" / name / "config_hub.json").read_text()) | changes
    return {key: value for key, value in data.items() if value is not GONE}


def card(name: str, **changes: Any) -> Card:
    return card_of_config(config(name, **changes), name, "config.json")


def windows(name: str, **changes: Any) -> list[int | None]:
    blocks: Any = sc.assemble(card(name, **changes)).decoder.blocks
    return [block.children()["attn"].visibility.window for block in blocks]


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss", "gemma3-text"])
@pytest.mark.parametrize("changes", [{}, {"sliding_window_pattern": 3}, {"sliding_window_pattern": 1}])
def test_layers_that_are_not_listed_follow_the_familys_rule(name: str, changes: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    if changes and name != "gemma3-text":
        with pytest.raises(sc.ScantlingInputError, match="'sliding_window_pattern' is not known"):
            card(name, **changes)
        return
    data = config(name, layer_types=GONE, _sliding_window_pattern=GONE, num_hidden_layers=8, **changes)
    original = transformers.AutoConfig.for_model(**data)
    wanted = [original.sliding_window if kind == "sliding_attention" else None for kind in original.layer_types]
    gone = {"layer_types": GONE, "_sliding_window_pattern": GONE}
    assert windows(name, **gone, num_hidden_layers=8, **changes) == wanted


def test_a_listed_layer_counts_more_than_a_period() -> None:
    assert windows("gemma3-text", sliding_window_pattern=1) == [6, 6, None]


def test_a_window_that_is_null_is_not_the_default() -> None:
    with pytest.raises(sc.ScantlingInputError, match="no sliding_window is in use"):
        card("gemma2", sliding_window=None)
    assert windows("gemma2", sliding_window=None, layer_types=["full_attention"] * 2) == [None, None]
    assert windows("gemma2", sliding_window=GONE) == [4096, None]


def test_a_cap_that_is_null_is_not_the_default() -> None:
    capped, free = card("gemma2", final_logit_softcapping=GONE), card("gemma2", final_logit_softcapping=None)
    assert (capped.head.softcap, free.head.softcap) == (30.0, None)


def test_layer_types_turn_by_their_own_bases() -> None:
    blocks: Any = sc.assemble(card("gemma3-text")).decoder.blocks
    near, _, far = (block.children()["attn"].position for block in blocks)
    assert (near.theta, near.scaling) == (1000.0, None)
    assert (far.theta, far.scaling.factor) == (50000.0, 4.0)
    plain = {"rope_theta": GONE, "rope_local_base_freq": GONE, "rope_scaling": None}
    blocks = sc.assemble(card("gemma3-text", **plain)).decoder.blocks
    assert [block.children()["attn"].position.theta for block in blocks] == [1e4, 1e4, 1e6]


def test_gpt_oss_without_a_word_on_rope_is_stretched() -> None:
    position: Any = card("gpt-oss", rope_scaling=GONE, rope_theta=GONE).position
    assert (position.theta, position.scaling.factor, position.scaling.truncate) == (150000.0, 32.0, False)


@pytest.mark.parametrize(
    ("name", "changes", "act"),
    [
        ("gemma", {"hidden_act": "gelu"}, "gelu_tanh"),
        ("gemma", {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}, "gelu_tanh"),
        ("gemma", {"hidden_act": GONE}, "gelu_tanh"),
        ("gemma2", {"hidden_activation": "gelu", "hidden_act": GONE}, "gelu"),
        ("gemma2", {"hidden_act": "gelu"}, "gelu_tanh"),
    ],
)
def test_the_activation_under_its_two_keys(name: str, changes: dict[str, Any], act: str) -> None:
    mlp: Any = card(name, **changes).mlp
    assert mlp.act == act


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("gemma", {"hidden_act": "silu", "hidden_activation": "relu"}, "hidden_act is silu and hidden_activation is"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("gemma", {"head_dim": GONE}, "head_dim is missing"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ("gemma2", {"layer_types": ["sliding_attention"]}, "layer_types names 1 layers"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 2}, "layer_types has 'chunked_attention'"),
        ("gemma3-text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ("gemma3-text", {"layer_types": GONE, "_sliding_window_pattern": 5}, "_sliding_window_pattern is 5"),
        ("gemma3-text", {"rope_parameters": {"rope_theta": 5.0}}, "rope_parameters has 'rope_theta'; known: full_"),
        (
            "gemma3-text",
            {"rope_parameters": {"sliding_attention": {"rope_theta": 5.0}}},
            "rope_theta is 1000.0 and 5.0; they must agree",
        ),
        ("gpt-oss", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("gpt-oss", {"experts_per_token": 3}, "experts_per_token is 3"),
        ("stablelm", {"hidden_dropout": 0.1}, "hidden_dropout is 0.1"),
        ("phi", {"layer_norm_epsilon": 1e-5}, "'layer_norm_epsilon' is not known"),
    ],
)
def test_what_would_change_results_is_refused_by_name(name: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(sc.ScantlingInputError) as error:
        card(name, **changes)
    assert words in str(error.value)


@pytest.mark.parametrize("name", ["gemma", "gemma2", "gemma3-text"])
def test_the_embeddings_scale_is_rounded_with_them(name: str) -> None:
    """To the last bit, in bfloat16: sqrt(48) is no bfloat16 number."""
    transformers = pytest.importorskip("transformers")
    folder, ids = GOLDEN / "tiny" / name, torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    original = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    wanted = original(ids, output_hidden_states=True).hidden_states[0]
    lm = sc.load(folder, dtype="bfloat16")
    assert torch.equal(lm.hidden(ids)[0], wanted)
    assert not torch.equal(lm.net.get_submodule("embed")(ids) * 48**0.5, wanted)


def test_a_tied_phi_keeps_the_heads_bias(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    data = config("phi", tie_word_embeddings=True)
    original = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**data)).eval()
    with torch.no_grad():
        original.lm_head.bias.add_(torch.randn(131))
    original.save_pretrained(tmp_path)
    ids = torch.tensor([[5, 4, 3, 2]])
    torch.testing.assert_close(sc.load(tmp_path).logits(ids), original(ids).logits, atol=5e-5, rtol=1e-4)


def test_quantised_weights_can_be_counted_and_not_read(tmp_path: Path) -> None:
    quantised = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config("gpt-oss", quantization_config=quantised)))
    counted = card_of(tmp_path)
    assert sc.assemble(counted).params == sc.assemble(card("gpt-oss")).params
    assert counted.source is not None
    assert "stored quantised ('mxfp4')" in to_yaml(counted)
    (tmp_path / "model.safetensors").write_bytes((GOLDEN / "tiny" / "gpt-oss" / "model.safetensors").read_bytes())
    with pytest.raises(sc.ScantlingInputError, match=r"the weights are quantised \('mxfp4'\), which cannot be read"):
        sc.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config("gpt-oss", quantization_config="mxfp4")))
    with pytest.raises(sc.ScantlingInputError, match="quantization_config is 'mxfp4'; a mapping is needed"):
        card_of(tmp_path)
