"""StableLM (arXiv:2402.17834): LayerNorm, gated MLP, RoPE on a part of each head, parallel sublayers as an option."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scantling.cards import Card
from scantling.cards.schema import LayerNorm, MultiHead
from scantling.checkpoint.config_keys import Keys
from scantling.checkpoint.config_write import gated_keys, partial_rope_keys
from scantling.checkpoint.families import llama
from scantling.checkpoint.family import Family
from scantling.checkpoint.names import Row, Stack
from scantling.checkpoint.rope_keys import reach, rope


def _card(keys: Keys) -> dict[str, Any]:
    d_model, heads, context = (
        keys.size(name) for name in ("hidden_size", "num_attention_heads", "max_position_embeddings")
    )
    position = rope(keys, d_model // heads, context, fraction=0.25)
    eps, parallel = keys.number("layer_norm_eps", 1e-5), keys.flag("use_parallel_residual", False)
    # It would act on the MLP's update only.
    keys.only("hidden_dropout", 0.0, 0)
    norm = {"kind": "layernorm", "eps": eps, "over": "each_head"}
    return {
        "n_layers": keys.size("num_hidden_layers"),
        "d_model": d_model,
        "vocab_size": keys.size("vocab_size"),
        "context": reach(position, context),
        "attention": {
            "kind": "multi_head",
            "n_heads": heads,
            "n_kv_heads": keys.size("num_key_value_heads"),
            "bias": ["q", "k", "v"] if keys.flag("use_qkv_bias", False) else [],
            "qk_norm": norm if keys.flag("qk_layernorm", False) else None,
        },
        "position": position,
        "norm": {"kind": "layernorm", "eps": eps},
        "residual": {"parallel": parallel, "shared_norm": parallel},
        "mlp": llama.gated(keys, False),
        "dropout": {"attention": keys.number("attention_dropout", 0.0)},
    }


def _rows(card: Card) -> Sequence[Row]:
    norms = [
        Row(f"model.layers.{{i}}.self_attn.{p}_layernorm.norms.{{e}}", f"decoder.blocks.{{i}}.attn.{p}_norm", Stack())
        for p in "qk"
    ]
    return (*llama.rows(card), *norms)


def _config(card: Card) -> dict[str, Any] | None:
    attention, mlp, turns = card.attention, gated_keys(card), partial_rope_keys(card)
    if turns is None or mlp is None or not isinstance(attention, MultiHead) or not isinstance(card.norm, LayerNorm):
        return None
    return {
        "architectures": ["StableLmForCausalLM"],
        "vocab_size": card.vocab_size,
        "hidden_size": card.d_model,
        "num_hidden_layers": card.n_layers,
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads,
        "layer_norm_eps": card.norm.eps,
        "use_qkv_bias": bool(attention.bias),
        "qk_layernorm": attention.qk_norm is not None,
        "use_parallel_residual": card.residual.parallel,
        "attention_dropout": card.dropout.attention,
        **mlp,
        **turns,
    }


FAMILY = Family(
    card=_card,
    config=_config,
    rows=_rows,
    prefix="model.",
    ignored=llama.OLD_BUFFERS,
    tied_by_default=False,
)
