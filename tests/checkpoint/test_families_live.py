"""Families without recorded files: the original implementation is built here, saved, read by ours, and saved again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import GOLDEN

import scantling as sc
from scantling.checkpoint.hf_config import card_of_config

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MIXTURE = EXPERTS | {"shared_expert_intermediate_size": 40}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2-moe": ("Qwen2Moe", SIZES | MIXTURE),
    "qwen2-moe, some layers dense": ("Qwen2Moe", SIZES | MIXTURE | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    "qwen2-moe, sliding and normalised": (
        "Qwen2Moe",
        SIZES | MIXTURE | {"norm_topk_prob": True, "use_sliding_window": True, "sliding_window": 5},
    ),
    "glm": ("Glm", SIZES | {"head_dim": 12}),
    "glm, without biases": ("Glm", SIZES | {"head_dim": 16, "attention_bias": False, "partial_rotary_factor": 0.25}),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_there_and_back(name: str, tmp_path: Path) -> None:
    kind, sizes = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    original = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for weight in original.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    original.save_pretrained(tmp_path / "theirs")
    ids = torch.arange(24).view(2, 12) * 7 % 96
    wanted = original(ids).logits

    lm = sc.load(tmp_path / "theirs")
    torch.testing.assert_close(lm.logits(ids), wanted, atol=5e-5, rtol=1e-4)
    assert lm.parts.params == original.num_parameters()
    sc.save(lm, tmp_path / "ours")
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert written["model_type"] == config.model_type
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    torch.testing.assert_close(again(ids).logits, wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_a_card_alone_finds_the_family(name: str, tmp_path: Path) -> None:
    """Without the config it came with, the written one is of the same family and gives the same model."""
    kind, sizes = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**sizes)
    card = card_of_config(json.loads(config.to_json_string()), name, "config.json")
    sc.save(sc.new(card), tmp_path / "born")
    written = json.loads((tmp_path / "born" / "config.json").read_text())
    assert written["model_type"] == config.model_type
    assert sc.assemble(sc.load(tmp_path / "born").card) == sc.assemble(card)


def test_bloom_in_slices_is_refused() -> None:
    """Its original then leaves out the shifts of attention's and of the MLP's output."""
    config = json.loads((GOLDEN / "tiny" / "bloom" / "config.json").read_text()) | {"pretraining_tp": 4}
    assert card_of_config(config | {"slow_but_exact": False}, "bloom", "config.json").n_layers == 2
    with pytest.raises(sc.ScantlingInputError, match="slow_but_exact is True, which is not supported; it must be F"):
        card_of_config(config | {"slow_but_exact": True}, "bloom", "config.json")


def test_the_published_mixture_has_its_parameters() -> None:
    """FLP-11: Qwen1.5-MoE-A2.7B, whose sizes are the defaults of its class; 4 routed experts and the shared one act."""
    config = json.loads(transformers.Qwen2MoeConfig(architectures=["Qwen2MoeForCausalLM"]).to_json_string())
    model = sc.assemble(card_of_config(config, "qwen1.5-moe-a2.7b", "config.json"))
    assert (model.params, model.active_params) == (14_315_784_192, 2_689_173_504)


def test_which_layers_of_a_mixture_are_sparse() -> None:
    """FLP-11: every second layer, but not layer 3: 1 and 5."""
    config = {
        "model_type": "qwen2_moe",
        "architectures": ["Qwen2MoeForCausalLM"],
        "hidden_act": "silu",
        **MODELS["qwen2-moe, some layers dense"][1],
    }
    model = sc.assemble(card_of_config(config, "mixture", "config.json"))
    assert model.decoder is not None
    sparse = [i for i, block in enumerate(model.decoder.blocks) if "router" in dict(block.children()["mlp"].parts())]
    assert sparse == [1, 5]
