"""GPT-1 (Radford et al. 2018): learned positions, post-norm, one fused and transposed QKV matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scantling.cards import Card
from scantling.cards.schema import Learned
from scantling.checkpoint.config_keys import Keys
from scantling.checkpoint.config_write import gpt_keys
from scantling.checkpoint.families import gpt2
from scantling.checkpoint.family import Family
from scantling.checkpoint.names import Row, Split, Transpose


def _card(keys: Keys) -> dict[str, Any]:
    d_model, context = keys.size("n_embd", 768), keys.size("n_positions", 512)
    keys.only("n_ctx", context)
    keys.only("afn", "relu", "silu", "swish", "gelu")
    return {
        "n_layers": keys.size("n_layer", 12),
        "d_model": d_model,
        "vocab_size": keys.size("vocab_size", 40478),
        "context": context,
        "attention": {"kind": "multi_head", "n_heads": keys.size("n_head", 12), "bias": ["q", "k", "v", "o"]},
        "position": {"kind": "learned"},
        "norm": {"kind": "layernorm", "eps": keys.number("layer_norm_epsilon", 1e-5), "at": ["out"]},
        "mlp": {
            "kind": "plain",
            # What this family calls gelu is the tanh approximation.
            "act": "gelu_tanh" if keys.raw("afn", "gelu") == "gelu" else keys.activation("afn"),
            "d_ff": 4 * d_model,
            "bias": True,
        },
        "dropout": gpt2.dropout(keys, 0.1),
    }


def _rows(card: Card) -> Sequence[Row]:
    theirs, ours = "transformer.h.{i}", "decoder.blocks.{i}"
    return (
        Row("transformer.tokens_embed", "embed"),
        Row("transformer.positions_embed", "decoder.position.table"),
        Row(f"{theirs}.attn.c_attn", tuple(f"{ours}.attn.{p}" for p in "qkv"), Split(Transpose())),
        Row(f"{theirs}.attn.c_proj", f"{ours}.attn.o", Transpose()),
        Row(f"{theirs}.ln_1", f"{ours}.attn_out_norm"),
        Row(f"{theirs}.mlp.c_fc", f"{ours}.mlp.up", Transpose()),
        Row(f"{theirs}.mlp.c_proj", f"{ours}.mlp.down", Transpose()),
        Row(f"{theirs}.ln_2", f"{ours}.mlp_out_norm"),
        Row("lm_head", "head.matrix"),
    )


def _config(card: Card) -> dict[str, Any] | None:
    common = gpt_keys(card)
    if common is None or not isinstance(card.position, Learned):
        return None
    # The width of the MLP follows from n_embd here, and what reads the config back sees whether it is that.
    act = common.pop("activation_function")
    del common["n_inner"]
    return {"architectures": ["OpenAIGPTLMHeadModel"], **common, "afn": "gelu" if act == "gelu_new" else act}


FAMILY = Family(
    card=_card,
    config=_config,
    rows=_rows,
    prefix="transformer.",
    ignored=(r"h\.\d+\.attn\.bias",),
    irrelevant=frozenset(
        {
            "n_special",
            "predict_special_tokens",
            "summary_activation",
            "summary_first_dropout",
            "summary_proj_to_labels",
            "summary_type",
            "summary_use_proj",
        }
    ),
)
