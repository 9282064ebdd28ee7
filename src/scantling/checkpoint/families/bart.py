"""BART (arXiv:1910.13461) and Marian (arXiv:1804.00344): post-norm, biases everywhere, one table, a fixed shift."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from scantling.cards import Card
from scantling.cards.schema import Learned, MultiHead, Plain, Sinusoidal
from scantling.checkpoint.config_keys import Keys
from scantling.checkpoint.config_write import ACTIVATIONS
from scantling.checkpoint.families.seq2seq import GENERATION, architecture
from scantling.checkpoint.family import Family
from scantling.checkpoint.names import Row, Unsqueeze

EPS = 1e-5
"""Of torch's layer norm; the configs have no key for it."""


def _bart(keys: Keys) -> dict[str, Any]:
    architecture(keys, "BartForConditionalGeneration", "BartModel")
    keys.only("static_position_embeddings", False)
    keys.only("normalize_embedding", True)
    keys.only("extra_pos_embeddings", 2)
    return {
        **_shared(keys, act="gelu", vocab_size=50265),
        "position": {"kind": "learned", "offset": 2},
        "embedding": {"norm": {"kind": "layernorm", "eps": EPS}, **_scale(keys)},
    }


def _marian(keys: Keys) -> dict[str, Any]:
    architecture(keys, "MarianMTModel", "MarianModel")
    keys.only("static_position_embeddings", True)
    keys.only("normalize_embedding", False)
    keys.only("share_encoder_decoder_embeddings", True)
    keys.only("decoder_vocab_size", keys.size("vocab_size", 58101))
    return {
        **_shared(keys, act="gelu", vocab_size=58101),
        "position": {"kind": "sinusoidal", "halves": True, "table": True},
        "embedding": _scale(keys),
    }


def _shared(keys: Keys, act: str, vocab_size: int) -> dict[str, Any]:
    for name in ("normalize_before", "add_final_layer_norm"):
        keys.only(name, False)
    for name in ("encoder_layerdrop", "decoder_layerdrop"):
        keys.only(name, 0.0, 0)
    keys.only("tie_word_embeddings", True)
    layers, heads, d_ff = (
        [keys.size(f"{side}_{key}", default, least=least) for side in ("encoder", "decoder")]
        for key, default, least in (("layers", 12, 0), ("attention_heads", 16, 1), ("ffn_dim", 4096, 1))
    )
    keys.only("num_hidden_layers", layers[0])
    # In training the originals drop within the feed-forward too, for which a card has no key.
    keys.number("activation_dropout", 0.0)
    dropout = keys.number("dropout", 0.1)
    sections: dict[str, Any] = {
        "n_layers": layers[0],
        "d_model": keys.size("d_model", 1024),
        "vocab_size": keys.size("vocab_size", vocab_size),
        "context": keys.size("max_position_embeddings", 1024),
        "attention": {"kind": "multi_head", "n_heads": heads[0], "bias": ["q", "k", "v", "o"]},
        "norm": {"kind": "layernorm", "eps": EPS, "at": ["out"]},
        "mlp": {"kind": "plain", "act": keys.activation("activation_function", act), "d_ff": d_ff[0], "bias": True},
        "head": {"bias": True, "bias_fixed": True},
        "dropout": {
            "embedding": dropout,
            "attention": keys.number("attention_dropout", 0.0),
            "residual": dropout,
        },
    }
    decoder: dict[str, Any] = {} if layers[0] == layers[1] else {"n_layers": layers[1]}
    decoder |= {} if heads[0] == heads[1] else {"attention": {"n_heads": heads[1]}}
    decoder |= {} if d_ff[0] == d_ff[1] else {"mlp": {"d_ff": d_ff[1]}}
    return sections | ({"decoder": decoder} if decoder else {})


def _scale(keys: Keys) -> dict[str, Any]:
    return {"scale": math.sqrt(keys.size("d_model", 1024))} if keys.flag("scale_embedding", False) else {}


def _rows(card: Card) -> Sequence[Row]:
    rows = [
        Row("model.shared", "embed"),
        Row("final_logits_bias", "head", Unsqueeze(), suffixes=(("", ".bias"),)),
        Row("lm_head", "head.matrix"),
    ]
    for stack in ("encoder", "decoder"):
        theirs, ours = f"model.{stack}.layers.{{i}}", f"{stack}.blocks.{{i}}"
        rows += [
            Row(f"model.{stack}.embed_positions", f"{stack}.position.table"),
            Row(f"model.{stack}.layernorm_embedding", f"{stack}.embed_norm"),
            *_attention(f"{theirs}.self_attn", f"{ours}.attn"),
            Row(f"{theirs}.fc1", f"{ours}.mlp.up"),
            Row(f"{theirs}.fc2", f"{ours}.mlp.down"),
            Row(f"{theirs}.final_layer_norm", f"{ours}.mlp_out_norm"),
        ]
    return [*rows, *_attention("model.decoder.layers.{i}.encoder_attn", "decoder.blocks.{i}.cross")]


def _attention(theirs: str, ours: str) -> list[Row]:
    names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}
    rows = [Row(f"{theirs}.{name}", f"{ours}.{part}") for part, name in names.items()]
    return [*rows, Row(f"{theirs}_layer_norm", f"{ours}_out_norm")]


def _bart_config(card: Card) -> dict[str, Any] | None:
    shared = _shared_config(card)
    if shared is None or not isinstance(card.position, Learned):
        return None
    return {"architectures": ["BartForConditionalGeneration"], **shared}


def _marian_config(card: Card) -> dict[str, Any] | None:
    shared = _shared_config(card)
    if shared is None or not isinstance(card.position, Sinusoidal):
        return None
    return {"architectures": ["MarianMTModel"], **shared, "decoder_vocab_size": card.vocab_size}


def _shared_config(card: Card) -> dict[str, Any] | None:
    own, mlp, side = card.attention, card.mlp, card.decoder
    other = own if side is None or side.attention is None else side.attention
    wider = mlp if side is None or side.mlp is None else side.mlp
    if not isinstance(own, MultiHead) or not isinstance(other, MultiHead):
        return None
    if not isinstance(mlp, Plain) or not isinstance(wider, Plain):
        return None
    return {
        "is_encoder_decoder": True,
        "vocab_size": card.vocab_size,
        "d_model": card.d_model,
        "encoder_layers": card.n_layers,
        "decoder_layers": card.n_layers if side is None or side.n_layers is None else side.n_layers,
        "encoder_attention_heads": own.n_heads,
        "decoder_attention_heads": other.n_heads,
        "encoder_ffn_dim": mlp.d_ff,
        "decoder_ffn_dim": wider.d_ff,
        "activation_function": ACTIVATIONS[mlp.act],
        "max_position_embeddings": card.context,
        "scale_embedding": card.embedding.scale is not None,
        "dropout": card.dropout.residual,
        "attention_dropout": card.dropout.attention,
        # The original's own defaults are ids of its own vocabulary.
        "forced_eos_token_id": None,
    }


IRRELEVANT = GENERATION | {
    "_num_labels",
    "add_bias_logits",
    "classif_dropout",
    "classifier_dropout",
    "init_std",
    "save_step",
}

BART = Family(
    card=_bart,
    config=_bart_config,
    rows=_rows,
    prefix="model.",
    stacks="encoder-decoder",
    copies=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
    ignored=(r"(encoder|decoder)\.version",),
    absent=("final_logits_bias",),
    irrelevant=IRRELEVANT,
)
MARIAN = Family(
    card=_marian,
    config=_marian_config,
    rows=_rows,
    prefix="model.",
    stacks="encoder-decoder",
    copies=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
    absent=("final_logits_bias",),
    irrelevant=IRRELEVANT | {"extra_pos_embeddings"},
)
