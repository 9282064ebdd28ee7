"""OPT (arXiv:2205.01068): learned positions after two spare rows, biases, ReLU; 350M: post-norm, a narrow table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scantling.cards import Card
from scantling.cards.schema import Learned, MultiHead, Plain
from scantling.checkpoint.config_keys import Keys
from scantling.checkpoint.config_write import ACTIVATIONS
from scantling.checkpoint.family import Family
from scantling.checkpoint.header import shown
from scantling.checkpoint.names import Row
from scantling.errors import ScantlingInputError


def _card(keys: Keys) -> dict[str, Any]:
    d_model, bias = keys.size("hidden_size"), keys.flag("enable_bias", True)
    keys.only("layer_norm_elementwise_affine", True)
    keys.only("layerdrop", 0.0, 0)
    keys.only("activation_dropout", 0.0, 0)
    without_final = keys.flag("_remove_final_layer_norm", False)
    return {
        "n_layers": keys.size("num_hidden_layers"),
        "d_model": d_model,
        "vocab_size": keys.size("vocab_size"),
        "context": keys.size("max_position_embeddings", 2048),
        "attention": {
            "kind": "multi_head",
            "n_heads": keys.size("num_attention_heads"),
            "bias": ["q", "k", "v", "o"] if bias else [],
        },
        "position": {"kind": "learned", "offset": 2, "from_mask": True},
        "norm": {
            "kind": "layernorm",
            # Of torch's layer norm; the config has no key for it.
            "eps": 1e-5,
            "at": ["in"] if keys.flag("do_layer_norm_before", True) else ["out"],
            "final": False if without_final else None,
        },
        "mlp": {
            "kind": "plain",
            "act": keys.activation("activation_function", "relu"),
            "d_ff": keys.size("ffn_dim"),
            "bias": bias,
        },
        "embedding": {"width": _table_width(keys, d_model)},
        "dropout": {"attention": keys.number("attention_dropout", 0.0), "residual": keys.number("dropout", 0.1)},
    }


def _table_width(keys: Keys, d_model: int) -> int:
    width = keys.size("word_embed_proj_dim", d_model)
    if width != d_model and not keys.flag("tie_word_embeddings", True):
        raise ScantlingInputError(
            f"{keys.where}: word_embed_proj_dim is {shown(width)}, which is not supported with an untied head; "
            f"it must be hidden_size {d_model}"
        )
    return width


def _rows(card: Card) -> Sequence[Row]:
    theirs, ours = "model.decoder.layers.{i}", "decoder.blocks.{i}"
    norm = "norm" if "in" in card.norm.at else "out_norm"
    return (
        Row("model.decoder.embed_tokens", "embed"),
        Row("model.decoder.embed_positions", "decoder.position.table"),
        Row("model.decoder.project_in", "widen"),
        *(Row(f"{theirs}.self_attn.{p}_proj", f"{ours}.attn.{p}") for p in "qkv"),
        Row(f"{theirs}.self_attn.out_proj", f"{ours}.attn.o"),
        Row(f"{theirs}.self_attn_layer_norm", f"{ours}.attn_{norm}"),
        Row(f"{theirs}.fc1", f"{ours}.mlp.up"),
        Row(f"{theirs}.fc2", f"{ours}.mlp.down"),
        Row(f"{theirs}.final_layer_norm", f"{ours}.mlp_{norm}"),
        Row("model.decoder.final_layer_norm", "decoder.final_norm"),
        Row("model.decoder.project_out", "head.narrow"),
        Row("lm_head", "head.matrix"),
    )


def _config(card: Card) -> dict[str, Any] | None:
    attention, mlp = card.attention, card.mlp
    if not isinstance(attention, MultiHead) or not isinstance(mlp, Plain) or not isinstance(card.position, Learned):
        return None
    return {
        "architectures": ["OPTForCausalLM"],
        "vocab_size": card.vocab_size,
        "hidden_size": card.d_model,
        "word_embed_proj_dim": card.embedding.width or card.d_model,
        "num_hidden_layers": card.n_layers,
        "num_attention_heads": attention.n_heads,
        "ffn_dim": mlp.d_ff,
        "activation_function": ACTIVATIONS[mlp.act],
        "max_position_embeddings": card.context,
        "do_layer_norm_before": "in" in card.norm.at,
        "_remove_final_layer_norm": "in" in card.norm.at and card.norm.final is False,
        "enable_bias": mlp.bias,
        "attention_dropout": card.dropout.attention,
        "dropout": card.dropout.residual,
    }


FAMILY = Family(
    card=_card,
    config=_config,
    rows=_rows,
    prefix="model.",
    ignored=(r"decoder\.version",),
    irrelevant=frozenset({"init_std", "output_projection"}),
)
