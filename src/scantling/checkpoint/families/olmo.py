"""OLMo 2 (arXiv:2501.00656): norms on what a sublayer adds, and QK-norm over all heads together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scantling.cards import Card
from scantling.checkpoint.config_keys import Keys
from scantling.checkpoint.config_write import gated_keys, has_all_biases, llama_keys
from scantling.checkpoint.families import llama
from scantling.checkpoint.family import Family
from scantling.checkpoint.names import Row


def _card(keys: Keys) -> dict[str, Any]:
    sections = llama.common(keys, ["q", "k", "v", "o"] if keys.flag("attention_bias", False) else [], eps=1e-5)
    norm = {**sections["norm"], "rounded": False}
    sections["attention"]["qk_norm"] = {**norm, "over": "width"}
    return sections | {"norm": {**norm, "at": ["res"]}, "mlp": llama.gated(keys, False)}


def _rows(card: Card) -> Sequence[Row]:
    theirs, ours = "model.layers.{i}", "decoder.blocks.{i}"
    return (
        *llama.rows(card),
        *(Row(f"{theirs}.self_attn.{p}_norm", f"{ours}.attn.{p}_norm") for p in "qk"),
        Row(f"{theirs}.post_attention_layernorm", f"{ours}.attn_res_norm"),
        Row(f"{theirs}.post_feedforward_layernorm", f"{ours}.mlp_res_norm"),
    )


def _config(card: Card) -> dict[str, Any] | None:
    common, mlp = llama_keys(card), gated_keys(card)
    if common is None or mlp is None or common.pop("head_dim") * common["num_attention_heads"] != card.d_model:
        return None
    return {"architectures": ["Olmo2ForCausalLM"], **common, **mlp, "attention_bias": has_all_biases(card)}


OLMO2 = Family(card=_card, rows=_rows, prefix="model.", tied_by_default=False, config=_config)
