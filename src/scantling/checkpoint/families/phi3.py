"""Phi-3 and Phi-4 (arXiv:2404.14219, arXiv:2412.08905): Llama with fused matrices, LongRoPE and a window everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scantling.cards import Card
from scantling.cards.schema import LongRopeScaling, MultiHead, RMSNorm, RoPE
from scantling.checkpoint.config_keys import Keys
from scantling.checkpoint.config_write import gated_keys, partial_rope_keys
from scantling.checkpoint.families import llama
from scantling.checkpoint.family import Family
from scantling.checkpoint.names import Row, Split
from scantling.errors import ScantlingInputError

_TRAINED = 4096


def _card(keys: Keys) -> dict[str, Any]:
    # Keys of Phi-4-mini, of which only these values exist; and a dropout that the original never applies.
    for name in ("attention_bias", "mlp_bias", "lm_head_bias"):
        keys.only(name, False)
    for name in ("full_attn_mod", "interpolate_factor"):
        keys.only(name, 1)
    keys.only("embd_pdrop", 0, 0.0)
    sections = llama.common(keys, [], eps=1e-5, trained=_TRAINED, fraction=1.0)
    kind = sections["position"].get("scaling", {}).get("kind", "longrope")
    if kind != "longrope":
        raise ScantlingInputError(f"{keys.where}: RoPE scaling {kind!r} is not defined for phi3; known: longrope")
    sections["attention"]["window"] = keys.optional_size("sliding_window")
    sections["dropout"]["residual"] = keys.number("resid_pdrop", 0.0)
    return sections | {"mlp": llama.gated(keys, False)}


def _rows(card: Card) -> Sequence[Row]:
    theirs, ours = "model.layers.{i}", "decoder.blocks.{i}"
    return (
        Row("model.embed_tokens", "embed"),
        Row(f"{theirs}.input_layernorm", f"{ours}.attn_norm"),
        Row(f"{theirs}.self_attn.qkv_proj", tuple(f"{ours}.attn.{p}" for p in "qkv"), Split()),
        Row(f"{theirs}.self_attn.o_proj", f"{ours}.attn.o"),
        Row(f"{theirs}.post_attention_layernorm", f"{ours}.mlp_norm"),
        Row(f"{theirs}.mlp.gate_up_proj", (f"{ours}.mlp.gate", f"{ours}.mlp.up"), Split()),
        Row(f"{theirs}.mlp.down_proj", f"{ours}.mlp.down"),
        Row("model.norm", "decoder.final_norm"),
        Row("lm_head", "head.matrix"),
    )


def _config(card: Card) -> dict[str, Any] | None:
    attention, mlp, turns, position = card.attention, gated_keys(card), partial_rope_keys(card), card.position
    if turns is None or mlp is None or not isinstance(attention, MultiHead) or not isinstance(card.norm, RMSNorm):
        return None
    if isinstance(position, RoPE) and isinstance(position.scaling, LongRopeScaling):
        turns |= {"original_max_position_embeddings": position.scaling.trained_length}
    return {
        "architectures": ["Phi3ForCausalLM"],
        "vocab_size": card.vocab_size,
        "hidden_size": card.d_model,
        "num_hidden_layers": card.n_layers,
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads,
        "head_dim": attention.d_head,
        "rms_norm_eps": card.norm.eps,
        "sliding_window": attention.window,
        "attention_dropout": card.dropout.attention,
        "resid_pdrop": card.dropout.residual,
        **mlp,
        **turns,
    }


FAMILY = Family(card=_card, config=_config, rows=_rows, prefix="model.", tied_by_default=False)
