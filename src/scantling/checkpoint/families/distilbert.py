"""DistilBERT (arXiv:1910.01108): BERT at half the depth, without segments and without a pooler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scantling.cards import Card
from scantling.cards.schema import Learned, MultiHead, Plain
from scantling.checkpoint.config_keys import Keys
from scantling.checkpoint.config_write import ACTIVATIONS
from scantling.checkpoint.families import encoder_heads as heads
from scantling.checkpoint.family import Family
from scantling.checkpoint.names import Row

# Of all its norms; the config has no key for it.
_EPS = 1e-12


def _masked_lm(keys: Keys) -> dict[str, Any]:
    return {"kind": "lm", "bias": True, "transform": {"act": keys.activation("activation", "gelu"), "norm": True}}


_HEADS: heads.Heads = {
    "DistilBertForMaskedLM": _masked_lm,
    "DistilBertForSequenceClassification": lambda keys: heads.sequence(keys, "relu"),
    "DistilBertForTokenClassification": heads.tokens,
    "DistilBertModel": heads.stream,
}


def _card(keys: Keys) -> dict[str, Any]:
    dropped = keys.number("dropout", 0.1)
    # It says how the table began; a file has the table itself.
    keys.flag("sinusoidal_pos_embds", False)
    return {
        "n_layers": keys.size("n_layers", 6),
        "d_model": keys.size("dim", 768),
        "vocab_size": keys.size("vocab_size", 30522),
        "context": keys.size("max_position_embeddings", 512),
        "attention": {"kind": "multi_head", "n_heads": keys.size("n_heads", 12), "bias": ["q", "k", "v", "o"]},
        "position": {"kind": "learned"},
        "norm": {"kind": "layernorm", "eps": _EPS, "at": ["out"]},
        "mlp": {
            "kind": "plain",
            "act": keys.activation("activation", "gelu"),
            "d_ff": keys.size("hidden_dim", 3072),
            "bias": True,
        },
        "embedding": {"norm": {"kind": "layernorm", "eps": _EPS}},
        "head": heads.head(keys, _HEADS, "DistilBertModel"),
        "dropout": {
            "embedding": dropped,
            "attention": keys.number("attention_dropout", 0.1),
            "residual": dropped,
        },
    }


def _rows(card: Card) -> Sequence[Row]:
    theirs, ours = "distilbert.transformer.layer.{i}", "encoder.blocks.{i}"
    if card.head.kind == "lm":
        top: tuple[Row, ...] = (
            Row("vocab_transform", "head.transform.dense"),
            Row("vocab_layer_norm", "head.transform.norm"),
            Row("vocab_projector", "head.matrix"),
            Row("vocab_projector", "head"),
        )
    else:
        top = (Row("pre_classifier", "head.transform.dense"), Row("classifier", "head.matrix"))
    return (
        Row("distilbert.embeddings.word_embeddings", "embed"),
        Row("distilbert.embeddings.position_embeddings", "encoder.position.table"),
        Row("distilbert.embeddings.LayerNorm", "encoder.embed_norm"),
        *(Row(f"{theirs}.attention.{p}_lin", f"{ours}.attn.{p}") for p in "qkv"),
        Row(f"{theirs}.attention.out_lin", f"{ours}.attn.o"),
        Row(f"{theirs}.sa_layer_norm", f"{ours}.attn_out_norm"),
        Row(f"{theirs}.ffn.lin1", f"{ours}.mlp.up"),
        Row(f"{theirs}.ffn.lin2", f"{ours}.mlp.down"),
        Row(f"{theirs}.output_layer_norm", f"{ours}.mlp_out_norm"),
        *top,
    )


def _config(card: Card) -> dict[str, Any] | None:
    attention, mlp = card.attention, card.mlp
    if not isinstance(attention, MultiHead) or not isinstance(mlp, Plain) or not isinstance(card.position, Learned):
        return None
    return {
        **heads.written(card, "DistilBert"),
        "vocab_size": card.vocab_size,
        "dim": card.d_model,
        "n_layers": card.n_layers,
        "n_heads": attention.n_heads,
        "hidden_dim": mlp.d_ff,
        "activation": ACTIVATIONS[mlp.act],
        "max_position_embeddings": card.context,
        "dropout": card.dropout.residual,
        "attention_dropout": card.dropout.attention,
    }


FAMILY = Family(
    card=_card,
    config=_config,
    rows=_rows,
    prefix="distilbert.",
    ignored=(r"embeddings\.position_ids",),
    vocabulary_head=(r"vocab_(transform|layer_norm|projector)\..+",),
    irrelevant=frozenset({"qa_dropout", "seq_classif_dropout", "tie_weights_"}),
    stacks="encoder",
)
