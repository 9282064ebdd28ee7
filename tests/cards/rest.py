"""Cards for the laws that together make the choices which no model of the list makes."""

from __future__ import annotations

from typing import Any

HEADS = {"kind": "multi_head", "n_heads": 4, "n_kv_heads": 2, "d_head": 6}
PLAIN = ("gelu", "quick_gelu", "relu2", "silu", "tanh")
GATED = ("relu", "gelu", "gelu_tanh", "quick_gelu", "relu2", "tanh")
ROUTED = {
    "kind": "moe",
    "n_experts": 3,
    "top_k": 2,
    "expert": {"kind": "gated", "act": "gelu", "d_ff": 6},
    "shared": {"kind": "plain", "act": "gelu", "d_ff": 6},
}

REST: dict[str, dict[str, Any]] = {
    "every activation": {
        "n_layers": 12,
        "head": {"transform": {"act": "relu"}},
        "pattern": [
            *({"mlp": {"kind": "plain", "act": act, "d_ff": 8}} for act in PLAIN),
            *({"mlp": {"kind": "gated", "act": act, "d_ff": 8}} for act in GATED),
            {"mlp": ROUTED},
        ],
    },
    "post-norm with dropout": {
        "norm": {"kind": "rmsnorm", "eps": 1e-5, "at": ["out"], "rounded": False, "final": True},
        "embedding": {"norm": {"kind": "rmsnorm", "eps": 1e-5}},
        "dropout": {"embedding": 0.1, "attention": 0.1, "residual": 0.1},
        "head": {"transform": {"act": "gelu", "norm": True}},
    },
    "shifted norms": {
        "attention": {**HEADS, "qk_norm": {"kind": "layernorm", "eps": 1e-5, "bias": True}},
        "norm": {"kind": "layernorm", "eps": 1e-5, "at": ["res"], "final": False},
        "position": {"kind": "sinusoidal", "theta": 100.0},
        "head": {"transform": {"act": "gelu_tanh", "bias": False}, "bias": True},
    },
    "yarn, every key": {
        "attention": {**HEADS, "scale": 0.3, "qk_norm": {"kind": "rmsnorm", "eps": 1e-6, "rounded": False}},
        "norm": {"kind": "rmsnorm", "eps": 1e-6, "final": False, "skip_first": True},
        "head": {"transform": {"act": "quick_gelu"}},
        "position": {
            "kind": "rope",
            "theta": 1e4,
            "scaling": {
                "kind": "yarn",
                "factor": 4.0,
                "trained_length": 8,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "attention_factor": 1.3,
                "truncate": False,
            },
        },
    },
    "longrope with its factor": {
        "attention": {**HEADS, "qk_norm": {"kind": "rmsnorm", "eps": 1e-6, "rounded": True}},
        "norm": {"kind": "layernorm", "eps": 1e-5, "at": ["out"], "final": True},
        "head": {"transform": {"act": "relu2"}},
        "position": {
            "kind": "rope",
            "theta": 1e4,
            "scaling": {
                "kind": "longrope",
                "trained_length": 16,
                "short_factor": [1.0, 1.1, 1.2],
                "long_factor": [1.0, 2.0, 3.0],
                "attention_factor": 1.2,
            },
        },
    },
    "alibi, flatter": {
        "position": {"kind": "alibi", "max_bias": 4.0},
        "norm": {"kind": "rmsnorm", "eps": 1e-5, "rounded": True},
        "head": {"transform": {"act": "silu"}},
    },
    "widened late": {
        "position": {"kind": "learned"},
        "norm": {"kind": "layernorm", "eps": 1e-5, "skip_first": True},
        "embedding": {"width": 10, "widen": "after", "widen_bias": True},
        "head": {"transform": {"act": "tanh"}},
    },
    "latent in some layers": {
        "head": {"kind": "none"},
        "pattern": [
            {},
            {
                "attention": {
                    "kind": "latent",
                    "n_heads": 3,
                    "kv_rank": 10,
                    "d_nope": 5,
                    "d_rope": 6,
                    "d_value": 7,
                    "eps": 1e-6,
                }
            },
        ],
    },
}
