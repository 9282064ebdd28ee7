"""ModernBERT (arXiv:2412.13663): pre-norm encoder with RoPE, gated GELU, and windows in two layers of three."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scantling.cards import Card
from scantling.cards.schema import Gated, LayerNorm, MultiHead, RoPE
from scantling.checkpoint.config_keys import Keys
from scantling.checkpoint.config_write import ACTIVATIONS, has_all_biases, layers_of, window_keys
from scantling.checkpoint.families import encoder_heads as heads
from scantling.checkpoint.family import Family
from scantling.checkpoint.header import shown
from scantling.checkpoint.layer_keys import FULL, SLIDING, n_layers, pattern, windows
from scantling.checkpoint.names import Row, Split
from scantling.checkpoint.rope_keys import by_layer_type
from scantling.errors import ScantlingInputError


def _transform(keys: Keys) -> dict[str, Any]:
    act, bias = keys.activation("classifier_activation", "gelu"), keys.flag("classifier_bias", False)
    return {"act": act, "norm": True, "bias": bias}


def _masked_lm(keys: Keys) -> dict[str, Any]:
    return {"kind": "lm", "bias": keys.flag("decoder_bias", True), "transform": _transform(keys)}


def _sequence(keys: Keys) -> dict[str, Any]:
    pools = {"cls": "first", "mean": "mean"}
    pool = keys.raw("classifier_pooling", "cls")
    if pool not in pools:
        raise ScantlingInputError(f"{keys.where}: classifier_pooling is {shown(pool)}; known: {', '.join(pools)}")
    return heads.sequence(keys, "gelu") | {"pool": pools[pool], "transform": _transform(keys)}


_HEADS: heads.Heads = {
    "ModernBertForMaskedLM": _masked_lm,
    "ModernBertForSequenceClassification": _sequence,
    "ModernBertForTokenClassification": lambda keys: heads.tokens(keys) | {"transform": _transform(keys)},
    "ModernBertModel": heads.stream,
}


def _card(keys: Keys) -> dict[str, Any]:
    d_model, n_heads = keys.size("hidden_size", 768), keys.size("num_attention_heads", 12)
    context = keys.size("max_position_embeddings", 8192)
    norm = {"kind": "layernorm", "eps": keys.number("norm_eps", 1e-5), "bias": keys.flag("norm_bias", False)}
    keys.only("rope_scaling")
    bases = {FULL: ("global_rope_theta", 160000.0), SLIDING: ("local_rope_theta", 10000.0)}
    turns = by_layer_type(keys, d_model // n_heads, context, bases, scaled=FULL)
    # Neither is in the card's places of dropout; published models have none.
    keys.only("attention_dropout", 0.0, 0)
    keys.only("mlp_dropout", 0.0, 0)
    # A section of a layer is laid over the card's, so it must say that it has no scaling.
    near = {"position": {"scaling": None, **turns[SLIDING]}}
    return {
        "n_layers": n_layers(keys),
        "d_model": d_model,
        "vocab_size": keys.size("vocab_size", 50368),
        "context": context,
        "attention": {
            "kind": "multi_head",
            "n_heads": n_heads,
            "bias": ["q", "k", "v", "o"] if keys.flag("attention_bias", False) else [],
        },
        "position": turns[FULL],
        "norm": {**norm, "skip_first": True},
        "mlp": {
            "kind": "gated",
            "act": keys.activation("hidden_activation", "gelu"),
            "d_ff": keys.size("intermediate_size", 1152),
            "bias": keys.flag("mlp_bias", False),
        },
        "pattern": pattern([{**layer, **near} if layer else {} for layer in _layers(keys)]),
        "embedding": {"norm": norm},
        "head": heads.head(keys, _HEADS, "ModernBertModel"),
        "dropout": {"embedding": keys.number("embedding_dropout", 0.0)},
    }


def _layers(keys: Keys) -> list[dict[str, Any]]:
    """The window of each layer; where the layers are listed, the list decides.

    local_attention counts both sides of a token, a card's window one side and the token itself.
    """
    period = keys.size("global_attn_every_n_layers", 3)
    usual = [SLIDING if i % period else FULL for i in range(n_layers(keys))]
    return windows(keys, keys.size("local_attention", 128) // 2 + 1, usual)


def _rows(card: Card) -> Sequence[Row]:
    theirs, ours = "model.layers.{i}", "encoder.blocks.{i}"
    top = "decoder" if card.head.kind == "lm" else "classifier"
    return (
        Row("model.embeddings.tok_embeddings", "embed"),
        Row("model.embeddings.norm", "encoder.embed_norm"),
        Row(f"{theirs}.attn_norm", f"{ours}.attn_norm"),
        Row(f"{theirs}.attn.Wqkv", tuple(f"{ours}.attn.{p}" for p in "qkv"), Split()),
        Row(f"{theirs}.attn.Wo", f"{ours}.attn.o"),
        Row(f"{theirs}.mlp_norm", f"{ours}.mlp_norm"),
        Row(f"{theirs}.mlp.Wi", (f"{ours}.mlp.gate", f"{ours}.mlp.up"), Split()),
        Row(f"{theirs}.mlp.Wo", f"{ours}.mlp.down"),
        Row("model.final_norm", "encoder.final_norm"),
        Row("head.dense", "head.transform.dense"),
        Row("head.norm", "head.transform.norm"),
        Row(top, "head.matrix"),
        Row(top, "head"),
    )


def _config(card: Card) -> dict[str, Any] | None:
    attention, mlp, norm, far = card.attention, card.mlp, card.norm, card.position
    if not isinstance(attention, MultiHead) or not isinstance(mlp, Gated) or not isinstance(norm, LayerNorm):
        return None
    if not isinstance(far, RoPE) or far.scaling is not None:
        return None
    near = next((layer.position for layer in layers_of(card) if isinstance(layer.position, RoPE)), far)
    windows, transform = window_keys(card), card.head.transform
    full = [i for i, kind in enumerate(windows["layer_types"]) if kind == FULL]
    return {
        **heads.written(card, "ModernBert"),
        "vocab_size": card.vocab_size,
        "hidden_size": card.d_model,
        "num_hidden_layers": card.n_layers,
        "num_attention_heads": attention.n_heads,
        "intermediate_size": mlp.d_ff,
        "hidden_activation": ACTIVATIONS[mlp.act],
        "max_position_embeddings": card.context,
        "norm_eps": norm.eps,
        "norm_bias": norm.bias,
        "attention_bias": has_all_biases(card),
        "mlp_bias": mlp.bias,
        "global_rope_theta": far.theta,
        "local_rope_theta": near.theta,
        "local_attention": 2 * (windows.get("sliding_window", 65) - 1),
        # Older readers know the period only.
        "global_attn_every_n_layers": full[1] if len(full) > 1 else max(card.n_layers, 1),
        "layer_types": windows["layer_types"],
        "embedding_dropout": card.dropout.embedding,
        "decoder_bias": card.head.bias,
        "classifier_pooling": "mean" if card.head.pool == "mean" else "cls",
        **(
            {"classifier_activation": ACTIVATIONS[transform.act], "classifier_bias": transform.bias}
            if transform
            else {}
        ),
    }


FAMILY = Family(
    card=_card,
    config=_config,
    rows=_rows,
    prefix="model.",
    vocabulary_head=(r"head\.(dense|norm)\..+", r"decoder\.(weight|bias)"),
    irrelevant=frozenset(
        {
            "classifier_activation",
            "classifier_bias",
            "classifier_dropout",
            "classifier_pooling",
            "cls_token_id",
            "decoder_bias",
            "deterministic_flash_attn",
            "initializer_cutoff_factor",
            "layer_norm_eps",
            "position_embedding_type",
            "reference_compile",
            "repad_logits_with_grad",
            "sparse_pred_ignore_index",
            "sparse_prediction",
        }
    ),
    stacks="encoder",
)
