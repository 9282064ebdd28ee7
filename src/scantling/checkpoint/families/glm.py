"""GLM-4 (arXiv:2406.12793): Llama with half of each head turned in neighbouring pairs, and a fused MLP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scantling.cards import Card
from scantling.cards.schema import MultiHead, RMSNorm
from scantling.checkpoint.config_keys import Keys
from scantling.checkpoint.config_write import gated_keys, partial_rope_keys
from scantling.checkpoint.families import llama
from scantling.checkpoint.family import Family
from scantling.checkpoint.names import Row, Split


def _card(keys: Keys) -> dict[str, Any]:
    bias = ["q", "k", "v"] if keys.flag("attention_bias", True) else []
    sections = llama.common(keys, bias, kv_heads=2, d_head=128, eps=1.5625e-07, fraction=0.5)
    sections["position"]["interleaved"] = True
    return sections | {"mlp": llama.gated(keys, False)}


def _rows(card: Card) -> Sequence[Row]:
    gate_up = Row(
        "model.layers.{i}.mlp.gate_up_proj", ("decoder.blocks.{i}.mlp.gate", "decoder.blocks.{i}.mlp.up"), Split()
    )
    return (*(row for row in llama.rows(card) if row.theirs.split(".")[-1] not in ("gate_proj", "up_proj")), gate_up)


def _config(card: Card) -> dict[str, Any] | None:
    attention, mlp, turns = card.attention, gated_keys(card), partial_rope_keys(card, interleaved=True)
    if turns is None or mlp is None or not isinstance(attention, MultiHead) or not isinstance(card.norm, RMSNorm):
        return None
    return {
        "architectures": ["GlmForCausalLM"],
        "vocab_size": card.vocab_size,
        "hidden_size": card.d_model,
        "num_hidden_layers": card.n_layers,
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads,
        "head_dim": attention.d_head,
        "rms_norm_eps": card.norm.eps,
        "attention_bias": bool(attention.bias),
        "attention_dropout": card.dropout.attention,
        **mlp,
        **turns,
    }


FAMILY = Family(card=_card, config=_config, rows=_rows, prefix="model.", tied_by_default=False)
