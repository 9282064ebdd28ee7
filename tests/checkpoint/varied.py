"""Configs of every family with unusual values: what each key may hold that both ours and the original understand."""

from __future__ import annotations

import json
import random
from typing import Any

from tests.conftest import GOLDEN

GONE = object()
FULL, SLIDING = "full_attention", "sliding_attention"
FLAG = [GONE, True, False]
ACTS = ["relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_python", "gelu_accurate", "quick_gelu"]
ACTS += ["gelu_python_tanh", "relu2", "silu", "swish"]
EPS = [GONE, 1e-3, 1e-12]
LAYERS = [1, 2, 3]

_YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 1000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: list[Any] = [
    GONE,
    {"rope_theta": 777.0},
    {"rope_type": "default", "rope_theta": 5000.0},
    {"rope_type": "linear", "rope_theta": 1000.0, "factor": 3.0},
    {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0},
    _YARN,
    _YARN | {"attention_factor": 0.7},
    _YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "mscale": 1.0, "mscale_all_dim": 0.7},
    _YARN | {"truncate": False},
    _YARN | {"factor": 0.5, "mscale": 0.7},
    _LLAMA3,
    _LLAMA3 | {"original_max_position_embeddings": 16},
    {"rope_type": "longrope", "rope_theta": 1000.0, "original_max_position_embeddings": 8},
    {"rope_type": "longrope", "rope_theta": 1000.0, "original_max_position_embeddings": 60, "factor": 6.0},
]
"""In the new spelling; LongRoPE's factors follow the width of a head."""
PARTIAL: list[Any] = [{**rope, "partial_rotary_factor": 0.5} for rope in ROPES[1:]]
ONLY_LONG = [rope for rope in ROPES if rope is GONE or rope.get("rope_type", "default") in ("default", "longrope")]

_SIZES = {"hidden_size": [24, 48], "num_hidden_layers": LAYERS, "tie_word_embeddings": FLAG}
_ROPED = _SIZES | {
    "rope": ROPES,
    "hidden_act": ACTS,
    "intermediate_size": [20, 76],
    "num_key_value_heads": [1, 2, 3, 6],
    "max_position_embeddings": [16, 64, 4096],
    "pad_token_id": [None, 0, 5],
}
_LLAMA = _ROPED | {"head_dim": [4, 8, 10], "rms_norm_eps": EPS}
_BIAS = {"attention_bias": FLAG}
_SLIDES = {"use_sliding_window": FLAG, "sliding_window": [3], "max_window_layers": [0, 1, 2, 28], "layer_types": []}
_MIXTURE = {
    "num_local_experts": [GONE],
    "num_experts": [3, 5],
    "num_experts_per_tok": [1, 2, 3],
    "norm_topk_prob": FLAG,
    "decoder_sparse_step": [GONE, 1, 2],
    "mlp_only_layers": [GONE, [], [0], [1]],
}
_LAYER_NORM = _ROPED | {"hidden_size": [48], "num_attention_heads": [6], "rope": PARTIAL, "layer_norm_eps": EPS}
_GPT = {
    "n_embd": [24, 48],
    "n_layer": LAYERS,
    "n_inner": [GONE, None, 20],
    "activation_function": ACTS,
    "layer_norm_epsilon": EPS,
    "tie_word_embeddings": FLAG,
}
_GEMMA = {key: values for key, values in _LLAMA.items() if key != "hidden_act"} | _BIAS
_SOFT = {
    "hidden_activation": ACTS,
    "query_pre_attn_scalar": [GONE, 7, 20],
    "final_logit_softcapping": [GONE, None, 2.0],
}
_LATENT = _SIZES | {
    "rope": ROPES,
    "hidden_act": ACTS,
    "rms_norm_eps": EPS,
    "q_lora_rank": [None, 12],
    "kv_lora_rank": [8, 16],
    "first_k_dense_replace": [0, 1, 5],
    "n_shared_experts": [1, 3],
    "routed_scaling_factor": [1.0, 2.5],
}
_BERT = {
    "hidden_size": [24, 48],
    "num_hidden_layers": LAYERS,
    "hidden_act": ACTS,
    "layer_norm_eps": EPS,
    "type_vocab_size": [GONE, 1, 2, 5],
}
_BART = {
    "d_model": [24, 48],
    "activation_function": ACTS,
    "num_hidden_layers": [GONE],
    "encoder_layers": [1, 2],
    "decoder_layers": [1, 2],
    "encoder_attention_heads": [2, 3, 4],
    "decoder_attention_heads": [2, 3, 4],
    "encoder_ffn_dim": [20, 36],
    "decoder_ffn_dim": [20, 36],
    "scale_embedding": FLAG,
}


def _heads(name: str, *ends: str) -> dict[str, list[Any]]:
    return {"architectures": [[f"{name}{end}"] for end in ("ForMaskedLM", "ForTokenClassification", *ends)]}


VARIED: dict[str, tuple[str, dict[str, list[Any]]]] = {
    "llama": ("llama-gqa", _LLAMA | _BIAS | {"mlp_bias": FLAG, "pretraining_tp": [1, 2]}),
    "mistral": ("mistral-swa", _LLAMA | {"sliding_window": [GONE, None, 1, 3, 100]}),
    "mixtral": ("mixtral", _LLAMA | {"sliding_window": [None, 3], "num_local_experts": [3, 5], "head_dim": [8]}),
    "qwen2": ("qwen2", _LLAMA | _SLIDES),
    "qwen2_moe": ("qwen3-moe", _LLAMA | _SLIDES | _MIXTURE | {"qkv_bias": FLAG, "attention_bias": [GONE]}),
    "qwen3": ("qwen3", _LLAMA | _SLIDES | _BIAS),
    "qwen3_moe": ("qwen3-moe", _LLAMA | _MIXTURE | _BIAS),
    "smollm3": (
        "smollm3",
        _LLAMA | _SLIDES | _BIAS | {"mlp_bias": FLAG, "no_rope_layers": [GONE, [1, 0, 1], [0, 0, 0], [1, 1, 1]]},
    ),
    "phi3": ("phi3", _LLAMA | {"rope": ONLY_LONG, "sliding_window": [None, 3, 7]}),
    "glm": ("llama-gqa", _LLAMA | _BIAS | {"rope": [GONE, *PARTIAL], "head_dim": [8], "mlp_bias": [GONE]}),
    "olmo2": ("olmo2", _LLAMA | _BIAS | {"head_dim": [GONE]}),
    "gemma": ("gemma", _GEMMA | {"hidden_act": ["gelu_pytorch_tanh"]}),
    "gemma2": ("gemma2", _GEMMA | _SOFT | {"attn_logit_softcapping": [GONE, None, 3.0], "layer_types": []}),
    "gemma3_text": ("gemma3-text", _GEMMA | _SOFT | {"rope": [], "layer_types": []}),
    "gpt_oss": (
        "gpt-oss",
        _LLAMA | _BIAS | {"hidden_act": ["silu"], "layer_types": [], "swiglu_limit": [1.0, 3.0], "swiglu_alpha": [1.0]},
    ),
    "stablelm": ("stablelm", _LAYER_NORM | {"use_qkv_bias": FLAG, "qk_layernorm": FLAG, "use_parallel_residual": FLAG}),
    "phi": ("phi", _LAYER_NORM | {"qk_layernorm": FLAG}),
    "gpt_neox": (
        "gpt-neox",
        _LAYER_NORM | _BIAS | {"use_parallel_residual": FLAG, "rope": PARTIAL, "num_key_value_heads": [GONE]},
    ),
    "gptj": ("gptj", _GPT | {"rotary_dim": [2, 4]}),
    "gpt2": ("gpt2", _GPT | {"scale_attn_weights": FLAG, "scale_attn_by_inverse_layer_idx": FLAG}),
    "openai-gpt": ("openai-gpt-postnorm", {"n_embd": [24, 48], "n_layer": LAYERS, "afn": ["relu", "silu", "gelu"]}),
    "falcon": (
        "falcon-gqa-newarch",
        _SIZES
        | {
            "rope": ROPES,
            "num_kv_heads": [1, 2, 3],
            "alibi": FLAG,
            "bias": FLAG,
            "num_ln_in_parallel_attn": [GONE, 1, 2],
            "ffn_hidden_size": [GONE, 20, 76],
            "activation": ACTS,
        },
    ),
    "bloom": (
        "bloom",
        {
            "hidden_size": [24, 48],
            "n_layer": LAYERS,
            "n_head": [3, 6],
            "pretraining_tp": [GONE, 1, 2],
            "apply_residual_connection_post_layernorm": FLAG,
            "layer_norm_epsilon": EPS,
            "tie_word_embeddings": FLAG,
        },
    ),
    "mpt": (
        "mpt",
        {
            "d_model": [24, 48],
            "n_layers": LAYERS,
            "n_heads": [3, 4, 6],
            "attn_config": [GONE, {"clip_qkv": 0.5}, {"softmax_scale": 0.3}],
            "layer_norm_epsilon": EPS,
            "tie_word_embeddings": FLAG,
        },
    ),
    "opt": (
        "opt",
        _SIZES
        | {
            "word_embed_proj_dim": [GONE],
            "ffn_dim": [20, 76],
            "do_layer_norm_before": FLAG,
            "_remove_final_layer_norm": FLAG,
            "activation_function": ACTS,
            "enable_bias": FLAG,
        },
    ),
    "deepseek_v2": ("deepseek-v2-qlora-groups", _LATENT | {"topk_method": ["greedy", "group_limited_greedy"]}),
    "deepseek_v3": ("deepseek-v3", _LATENT | {"rope_interleave": FLAG, "norm_topk_prob": FLAG, "topk_group": [1, 2]}),
    "bert": ("bert", _BERT | _heads("Bert", "ForSequenceClassification", "ForPreTraining")),
    "roberta": ("roberta", _BERT | _heads("Roberta", "ForSequenceClassification") | {"pad_token_id": [0, 1, 3]}),
    "distilbert": (
        "distilbert",
        {"dim": [24, 48], "n_layers": LAYERS, "activation": ACTS} | _heads("DistilBert", "ForSequenceClassification"),
    ),
    "electra": (
        "electra-generator",
        _BERT | _heads("Electra", "ForPreTraining", "ForSequenceClassification") | {"embedding_size": [16, 24, 48]},
    ),
    "modernbert": (
        "modernbert",
        _heads("ModernBert", "ForSequenceClassification")
        | {
            "hidden_size": [24, 48],
            "num_hidden_layers": LAYERS,
            "hidden_activation": ACTS,
            "norm_bias": FLAG,
            "attention_bias": FLAG,
            "mlp_bias": FLAG,
            "decoder_bias": FLAG,
            "classifier_bias": FLAG,
            "classifier_pooling": ["cls", "mean"],
            "local_attention": [2, 5, 8],
            "layer_types": [],
            "rope": [],
        },
    ),
    "t5": (
        "t5",
        {
            "feed_forward_proj": ["relu", "gelu", "silu", "gated-gelu", "gated-silu", "gated-relu"],
            "dense_act_fn": [GONE],
            "is_gated_act": [GONE],
            "num_layers": [1, 2],
            "num_decoder_layers": [1, 2],
            "relative_attention_num_buckets": [4, 12, 32],
            "relative_attention_max_distance": [17, 128],
            "num_heads": [3, 5],
        },
    ),
    "bart": ("bart", _BART),
    "marian": ("marian", _BART),
}
"""By model type, the recorded model that the config starts from and the values that its keys may take."""


def varied(model_type: str, number: int) -> dict[str, Any]:
    """A config of that family, six of its keys changed; equal numbers give equal configs."""
    base, table = VARIED[model_type]
    draw = random.Random(f"{model_type} {number}")
    config = json.loads((GOLDEN / "tiny" / base / "config.json").read_text())
    if config["model_type"] != model_type:
        config |= {"model_type": model_type, "architectures": _CLASSES[model_type]}
    always = [key for key, values in table.items() if len(values) == 1]
    free = sorted(table.keys() - set(always))
    chosen = [*always, *draw.sample(free, min(6, len(free)))]
    for key in chosen:
        if table[key]:
            config[key] = draw.choice(table[key])
    config = {key: value for key, value in config.items() if value is not GONE}
    if "layer_types" in config:
        _layer_types(config, "layer_types" in chosen, draw)
    if "rope" in chosen:
        config.pop("rope", None)
        _rope(config, draw.choice(table["rope"]) if table["rope"] else None, draw)
    return config


_CLASSES = {"qwen2_moe": ["Qwen2MoeForCausalLM"], "glm": ["GlmForCausalLM"]}


def _layer_types(config: dict[str, Any], drawn: bool, draw: random.Random) -> None:
    """As many as there are layers: drawn, or left to what the family makes of silence."""
    n = config["num_hidden_layers"]
    if not drawn:
        del config["layer_types"]
        return
    config["layer_types"] = [draw.choice([FULL, SLIDING]) for _ in range(n)]
    if "use_sliding_window" in VARIED[config["model_type"]][1]:
        config["use_sliding_window"] = True


def _rope(config: dict[str, Any], rope: Any, draw: random.Random) -> None:
    """One of the spellings of a rotation; None for one by layer type."""
    config.pop("rope_parameters", None)
    if rope is None:
        plain = [r for r in ROPES[1:] if r.get("rope_type") not in ("longrope", "dynamic") and "truncate" not in r]
        config["rope_parameters"] = {kind: dict(draw.choice(plain)) for kind in (FULL, SLIDING)}
        return
    if rope is GONE:
        return
    rope = dict(rope)
    if rope.get("rope_type") == "longrope":
        width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        pairs = range(int(width * rope.get("partial_rotary_factor", 1.0)) // 2)
        rope |= {"short_factor": [1 + i / 8 for i in pairs], "long_factor": [2 + i / 4 for i in pairs]}
        if config["model_type"] == "phi3":
            config["original_max_position_embeddings"] = rope.pop("original_max_position_embeddings")
    if draw.random() < 0.5:
        config["rope_parameters"] = rope
        return
    own = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
    for key in own:
        if key in rope:
            config[own[key] if config["model_type"] == "gpt_neox" else key] = rope.pop(key)
    kind = rope.pop("rope_type", "default")
    spelling = draw.choice(["type", "rope_type"])
    config["rope_scaling"] = None if kind == "default" else {spelling: kind, **rope}
