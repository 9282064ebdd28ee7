"""Cases about the number of parameters."""

from __future__ import annotations

import json

import pytest
import torch
from tests.cases.small import CASES, recorded
from tests.conftest import GOLDEN

import scantling as sc
from scantling.cards.read import from_dict, read_text
from scantling.checkpoint.hf_config import card_of_config
from scantling.numbers.memory import memory
from scantling.numbers.parallel.layouts import Layout, Mesh
from scantling.numbers.parallel.ranks import kinds, ranks, weights

QWEN3_4B = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(("head_dim", "params"), [(128, 4_022_468_096), (80, 3_668_570_240)])
def test_the_width_of_a_head_is_its_own_number(head_dim: int, params: int) -> None:
    """PAR-04: heads of 128 on a stream of 2560; 2560 / 32 = 80 would be another model."""
    model = sc.assemble(card_of_config(QWEN3_4B | {"head_dim": head_dim}, "qwen3-4b", "config.json"))
    assert model.params == params
    weights = model.named_weights
    assert weights["decoder.blocks.0.attn.q.weight"] == (32 * head_dim, 2560)
    assert sum(shape[0] for name, shape in weights.items() if "attn.q_norm" in name or "attn.k_norm" in name) == (
        36 * 2 * head_dim
    )


def test_a_wide_head_loads_and_gives_the_recorded_logits() -> None:
    """PAR-04: the fixture with a head width that is not the quotient."""
    folder = CASES / "qwen3-head-dim"
    config = json.loads((folder / "config.json").read_text())
    assert config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]
    ids, wanted = recorded(folder)
    torch.testing.assert_close(sc.load(folder).logits(ids)[0, -1], wanted, atol=2e-6, rtol=0)


@pytest.mark.parametrize(("d_ff", "params"), [(28672, 70_553_706_496), (86016, 183_296_598_016)])
def test_d_ff_is_the_width_of_one_matrix(d_ff: int, params: int) -> None:
    """PAR-12: the width before a split into gate, up and down is another model, three times as wide."""
    assert 183_296_598_016 - 70_553_706_496 == 80 * 3 * 8192 * (86016 - 28672)
    card = from_dict(
        {
            "name": "70b",
            "family": "decoder",
            "n_layers": 80,
            "d_model": 8192,
            "vocab_size": 128256,
            "context": 8192,
            "attention": {"kind": "multi_head", "n_heads": 64, "n_kv_heads": 8},
            "position": {"kind": "rope", "theta": 5e5},
            "norm": {"kind": "rmsnorm", "eps": 1e-5},
            "mlp": {"kind": "gated", "act": "silu", "d_ff": d_ff},
            "tied": False,
        },
        "70b",
    )
    assert sc.assemble(card).params == params


HEADS = """
name: heads
family: decoder
n_layers: 1
d_model: 4096
vocab_size: 64
context: 64
attention: {{kind: multi_head, n_heads: 32, d_head: 128, {key}: 8}}
position: {{kind: none}}
norm: {{kind: rmsnorm, eps: 1.0e-5}}
mlp: {{kind: gated, act: silu, d_ff: 64}}
tied: true
"""


def test_kv_heads_are_named_without_ambiguity() -> None:
    """PAR-13: 8 KV heads keep 4096 bytes per token and layer; groups of 8 query heads would keep 2048."""
    model = sc.assemble(read_text(HEADS.format(key="n_kv_heads"), "heads.yaml"))
    assert model.named_weights["decoder.blocks.0.attn.k.weight"] == (8 * 128, 4096)
    assert memory(model, sc.Workload(), "bfloat16", "bfloat16").kv_per_token == 4096
    four = sc.assemble(read_text(HEADS.format(key="n_kv_heads").replace(": 8}", ": 4}"), "heads.yaml"))
    assert memory(four, sc.Workload(), "bfloat16", "bfloat16").kv_per_token == 2048


@pytest.mark.parametrize("key", ["kv_groups", "n_kv_groups", "group_size", "num_kv_groups", "kv_heads"])
def test_a_name_that_could_mean_either_is_refused(key: str) -> None:
    """PAR-13: the message names the one key that there is."""
    with pytest.raises(sc.ScantlingInputError, match=rf"unknown key 'attention\.{key}'.*n_kv_heads"):
        read_text(HEADS.format(key=key), "heads.yaml")


def test_the_base_of_an_adapter_is_counted_alone() -> None:
    """PAR-06: CodeLlama-7B as it is, before anything is added to it."""
    config = json.loads((GOLDEN / "configs" / "llama-2-7b.json").read_text()) | {"vocab_size": 32016}
    assert sc.assemble(card_of_config(config, "codellama-7b", "config.json")).params == 6_738_546_688


def test_a_tied_table_is_held_by_two_pipeline_ranks_and_counted_once() -> None:
    """PAR-09: GPT-2 small on 2 ranks: 163,037,184 numbers in memory, 124,439,808 of them the model."""
    model = sc.assemble(sc.card("gpt2"))
    known = kinds(model)
    where = weights(model, known)
    layout = Layout(Mesh(1, 1, 2))
    held = sum(rank.how_many * where.of(rank, 1, 1).total for rank in ranks(known.order, layout))
    assert (held, model.params) == (163_037_184, 124_439_808)
    assert held - model.params == 50_257 * 768
