"""config.json as a card: right values for both spellings of a key, one sentence for everything else."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.conftest import DATA

import scantling as sc
from scantling.assembly import assemble
from scantling.cards import Card, read_text, to_yaml
from scantling.cards.rules import table_rows
from scantling.cards.schema import (
    DynamicScaling,
    Gated,
    LayerNorm,
    Learned,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    MoE,
    Plain,
    RMSNorm,
    RoPE,
    Scaling,
    YarnScaling,
)
from scantling.checkpoint.config_keys import MAX_BYTES
from scantling.checkpoint.find import config_path, find
from scantling.checkpoint.hf_config import card_of_config, read_config
from scantling.errors import ScantlingInputError
from scantling.parts import rope as parts
from scantling.parts.attention import Attention
from scantling.parts.part import Workload

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "transformers_version": "4.40.0",
    "use_cache": True,
}
MISTRAL = LLAMA | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 8}
MIXTRAL = MISTRAL | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "vocab_size": 256,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "n_ctx": 128,
    "layer_norm_epsilon": 1e-5,
    "attn_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "resid_pdrop": 0.1,
    "initializer_range": 0.02,
    "summary_type": "cls_index",
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
}
GONE = object()
STABLELM = LLAMA | {"model_type": "stablelm", "architectures": ["StableLmForCausalLM"], "rms_norm_eps": GONE}
NEOX = STABLELM | {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "num_key_value_heads": GONE}
BASE = {"llama": LLAMA, "mistral": MISTRAL, "mixtral": MIXTRAL, "gpt2": GPT2, "stablelm": STABLELM, "neox": NEOX}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0], "original_max_position_embeddings": 32}
SCALINGS = "is not supported; known: default, linear, dynamic, yarn, llama3, longrope"


def config(family: str = "llama", **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in (BASE[family] | changes).items() if value is not GONE}


def read(family: str = "llama", **changes: Any) -> Card:
    return card_of_config(config(family, **changes), "small", "config.json")


def checked(message: str, *words: str) -> None:
    assert len(message.splitlines()) == 1
    assert len(message) < 600
    for word in words:
        assert word in message


# The family, the changes to its config, and words of the message.
BAD: list[tuple[str, dict[str, Any], *tuple[str, ...]]] = [
    # Families.
    ("llama", {"model_type": "lama"}, "model_type is 'lama'; known: gpt2, llama, mistral, mixtral", "mean 'llama'?"),
    ("llama", {"model_type": "gpt-2"}, "did you mean 'gpt2'?"),
    ("llama", {"model_type": "Mixtral"}, "did you mean 'mixtral'?"),
    ("llama", {"model_type": "xlnet"}, "model_type is 'xlnet'; known: gpt2, llama"),
    ("llama", {"model_type": ""}, "model_type is ''; known"),
    ("llama", {"model_type": GONE}, "model_type is None; known"),
    ("llama", {"model_type": 3}, "model_type is 3; known"),
    ("llama", {"model_type": ["llama"]}, "model_type is ['llama']; known"),
    ("llama", {"model_type": "l" * 10_000}, "model_type is 'lll", "...", "known"),
    # Missing keys.
    ("llama", {"hidden_size": GONE}, "hidden_size is missing"),
    ("llama", {"num_hidden_layers": None}, "num_hidden_layers is missing"),
    ("llama", {"vocab_size": GONE}, "vocab_size is missing"),
    ("llama", {"num_attention_heads": GONE}, "num_attention_heads is missing"),
    ("llama", {"intermediate_size": None}, "intermediate_size is missing"),
    ("llama", {"max_position_embeddings": GONE}, "max_position_embeddings is missing"),
    ("llama", {"hidden_act": GONE}, "hidden_act is None; known: relu"),
    # Types.
    ("llama", {"hidden_size": True}, "hidden_size is True; a whole number of at least 1 is needed"),
    ("llama", {"hidden_size": "64"}, "hidden_size is '64'; a whole number"),
    ("llama", {"hidden_size": 64.0}, "hidden_size is 64.0; a whole number"),
    ("llama", {"hidden_size": [64]}, "hidden_size is [64]; a whole number"),
    ("llama", {"hidden_size": {"a": 1}}, "hidden_size is {'a': 1}; a whole number"),
    ("llama", {"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5; a whole number"),
    ("llama", {"vocab_size": True}, "vocab_size is True; a whole number"),
    ("llama", {"head_dim": True}, "head_dim is True; a whole number"),
    ("llama", {"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'; a number is needed"),
    ("llama", {"rms_norm_eps": True}, "rms_norm_eps is True; a number is needed"),
    ("llama", {"rms_norm_eps": [1e-5]}, "rms_norm_eps is [1e-05]; a number is needed"),
    ("llama", {"attention_dropout": False}, "attention_dropout is False; a number is needed"),
    ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings is 1; true or false is needed"),
    ("llama", {"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; true or false is needed"),
    ("llama", {"attention_bias": 0}, "attention_bias is 0; true or false is needed"),
    ("llama", {"mlp_bias": "no"}, "mlp_bias is 'no'; true or false is needed"),
    ("llama", {"hidden_act": ["silu"]}, "hidden_act is ['silu']; known: relu"),
    ("llama", {"hidden_act": {"name": "silu"}}, "hidden_act is {'name': 'silu'}; known"),
    ("llama", {"hidden_act": "sillu"}, "hidden_act is 'sillu'; known: relu", "did you mean 'silu'?"),
    ("llama", {"rope_theta": "10000"}, "rope_theta is '10000'; a number is needed"),
    ("llama", {"rope_theta": True}, "rope_theta is True; a number is needed"),
    ("llama", {"rope_theta": [10000]}, "rope_theta is [10000]; a number is needed"),
    ("llama", {"rope_parameters": {"rope_theta": {}}}, "rope_theta is {}; a number is needed"),
    ("llama", {"rope_parameters": {"rope_theta": "x"}, "rope_theta": 1.0}, "rope_theta is 'x'; a number is needed"),
    ("llama", {"rope_parameters": [1]}, "rope_parameters is [1]; a mapping is needed"),
    ("llama", {"rope_scaling": "linear"}, "rope_scaling is 'linear'; a mapping is needed"),
    ("llama", {"torch_dtype": 16}, "dtype is 16; known: float32, float16, bfloat16"),
    ("llama", {"torch_dtype": False}, "dtype is False; known"),
    ("llama", {"dtype": ""}, "dtype is ''; known"),
    ("llama", {"dtype": ["bfloat16"]}, "dtype is ['bfloat16']; known"),
    ("llama", {"dtype": "int8"}, "dtype is 'int8'; known: float32, float16, bfloat16"),
    # Ranges.
    ("llama", {"hidden_size": 0}, "hidden_size is 0; a whole number of at least 1"),
    ("llama", {"hidden_size": -64}, "hidden_size is -64; a whole number of at least 1"),
    ("llama", {"hidden_size": 2**20 + 4}, "d_model is 1048580; expected int <= 1048576"),
    ("llama", {"hidden_size": 2**63}, "d_model is 9223372036854775808"),
    ("llama", {"num_hidden_layers": 1025}, "n_layers is 1025; expected int <= 1024"),
    ("llama", {"num_hidden_layers": 0}, "num_hidden_layers is 0; a whole number of at least 1"),
    ("llama", {"vocab_size": 2**24 + 1}, "vocab_size is 16777217; expected int <= 16777216"),
    ("llama", {"vocab_size": -1}, "vocab_size is -1; a whole number of at least 1"),
    ("llama", {"intermediate_size": 10**400}, "mlp.d_ff is 1000", "..."),
    ("llama", {"max_position_embeddings": 0}, "max_position_embeddings is 0; a whole number of at least 1"),
    ("llama", {"num_attention_heads": 0}, "num_attention_heads is 0; a whole number of at least 1"),
    ("llama", {"head_dim": 0}, "head_dim is 0; a whole number of at least 1"),
    ("llama", {"rms_norm_eps": 0.0}, "norm.eps is 0.0; expected float > 0.0"),
    ("llama", {"rms_norm_eps": -1e-6}, "norm.eps is -1e-06; expected float > 0.0"),
    ("llama", {"rms_norm_eps": float("inf")}, "rms_norm_eps is inf; a number is needed"),
    ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; a number is needed"),
    ("llama", {"rms_norm_eps": 10**400}, "rms_norm_eps is 1000", "a number is needed"),
    ("llama", {"rope_theta": 0}, "position.theta is 0.0; expected float > 0.0"),
    ("llama", {"rope_theta": -10000.0}, "position.theta is -10000.0; expected float > 0.0"),
    ("llama", {"rope_parameters": {"rope_theta": float("nan")}}, "rope_theta is nan; a number is needed"),
    ("llama", {"attention_dropout": 1.0}, "dropout.attention is 1.0; expected float < 1.0"),
    # Keys that contradict each other.
    ("llama", {"num_attention_heads": 5}, "attention.n_kv_heads is 2: it must divide n_heads 5"),
    ("llama", {"hidden_size": 66}, "attention.n_heads is 4: n_heads must divide d_model 66, or d_head must be given"),
    ("llama", {"hidden_size": 68}, "attention.d_head is 17: RoPE turns pairs of channels, so it must be even"),
    ("llama", {"head_dim": 15}, "attention.d_head is 15", "must be even"),
    ("llama", {"num_key_value_heads": 3}, "attention.n_kv_heads is 3: it must divide n_heads 4"),
    ("llama", {"num_key_value_heads": 8}, "attention.n_kv_heads is 8: it must divide n_heads 4"),
    ("llama", {"num_key_value_heads": 0}, "num_key_value_heads is 0; a whole number of at least 1"),
    ("llama", {"torch_dtype": "float16", "dtype": "bfloat16"}, "torch_dtype is 'float16' and dtype is 'bfloat16'"),
    ("llama", {"torch_dtype": "torch.float32", "dtype": "bfloat16"}, "dtype is 'bfloat16'; they must agree"),
    ("llama", {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "is 10000.0 and 500000.0; they must agree"),
    ("llama", {"rope_scaling": {"rope_theta": 1e4}, "rope_parameters": {"rope_theta": 2e4}}, "10000.0 and 20000.0"),
    ("llama", {"rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 2.0}}, "'linear' and 'dynamic'"),
    ("llama", {"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_type": "yarn"}}, "'default' and 'yarn'"),
    ("llama", {"rope_scaling": LLAMA3, "rope_parameters": LLAMA3 | {"factor": 9.0}}, "factor is 8.0 and 9.0"),
    ("llama", {"original_max_position_embeddings": 64, "rope_scaling": LLAMA3}, "embeddings is 64 and 32; they must"),
    # RoPE scalings: an unknown one is refused by name, never run unscaled, and a known one must be complete.
    ("llama", {"rope_scaling": {"type": "linear"}}, "factor is missing"),
    ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": None}}, "factor is missing"),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "factor is missing"),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
    ("llama", {"rope_scaling": LLAMA3 | {"low_freq_factor": 4}}, "low_freq_factor is 4.0: it must be below high"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": "2"}}, "factor is '2'; a number is needed"),
    (
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 0}},
        "scaling.factor is 0.0; expected float > 0.0",
    ),
    (
        "llama",
        {"rope_scaling": {"type": "dynamic", "factor": 1e308}},
        "context is 8589934592; expected int <=",
    ),
    ("llama", {"rope_scaling": {"type": "su", "short_factor": 1}}, "short_factor is 1; a list of numbers is needed"),
    ("llama", {"rope_scaling": LONGROPE | {"long_factor": [True]}}, "long_factor is True; a number is needed"),
    ("llama", {"rope_scaling": LONGROPE | {"long_factor": [10**400]}}, "long_factor is 1000", "a number is needed"),
    ("llama", {"rope_scaling": LONGROPE}, "short_factor is '1 numbers': one for each of the 8 pairs is needed"),
    ("llama", {"rope_parameters": {"rope_type": "sparse"}}, f"RoPE scaling 'sparse' {SCALINGS}"),
    ("llama", {"rope_scaling": {"type": "lama3"}}, f"RoPE scaling 'lama3' {SCALINGS}; did you mean 'llama3'?"),
    ("llama", {"rope_scaling": {"rope_type": "ntk"}}, f"RoPE scaling 'ntk' {SCALINGS}"),
    ("llama", {"rope_scaling": {"rope_type": 3}}, f"RoPE scaling 3 {SCALINGS}"),
    ("llama", {"rope_scaling": {"rope_type": ["yarn"]}}, f"RoPE scaling ['yarn'] {SCALINGS}"),
    ("llama", {"rope_scaling": {"rope_type": "a\nb"}}, r"RoPE scaling 'a\nb' is not supported"),
    ("llama", {"rope_scaling": {"rope_type": "s" * 5000}}, "RoPE scaling 'sss", "..."),
    ("llama", {"rope_scaling": {"factor": 8.0}}, "RoPE key 'factor' is not supported without a scaling"),
    ("llama", {"rope_scaling": LLAMA3 | {"beta": 1}}, "RoPE key 'beta' is not supported by the scaling 'llama3'"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0, "prefix": 1}}, "'prefix'", "by the scaling 'linear'"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, which is not supported; it must be 1.0"),
    ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5", "must be 1.0 or 1"),
    (
        "llama",
        {"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}},
        "original_max_position_embeddings is 64, which is not supported; it must be 128",
    ),
    ("neox", {"rope_theta": 777.0}, "RoPE's rope_theta is 777.0 and 10000.0; they must agree"),
    ("neox", {"partial_rotary_factor": 0.5}, "RoPE's partial_rotary_factor is 0.5 and 0.25; they must agree"),
    ("neox", {"rotary_pct": 1.0, "rope_parameters": {"partial_rotary_factor": 0.5}}, "is 1.0 and 0.5; they must"),
    ("stablelm", {"partial_rotary_factor": 0}, "partial_rotary_factor is 0.0; a number above 0 and at most 1"),
    ("stablelm", {"rope_parameters": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor is 1.5; a number above 0"),
    ("stablelm", {"partial_rotary_factor": 0.7}, "position.d_rotary is 11: RoPE turns pairs of channels"),
    # What changes the result and is not understood.
    ("llama", {"quantization_config": "int4"}, "quantization_config is 'int4'; a mapping is needed"),
    ("llama", {"quantization_config": [{"bits": 4}] * 99}, "quantization_config is [{", "...", "a mapping is needed"),
    ("llama", {"is_encoder_decoder": True}, "is_encoder_decoder is True, which is not supported; it must be False"),
    ("llama", {"is_encoder_decoder": 0}, "is_encoder_decoder is 0, which is not supported; it must be False"),
    ("llama", {"is_decoder": "yes"}, "is_decoder is 'yes'"),
    ("llama", {"rope_interleaved": True}, "rope_interleaved is True, which is not supported; it must be False"),
    ("llama", {"hiden_size": 64}, "config key 'hiden_size' is not known to this family; did you mean 'hidden_size'?"),
    ("llama", {"logit_scale": 0.5}, "config key 'logit_scale' is not known to this family"),
    ("llama", {"sliding_window": 8}, "config key 'sliding_window' is not known to this family"),
    ("llama", {"query_pre_attn_scalar": 256}, "config key 'query_pre_attn_scalar' is not known"),
    ("llama", {"num_local_experts": 8}, "config key 'num_local_experts' is not known"),
    ("llama", {"k\ney": 8}, r"config key 'k\ney' is not known"),
    ("llama", {"k" * 3000: 8}, "config key 'kkk", "..."),
    # The other families.
    ("mistral", {"sliding_window": 0}, "sliding_window is 0; a whole number of at least 1 is needed"),
    ("mistral", {"sliding_window": -1}, "sliding_window is -1; a whole number of at least 1 is needed"),
    ("mistral", {"sliding_window": True}, "sliding_window is True; a whole number"),
    ("mistral", {"sliding_window": "4096"}, "sliding_window is '4096'; a whole number"),
    ("mistral", {"attention_bias": False}, "config key 'attention_bias' is not known to this family"),
    ("mixtral", {"num_experts_per_tok": 5}, "mlp.top_k is 5: it cannot exceed n_experts 4"),
    ("mixtral", {"num_experts_per_tok": 0}, "num_experts_per_tok is 0; a whole number"),
    ("mixtral", {"num_local_experts": True}, "num_local_experts is True; a whole number"),
    ("mixtral", {"num_experts": 4}, "config key 'num_experts' is not known", "did you mean 'num_"),
    ("gpt2", {"n_embd": 66}, "attention.n_heads is 4: n_heads must divide d_model 66"),
    ("gpt2", {"n_embd": "64"}, "n_embd is '64'; a whole number"),
    ("gpt2", {"n_inner": 0}, "n_inner is 0; a whole number of at least 1"),
    ("gpt2", {"n_ctx": 256}, "n_ctx is 256, which is not supported; it must be 128"),
    ("gpt2", {"n_ctx": 128.0}, "n_ctx is 128.0, which is not supported; it must be 128"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True, which is not supported; it must be False"),
    ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn is True, which is not supported"),
    ("gpt2", {"scale_attn_weights": 1}, "scale_attn_weights is 1; true or false is needed"),
    ("gpt2", {"activation_function": "gelu_newer"}, "activation_function is 'gelu_newer'", "did you mean 'gelu_new'?"),
    ("gpt2", {"attn_pdrop": 1.5}, "dropout.attention is 1.5; expected float < 1.0"),
    ("gpt2", {"resid_pdrop": -0.1}, "dropout.residual is -0.1; expected float >= 0.0"),
    ("gpt2", {"layer_norm_epsilon": None, "layer_norm_eps": 1e-6}, "'layer_norm_eps'", "mean 'layer_norm_epsilon'?"),
    ("gpt2", {"num_attention_heads": 4}, "config key 'num_attention_heads' is not known to this family"),
]


@pytest.mark.parametrize(("family", "changes", "words"), [(f, c, w) for f, c, *w in BAD])
def test_bad_value(family: str, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ScantlingInputError) as caught:
        read(family, **changes)
    assert str(caught.value).startswith(("config.json: ", "card 'small': "))
    checked(str(caught.value), *words)


ODD = [
    None,
    True,
    False,
    -1,
    0,
    1,
    2.0,
    0.5,
    2**63,
    10**400,
    1e308,
    float("inf"),
    float("nan"),
    "",
    "silu",
    "x" * 999,
    "\n",
]
ODD += [[], [[1]], {}, {"rope_type": "default"}, {"type": []}, {"rope_theta": {}, "factor": 1}, ["float16"], "float16"]
ODD += [{"rope_type": "dynamic", "factor": 1e308}, {"type": "yarn", "factor": 4}, {"partial_rotary_factor": 1e308}]
ODD += [LLAMA3, LONGROPE, LONGROPE | {"factor": 2, "original_max_position_embeddings": 1}, {"quant_method": "awq"}]
KEYS = sorted(
    {*LLAMA, *MIXTRAL, *GPT2, "rope_theta", "rope_scaling", "rope_parameters", "dtype", "torch_dtype", "head_dim"}
    | {"partial_rotary_factor", "original_max_position_embeddings", "quantization_config"}
)


@given(
    st.sampled_from(sorted(BASE)), st.dictionaries(st.sampled_from(KEYS), st.sampled_from(ODD), min_size=1, max_size=3)
)
@settings(deadline=None, max_examples=400)
def test_any_value_gives_a_card_or_one_sentence(family: str, changes: dict[str, Any]) -> None:
    try:
        card = read(family, **changes)
    except ScantlingInputError as error:
        message = str(error)
        assert message.startswith(("config.json: ", "card 'small': "))
        checked(message)
    else:
        assert assemble(card).params > 0


def raw(family: str = "llama", more: str = "", **changes: Any) -> bytes:
    return json.dumps(config(family, **changes))[:-1].encode() + more.encode() + b"}"


FILES: dict[str, tuple[bytes, *tuple[str, ...]]] = {
    "empty": (b"", "empty"),
    "blank": (b"  \n", "not JSON at line 2"),
    "not JSON": (b"model_type: llama\n", "not JSON at line 1"),
    "cut": (raw()[:-20], "not JSON at line 1"),
    "trailing comma": (raw(more=","), "not JSON at line 1"),
    "comment": (b"{\n// llama\n}", "not JSON at line 2"),
    "single quotes": (b"{'model_type': 'llama'}", "not JSON at line 1"),
    "two objects": (raw() + raw(), "not JSON at line 1"),
    "a page": (b"<!DOCTYPE html>\n<html></html>", "not JSON at line 1"),
    "raw newline in a string": (b'{"model_type": "lla\nma"}', "not JSON at line 1"),
    "list": (b"[1]", "a JSON object is needed, this is a list"),
    "null": (b"null", "a JSON object is needed"),
    "string": (b'"llama"', "a JSON object is needed, this is a str"),
    "number": (b"7", "a JSON object is needed, this is a int"),
    "latin-1": (raw(_name_or_path="x").replace(b'"x"', b'"\xe9"'), "not UTF-8 at byte"),
    "utf-16": (raw().decode().encode("utf-16"), "not UTF-8 at byte 0"),
    "BOM": (b"\xef\xbb\xbf" + raw(), "not JSON at line 1"),
    "NaN": (raw(more=', "rope_theta": NaN'), "NaN is no number"),
    "Infinity": (raw(more=', "rope_theta": Infinity'), "Infinity is no number"),
    "-Infinity": (raw(more=', "initializer_range": -Infinity'), "-Infinity is no number"),
    "1e400": (raw(more=', "rope_theta": 1e400'), "rope_theta is inf; a number is needed"),
    "duplicate key": (raw(more=', "hidden_size": 32'), "key 'hidden_size' stands twice"),
    "duplicate key, same value": (raw(more=', "hidden_size": 64'), "key 'hidden_size' stands twice"),
    "duplicate key inside": (raw(more=', "id2label": {"0": "a", "0": "b"}'), "key '0' stands twice"),
    "long duplicate key": (raw(more=f', "{"k" * 5000}": 1, "{"k" * 5000}": 1'), "key 'kkk", "...", "stands twice"),
    "too many digits": (raw(more=', "rope_theta": ' + "1" * 5000), "a whole number has too many digits"),
    "deep": (raw(more=', "auto_map": ' + "[" * 100_000), "nested too deeply"),
    "too large": (raw().ljust(MAX_BYTES + 1), f"{MAX_BYTES + 1} bytes; a config has at most {MAX_BYTES}"),
    "lone surrogate": (raw(more=r', "hidden_act\ud800": 1'), r"config key 'hidden_act\ud800' is not known"),
    "nothing said": (b"{}", "model_type is None; known: gpt2, llama, mistral, mixtral"),
}


@pytest.mark.parametrize("name", FILES)
def test_bad_file(name: str, tmp_path: Path) -> None:
    content, *words = FILES[name]
    path = tmp_path / "config.json"
    path.write_bytes(content)
    began = time.process_time()
    with pytest.raises(ScantlingInputError) as caught:
        read_config(path)
    assert time.process_time() - began < 2
    assert str(caught.value).startswith(f"{path}")
    checked(str(caught.value), *words)


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    reasons = {"pipe.json": "regular file", "folder.json": "regular file", "missing.json": "No such file"}
    for name, reason in reasons.items():
        with pytest.raises(ScantlingInputError) as caught:
            read_config(tmp_path / name)
        checked(str(caught.value), name, reason)
    with pytest.raises(ScantlingInputError, match=r"no config\.json, so the sizes of the model are not known"):
        config_path(find(tmp_path))


@pytest.mark.parametrize("depth", [*range(880, 1000, 4), 1000, 5000])
def test_deeply_nested_value(depth: int, tmp_path: Path) -> None:
    # Near the interpreter's own limit a value may be readable and yet too deep to be written into a message.
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config(hidden_act="?")).replace('"?"', "[" * depth + "]" * depth))
    with pytest.raises(ScantlingInputError) as caught:
        read_config(path)
    assert "hidden_act is [[[" in str(caught.value) or "nested too deeply" in str(caught.value)
    checked(str(caught.value))


def test_many_keys_are_refused_quickly(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    keys = ",".join(f'"k{i}":1' for i in range(30_000))
    path.write_text("{" + keys + ',"k29999":1}')
    began = time.process_time()
    tracemalloc.start()
    with pytest.raises(ScantlingInputError, match="key 'k29999' stands twice"):
        read_config(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert time.process_time() - began < 2
    assert peak < 2 * path.stat().st_size + 64 * 2**20


def test_a_card_is_named_after_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_bytes(raw(_name_or_path="someone/else"))
    (folder / "other.json").write_bytes(raw("gpt2"))
    card, model_type = read_config(folder / "config.json")
    assert (card.name, model_type) == ("my-model", "llama")
    card, model_type = read_config(folder / "other.json")
    assert (card.name, model_type) == ("other", "gpt2")
    assert config_path(find(folder)) == folder / "config.json"


def test_every_value_of_a_llama_config_lands_in_the_card() -> None:
    card = read(attention_bias=True, mlp_bias=True, attention_dropout=0.25, rope_theta=5e5, head_dim=32)
    assert (card.name, card.family, card.n_layers, card.d_model) == ("small", "decoder", 2, 64)
    assert (card.vocab_size, card.context, card.tied, card.dtype) == (256, 128, False, "unknown")
    attention = card.attention
    assert (attention.n_heads, attention.n_kv_heads, attention.d_head, attention.window) == (4, 2, 32, None)
    assert attention.bias == ["q", "k", "v", "o"]
    assert card.position == RoPE(theta=500000.0, d_rotary=32)
    assert card.norm == RMSNorm(eps=1e-5, at=["in"])
    assert card.mlp == Gated(act="silu", d_ff=96, bias=True)
    assert (card.dropout.embedding, card.dropout.attention, card.dropout.residual) == (0.0, 0.25, 0.0)


def test_every_value_of_a_gpt2_config_lands_in_the_card() -> None:
    card = read("gpt2", n_inner=100, attn_pdrop=0.2, embd_pdrop=0.3, resid_pdrop=0.4, layer_norm_epsilon=1e-6)
    assert (card.n_layers, card.d_model, card.vocab_size, card.context, card.tied) == (2, 64, 256, 128, True)
    assert (card.attention.n_heads, card.attention.d_head, card.attention.scale) == (4, 16, None)
    assert card.attention.bias == ["q", "k", "v", "o"]
    assert card.position == Learned()
    assert card.norm == LayerNorm(eps=1e-6)
    assert card.mlp == Plain(act="gelu_tanh", d_ff=100, bias=True)
    assert (card.dropout.embedding, card.dropout.attention, card.dropout.residual) == (0.3, 0.2, 0.4)
    unscaled = read("gpt2", scale_attn_weights=False, scale_attn_by_inverse_layer_idx=True)
    assert (unscaled.attention.scale, unscaled.attention.scale_by_layer) == (1.0, True)
    assert read("gpt2", tie_word_embeddings=False).tied is False


def test_what_a_config_leaves_out_has_the_familys_default() -> None:
    gpt2 = card_of_config({"model_type": "gpt2", "activation_function": "gelu_new"}, "x", "x")
    assert assemble(gpt2).params == 124_439_808
    mixtral = read("mixtral", num_local_experts=GONE, num_experts_per_tok=GONE, rms_norm_eps=GONE)
    assert isinstance(mixtral.mlp, MoE)
    assert (mixtral.mlp.n_experts, mixtral.mlp.top_k, mixtral.norm.eps) == (8, 2, 1e-5)
    assert read("mistral", rms_norm_eps=GONE).norm.eps == 1e-6
    for family, theta in (("mistral", 1e4), ("mixtral", 1e6)):
        few = read(family, num_key_value_heads=GONE, num_attention_heads=16, hidden_size=64)
        assert (few.attention.n_kv_heads, few.position) == (8, RoPE(theta=theta, d_rotary=4))
    assert read(tie_word_embeddings=GONE).tied is False
    assert read("gpt2", tie_word_embeddings=GONE).tied is True
    assert read("gpt2", n_inner=None) == read("gpt2", n_inner=256)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("gelu", "gelu"),
        ("gelu_new", "gelu_tanh"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("swish", "silu"),
        ("relu", "relu"),
    ],
)
def test_activations(theirs: str, ours: str) -> None:
    mlp = read(hidden_act=theirs).mlp
    assert isinstance(mlp, Gated)
    assert mlp.act == ours


def test_keys_without_influence_are_passed_over() -> None:
    idle = {"pretraining_tp": 2, "bos_token_id": 1, "id2label": {"0": "a"}, "transformers.js_config": {"dtype": "q4"}}
    assert read(**idle, is_decoder=True, is_encoder_decoder=False, quantization_config=None) == read()
    assert read("mixtral", output_router_logits=True, router_aux_loss_coef=0.5) == read("mixtral")
    assert read("gpt2", summary_activation="tanh", n_special=0) == read("gpt2")


DIALECTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "RoPE base": ("llama", {"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}),
    "RoPE base, whole": ("llama", {"rope_theta": 500000}, {"rope_parameters": {"rope_theta": 500000.0}}),
    "no scaling": ("llama", {"rope_theta": 1e4, "rope_scaling": None}, {"rope_parameters": {"rope_theta": 1e4}}),
    "default scaling": ("llama", {"rope_scaling": {"type": "default"}}, {"rope_parameters": {"rope_type": "default"}}),
    "base said twice": ("llama", {"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5}}),
    "dtype": ("llama", {"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}),
    "dtype said twice": ("llama", {"torch_dtype": "torch.float16"}, {"dtype": "float16", "torch_dtype": "float16"}),
    "mistral": (
        "mistral",
        {"rope_theta": 1e6, "torch_dtype": "bfloat16"},
        {"rope_parameters": {"rope_theta": 1e6}, "dtype": "bfloat16", "head_dim": 16},
    ),
    "mixtral": ("mixtral", {"rope_theta": 1e6, "rope_scaling": None}, {"rope_parameters": {"rope_theta": 1e6}}),
    "gpt2": ("gpt2", {"torch_dtype": "float32"}, {"dtype": "float32", "n_ctx": GONE, "add_cross_attention": False}),
}


@pytest.mark.parametrize("name", DIALECTS)
def test_old_and_new_spelling_give_the_same_card(name: str) -> None:
    family, old, new = DIALECTS[name]
    assert read(family, **old, transformers_version="4.30.0") == read(family, **new, transformers_version="5.0.0")


def test_spellings_of_the_rope_base_are_all_read() -> None:
    spelt = [
        {"rope_theta": 500000.0},
        {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}},
        {"rope_theta": 500000.0, "rope_scaling": {"type": "default"}},
        {"rope_theta": 500000.0, "rope_scaling": {"type": "default", "rope_type": "default"}},
    ]
    assert [read(**changes).position for changes in spelt] == [RoPE(theta=500000.0, d_rotary=16)] * 4
    assert read().position == RoPE(theta=10000.0, d_rotary=16)


def test_a_scaling_is_read_in_every_spelling() -> None:
    more = {k: v for k, v in LLAMA3.items() if k != "rope_type"}
    scaling = Llama3Scaling(factor=8.0, trained_length=32, low_freq_factor=1.0, high_freq_factor=4.0)
    for changes in (
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **more}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **more}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **more}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", "rope_type": "llama3", **more}},
    ):
        assert read(**changes).position == RoPE(theta=5e5, d_rotary=16, scaling=scaling)


EIGHT = {"short_factor": [1.0] * 8, "long_factor": [2] * 8}
SCALED: dict[str, tuple[dict[str, Any], Scaling]] = {
    "linear": ({"type": "linear", "factor": 2}, LinearScaling(factor=2.0)),
    "dynamic": ({"type": "dynamic", "factor": 2.0}, DynamicScaling(factor=2.0, trained_length=128)),
    "yarn": (
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "truncate": False, "mscale": 0.5},
        YarnScaling(factor=4.0, trained_length=32, truncate=False, mscale=0.5),
    ),
    "su, the old name of longrope": (
        {"type": "su", **EIGHT, "original_max_position_embeddings": 32},
        LongRopeScaling(trained_length=32, short_factor=[1.0] * 8, long_factor=[2.0] * 8),
    ),
    "longrope with a factor": (
        {"rope_type": "longrope", **EIGHT, "original_max_position_embeddings": 32, "factor": 32.0},
        LongRopeScaling(
            trained_length=32, short_factor=[1.0] * 8, long_factor=[2.0] * 8, attention_factor=math.sqrt(2)
        ),
    ),
}


@pytest.mark.parametrize("name", SCALED)
def test_every_scaling_lands_in_the_card(name: str) -> None:
    said, scaling = SCALED[name]
    card = read(rope_scaling=said)
    assert card.position == RoPE(theta=1e4, d_rotary=16, scaling=scaling)
    assert card.context == (256 if name == "dynamic" else 128)
    assert read(rope_parameters={"rope_theta": 1e4, **said}) == card
    half = {k: v[:4] if isinstance(v, list) else v for k, v in said.items()}
    position = read("stablelm", rope_scaling=half, partial_rotary_factor=0.5).position
    assert isinstance(position, RoPE)
    assert position.d_rotary == 8
    assert type(position.scaling) is type(scaling)


def test_the_angles_of_llama_3_2_1b() -> None:
    scaling = LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192}
    card = read(rope_theta=5e5, head_dim=64, max_position_embeddings=131072, rope_scaling=scaling)
    attention = assemble(card).decoder.blocks[0].children()["attn"]
    assert isinstance(attention, Attention)
    assert isinstance(attention.position, parts.RoPE)
    found, plain = attention.position.frequencies(1), [5e5 ** (-i / 32) for i in range(32)]
    assert found[:15] == pytest.approx(plain[:15], rel=1e-12)
    assert found[15:18] == pytest.approx([1.290547928e-03, 4.295567966e-04, 9.708287803e-05], rel=1e-7)
    assert found[18:] == pytest.approx([f / 32 for f in plain[18:]], rel=1e-12)


@pytest.mark.parametrize("spelling", ["v5", "v4", "old-type-key", "no-scaling"])
def test_every_spelling_gives_the_recorded_logits(spelling: str, tmp_path: Path) -> None:
    folder = DATA / "checkpoints" / "rope-spellings"
    shutil.copy(folder / "model.safetensors", tmp_path)
    shutil.copy(folder / f"config.{spelling}.json", tmp_path / "config.json")
    recorded = "expected.no-scaling.json" if spelling == "no-scaling" else "expected.json"
    wanted = json.loads((folder / recorded).read_text())
    with torch.no_grad():
        found = sc.load(tmp_path).net(torch.tensor(wanted["input_ids"]))[0, -1]
    torch.testing.assert_close(found, torch.tensor(wanted["last_row"]), atol=2e-6, rtol=0)


def test_quantised_weights_are_noted_and_refused_only_when_read(tmp_path: Path) -> None:
    plain, path = read(), tmp_path / "config.json"
    card = read(quantization_config={"quant_method": "awq", "bits": 4})
    assert card.source is not None
    assert "stored quantised ('awq')" in str(card.source.note)
    assert replace(card, source=None) == plain
    path.write_bytes(raw(quantization_config={"quant_method": "awq"}))
    assert replace(read_config(path)[0], source=None, name="small") == plain
    with pytest.raises(ScantlingInputError) as caught:
        read_config(path, weights=True)
    checked(str(caught.value), f"{path}: the weights are quantised ('awq'), which cannot be read")


def test_windows() -> None:
    assert read("mistral", sliding_window=None).attention.window is None
    assert read("mistral", sliding_window=GONE).attention.window is None
    assert read("mistral", sliding_window=4).attention.window == 4
    assert read("mistral", sliding_window=1).attention.window == 1
    assert read("mistral", sliding_window=10**6).attention.window == 10**6


def test_null_means_the_default() -> None:
    nulls = dict.fromkeys(("sliding_window", "head_dim", "rope_scaling", "rope_theta", "dtype", "attention_dropout"))
    card = read("mixtral", **nulls)
    assert (card.attention.window, card.attention.d_head, card.attention.bias) == (None, 16, [])
    assert card.position == RoPE(theta=1e6, d_rotary=16)
    assert card == read("mixtral", sliding_window=GONE)
    assert read("mistral", **nulls).position == RoPE(theta=1e4, d_rotary=16)
    assert read("mistral", num_key_value_heads=None).attention.n_kv_heads == 4


@pytest.mark.parametrize(
    ("said", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "torch.bfloat16"}, "bfloat16"),
        ({"torch_dtype": "bfloat16", "dtype": "torch.bfloat16"}, "bfloat16"),
        ({"torch_dtype": None, "dtype": "float16"}, "float16"),
        ({}, "unknown"),
    ],
)
def test_dtypes(said: dict[str, Any], dtype: str) -> None:
    assert read(**said).dtype == dtype


def test_a_head_width_that_is_not_the_quotient_is_kept() -> None:
    card = read(hidden_size=96, num_key_value_heads=4, head_dim=16)
    assert card.attention.d_head == 16
    weights = assemble(card).named_stored
    assert weights["decoder.blocks.0.attn.q.weight"] == (64, 96)
    assert weights["decoder.blocks.0.attn.o.weight"] == (96, 64)


def test_kv_heads() -> None:
    for changes in ({"num_key_value_heads": GONE}, {"num_key_value_heads": None}, {"num_key_value_heads": 4}):
        assert read(**changes).attention.n_kv_heads == 4
    assert read(num_key_value_heads=1).attention.n_kv_heads == 1


@pytest.mark.parametrize(("eps", "first"), [(1e-5, 0.2828427), (1e-6, 0.5345225)])
def test_the_norms_epsilon_is_the_configs(eps: float, first: float) -> None:
    card = read(hidden_size=4, num_attention_heads=2, rms_norm_eps=eps)
    assert card.norm.eps == eps
    norm = assemble(card).decoder.final_norm
    assert norm is not None
    x = torch.tensor([1e-3, -2e-3, 2e-3, 1e-3])
    assert norm.module("")(x)[0].item() == pytest.approx(first, abs=1e-7)


def test_padded_rows_are_counted_and_never_answered() -> None:
    card = read(vocab_size=304)
    assert (card.vocab_size, table_rows(card)) == (304, 304)
    assert assemble(card).named_weights["embed.weight"] == (304, 64)
    padded = read_text(to_yaml(read(vocab_size=300)) + "embedding: {vocab_multiple: 16}\n", "padded")
    model = assemble(padded)
    assert table_rows(padded) == 304
    assert model.params == assemble(card).params
    net = model.build()
    assert net(torch.zeros(1, 3, dtype=torch.int64)).shape == (1, 3, 300)
    assert next(s for s in model.steps(Workload(1, 3)) if s.op == "softmax" and s.path == ":probabilities").shape == (
        1,
        300,
    )


def sized(d: int, layers: int, heads: int, d_ff: int, vocab: int, kv_heads: int | None = None, **more: Any) -> Card:
    return read(
        hidden_size=d,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=d_ff,
        vocab_size=vocab,
        **more,
    )


@pytest.mark.parametrize(
    ("shape", "unique", "stored"),
    [
        ((288, 6, 6, 768, 32000), 15_191_712, 24_407_712),
        ((512, 8, 8, 1376, 32000), 41_689_600, 58_073_600),
        ((768, 12, 12, 2048, 32000), 109_529_856, 134_105_856),
    ],
)
def test_a_tied_matrix_counts_once(shape: tuple[int, int, int, int, int], unique: int, stored: int) -> None:
    assert assemble(sized(*shape, tie_word_embeddings=True)).params == unique
    assert assemble(sized(*shape, tie_word_embeddings=False)).params == stored
    assert stored - unique == 32000 * shape[0]


def test_gpt2_small_in_three_conventions() -> None:
    card = read("gpt2", n_embd=768, n_layer=12, n_head=12, n_positions=1024, n_ctx=1024, vocab_size=50257)
    model = assemble(card)
    weights = model.named_stored
    positions = weights["decoder.position.table.weight"][0] * 768
    table = weights["embed.weight"][0] * 768
    assert (model.params, model.params - positions, model.params - positions - table) == (
        124_439_808,
        123_653_376,
        85_056_000,
    )


def test_llama_sizes() -> None:
    assert assemble(sized(4096, 32, 32, 11008, 32000)).params == 6_738_415_616
    assert assemble(sized(8192, 80, 64, 28672, 128256, kv_heads=8)).params == 70_553_706_496


def test_heads_wider_than_the_stream() -> None:
    card = sized(2560, 36, 32, 9728, 151936, kv_heads=8, head_dim=128, tie_word_embeddings=True)
    model = assemble(card)
    assert model.named_weights["decoder.blocks.0.attn.q.weight"] == (4096, 2560)
    # The published model has 9,216 more: norms of q and k, which a llama has not.
    assert model.params == 4_022_468_096 - 9_216
