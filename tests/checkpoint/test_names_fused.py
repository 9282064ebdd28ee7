"""Queries, keys and values fused head by head, and the configs of the families that have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import scantling as sc
from scantling.checkpoint.hf_config import card_of_config
from scantling.checkpoint.names import Interleave


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_interleaving_round_trips(groups: int, shared: int, d_head: int, vector: bool) -> None:
    ends = () if vector else (5,)
    ours = [torch.randn(groups * n * d_head, *ends) for n in (shared, 1, 1)]
    shapes = [tuple(x.shape) for x in ours]
    transform = Interleave(groups)
    (theirs,) = transform.save(ours)
    assert transform.saved_shapes(shapes) == [tuple(theirs.shape)]
    assert all(torch.equal(a, b) for a, b in zip(transform.load([theirs], shapes), ours, strict=True))


def test_each_group_has_its_queries_its_key_and_its_value() -> None:
    rows = torch.arange(8)
    q, k, v = Interleave(2).load([rows], [(4,), (2,), (2,)])
    assert (q.tolist(), k.tolist(), v.tolist()) == ([0, 1, 4, 5], [2, 6], [3, 7])


NEOX = {
    "model_type": "gpt_neox",
    "hidden_size": 48,
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "intermediate_size": 76,
    "vocab_size": 131,
}
FALCON = {
    "model_type": "falcon",
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_hidden_layers": 2,
    "vocab_size": 131,
}
BLOOM = {"model_type": "bloom", "hidden_size": 48, "n_head": 6, "n_layer": 2, "vocab_size": 131}
MPT = {"model_type": "mpt", "d_model": 48, "n_heads": 6, "n_layers": 2, "vocab_size": 131}
OPT = {
    "model_type": "opt",
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "ffn_dim": 76,
    "vocab_size": 131,
}
GPTJ = {"model_type": "gptj", "n_embd": 48, "n_head": 4, "n_layer": 2, "rotary_dim": 8, "vocab_size": 131}
GPT1 = {"model_type": "openai-gpt", "n_embd": 48, "n_head": 4, "n_layer": 2, "vocab_size": 131}


def read(config: dict[str, Any], **changes: Any) -> sc.Card:
    return card_of_config(config | changes, "tiny", "config.json")


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (NEOX, {"rotary_pct": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}}, "they must agree"),
        (NEOX, {"hidden_dropout": 0.1, "hidden_dropout_prob": 0.2}, "hidden_dropout is 0.1 and hidden_dropout_prob"),
        (FALCON, {"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn is False"),
        (FALCON, {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn is 2"),
        (FALCON, {"multi_query": False, "num_kv_heads": 3}, "num_kv_heads is 3"),
        (FALCON, {"parallel_attn": False, "attention_dropout": 0.1}, "attention_dropout is 0.1"),
        (FALCON, {"apply_residual_connection_post_layernorm": True}, "apply_residual"),
        (BLOOM, {"n_embed": 64}, "hidden_size is 48 and n_embed is 64"),
        (BLOOM, {"n_inner": 100}, "n_inner is 100"),
        (MPT, {"no_bias": False}, "no_bias is False"),
        (MPT, {"logit_scale": 0.5}, "logit_scale is 0.5"),
        (MPT, {"attn_config": []}, "attn_config is \\[\\]; a mapping is needed"),
        (MPT, {"attn_config": {"alibi": False}}, "attn_config: alibi is False"),
        (MPT, {"attn_config": {"qk_ln": True}}, "attn_config: qk_ln is True"),
        (MPT, {"attn_config": {"rope": True}}, "attn_config: config key 'rope' is not known"),
        (MPT, {"attn_config": {"clip_qkv": "6"}}, "attn_config: clip_qkv is '6'"),
        (OPT, {"word_embed_proj_dim": 32, "tie_word_embeddings": False}, "word_embed_proj_dim is 32"),
        (OPT, {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
        (OPT, {"layerdrop": 0.1}, "layerdrop is 0.1"),
        (GPTJ, {"rotary": False}, "rotary is False"),
        (GPTJ, {"n_ctx": 64}, "n_ctx is 64"),
        (GPT1, {"afn": "gelu_new"}, "afn is 'gelu_new'"),
    ],
)
def test_what_the_families_cannot_do_is_refused_by_name(config: Any, changes: Any, message: str) -> None:
    with pytest.raises(sc.ScantlingInputError, match=message):
        read(config, **changes)


def test_old_spellings_mean_the_same() -> None:
    old = {k: v for k, v in BLOOM.items() if k not in ("hidden_size", "n_head", "n_layer")}
    assert read(old, n_embed=48, num_attention_heads=6, num_hidden_layers=2) == read(BLOOM)
    assert read(NEOX, rotary_pct=0.5, rotary_emb_base=100) == read(
        NEOX, rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 100.0}
    )


def test_falcons_three_layouts() -> None:
    seven, forty = read(FALCON), read(FALCON, new_decoder_architecture=True, num_kv_heads=2)
    eleven = read(FALCON, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1)
    assert [card.attention.n_kv_heads for card in (seven, forty, eleven)] == [1, 2, 2]
    assert [card.residual.shared_norm for card in (seven, forty, eleven)] == [True, False, True]


def test_a_tied_gptj_head_keeps_its_bias_under_its_name() -> None:
    from scantling.checkpoint.families import FAMILIES
    from scantling.checkpoint.names import foreign_shapes, links

    card = read(GPTJ, tie_word_embeddings=True)
    weights = sc.assemble(card).named_stored
    shapes = foreign_shapes(links(FAMILIES["gptj"].rows(card), weights), weights)
    assert shapes["lm_head.bias"] == (131,)
    assert "lm_head.weight" not in shapes


def test_opt_without_its_final_norm_or_biases() -> None:
    model = sc.assemble(read(OPT, _remove_final_layer_norm=True, enable_bias=False))
    assert not [name for name in model.named_weights if name.endswith(".bias") and "norm" not in name]
    assert model.decoder.final_norm is None


@pytest.mark.parametrize(("theirs", "ours"), [("gelu", "gelu_tanh"), ("swish", "silu"), (None, "gelu_tanh")])
def test_gpt1_calls_the_approximation_gelu(theirs: Any, ours: str) -> None:
    assert read(GPT1, afn=theirs).mlp.act == ours
