"""GPT-J (Wang and Komatsuzaki 2021): RoPE on neighbouring channels, parallel sublayers under one norm, a head bias."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scantling.cards import Card
from scantling.cards.schema import RoPE
from scantling.checkpoint.config_keys import Keys
from scantling.checkpoint.config_write import gpt_keys
from scantling.checkpoint.families import gpt2
from scantling.checkpoint.family import Family
from scantling.checkpoint.names import Row
from scantling.checkpoint.rope_keys import section


def _card(keys: Keys) -> dict[str, Any]:
    d_model, heads = keys.size("n_embd"), keys.size("n_head")
    context = keys.size("n_positions", 2048)
    for name in ("rotary", "scale_attn_weights"):
        keys.only(name, True)
    keys.only("n_ctx", context)
    position = section(keys.where, {}, keys.size("rotary_dim", 64), context)
    return {
        "n_layers": keys.size("n_layer"),
        "d_model": d_model,
        "vocab_size": keys.size("vocab_size"),
        "context": context,
        "attention": {"kind": "multi_head", "n_heads": heads},
        "position": {**position, "interleaved": True},
        "norm": {"kind": "layernorm", "eps": keys.number("layer_norm_epsilon", 1e-5)},
        "residual": {"parallel": True, "shared_norm": True},
        "mlp": {
            "kind": "plain",
            "act": keys.activation("activation_function", "gelu_new"),
            "d_ff": keys.size("n_inner", 4 * d_model),
            "bias": True,
        },
        "head": {"bias": True},
        "dropout": gpt2.dropout(keys, 0.0),
    }


def _rows(card: Card) -> Sequence[Row]:
    theirs, ours = "transformer.h.{i}", "decoder.blocks.{i}"
    return (
        Row("transformer.wte", "embed"),
        Row(f"{theirs}.ln_1", f"{ours}.attn_norm"),
        *(Row(f"{theirs}.attn.{p}_proj", f"{ours}.attn.{p}") for p in "qkv"),
        Row(f"{theirs}.attn.out_proj", f"{ours}.attn.o"),
        Row(f"{theirs}.mlp.fc_in", f"{ours}.mlp.up"),
        Row(f"{theirs}.mlp.fc_out", f"{ours}.mlp.down"),
        Row("transformer.ln_f", "decoder.final_norm"),
        # A tied head owns only its bias.
        Row("lm_head", "head" if card.tied else "head.matrix"),
    )


def _config(card: Card) -> dict[str, Any] | None:
    common = gpt_keys(card)
    if common is None or not isinstance(card.position, RoPE):
        return None
    return {
        "architectures": ["GPTJForCausalLM"],
        **common,
        "rotary_dim": card.position.d_rotary,
    }


FAMILY = Family(
    card=_card,
    config=_config,
    rows=_rows,
    prefix="transformer.",
    ignored=(r"h\.\d+\.attn\.(bias|masked_bias)",),
    irrelevant=frozenset(
        {
            "summary_activation",
            "summary_first_dropout",
            "summary_proj_to_labels",
            "summary_type",
            "summary_use_proj",
        }
    ),
    tied_by_default=False,
)
