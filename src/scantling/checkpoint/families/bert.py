"""BERT (arXiv:1810.04805): post-norm encoder, learned positions, segments, biases, GELU; several heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scantling.cards import Card
from scantling.cards.schema import LayerNorm, Learned, MultiHead, Plain
from scantling.checkpoint.config_keys import Keys
from scantling.checkpoint.config_write import ACTIVATIONS
from scantling.checkpoint.families import encoder_heads as heads
from scantling.checkpoint.family import Family
from scantling.checkpoint.names import Row

WITHOUT_EFFECT = frozenset({"classifier_dropout"})
"""Keys that change no result of a trained model: the dropout before a classifier acts in training alone."""

OLD_NORMS = ((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias"))
"""How the first files spell the gain and shift of a norm."""


def _masked_lm(keys: Keys) -> dict[str, Any]:
    return {"kind": "lm", "bias": True, "transform": {"act": keys.activation("hidden_act", "gelu"), "norm": True}}


def _bare(keys: Keys) -> dict[str, Any]:
    return heads.pooler(keys) if keys.flag("add_pooling_layer", True) else heads.stream(keys)


_HEADS: heads.Heads = {
    "BertForMaskedLM": _masked_lm,
    # Its next-sentence head, and the pooler that only that head reads, are passed over.
    "BertForPreTraining": _masked_lm,
    "BertForSequenceClassification": lambda keys: heads.sequence(keys, "tanh"),
    "BertForTokenClassification": heads.tokens,
    "BertModel": _bare,
}


_USUAL = {"vocab_size": 30522, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
"""What a config that leaves a size out means."""


def _card(keys: Keys) -> dict[str, Any]:
    return common(keys) | {"head": heads.head(keys, _HEADS, "BertModel")}


def common(keys: Keys, context: int | None = None, usual: Mapping[str, int] | None = None) -> dict[str, Any]:
    """All sections of BERT and its relatives but the head.

    Args:
        context: where it is not max_position_embeddings.
        usual: sizes that a config means where it leaves them out, if not BERT's.
    """
    sizes = _USUAL | dict(usual or {})
    eps = keys.number("layer_norm_eps", 1e-12)
    keys.only("position_embedding_type", "absolute")
    keys.only("is_decoder", False)
    keys.only("add_cross_attention", False)
    dropped = keys.number("hidden_dropout_prob", 0.1)
    return {
        "n_layers": keys.size("num_hidden_layers", 12),
        "d_model": keys.size("hidden_size", sizes["hidden_size"]),
        "vocab_size": keys.size("vocab_size", sizes["vocab_size"]),
        "context": keys.size("max_position_embeddings", 512) if context is None else context,
        "attention": {
            "kind": "multi_head",
            "n_heads": keys.size("num_attention_heads", sizes["num_attention_heads"]),
            "bias": ["q", "k", "v", "o"],
        },
        "position": {"kind": "learned"},
        "norm": {"kind": "layernorm", "eps": eps, "at": ["out"]},
        "mlp": {
            "kind": "plain",
            "act": keys.activation("hidden_act", "gelu"),
            "d_ff": keys.size("intermediate_size", sizes["intermediate_size"]),
            "bias": True,
        },
        "embedding": {"types": keys.size("type_vocab_size", 2), "norm": {"kind": "layernorm", "eps": eps}},
        "dropout": {
            "embedding": dropped,
            "attention": keys.number("attention_probs_dropout_prob", 0.1),
            "residual": dropped,
        },
    }


def trunk(base: str) -> tuple[Row, ...]:
    """The names of tables and layers, below the heads; `base` is the original's name of the model without a head."""
    theirs, ours = f"{base}.encoder.layer.{{i}}", "encoder.blocks.{i}"
    return (
        Row(f"{base}.embeddings.word_embeddings", "embed"),
        Row(f"{base}.embeddings.token_type_embeddings", "encoder.types.table"),
        Row(f"{base}.embeddings.position_embeddings", "encoder.position.table"),
        Row(f"{base}.embeddings.LayerNorm", "encoder.embed_norm"),
        *(Row(f"{theirs}.attention.self.{name}", f"{ours}.attn.{name[0]}") for name in ("query", "key", "value")),
        Row(f"{theirs}.attention.output.dense", f"{ours}.attn.o"),
        Row(f"{theirs}.attention.output.LayerNorm", f"{ours}.attn_out_norm"),
        Row(f"{theirs}.intermediate.dense", f"{ours}.mlp.up"),
        Row(f"{theirs}.output.dense", f"{ours}.mlp.down"),
        Row(f"{theirs}.output.LayerNorm", f"{ours}.mlp_out_norm"),
    )


def _rows(card: Card) -> Sequence[Row]:
    if card.head.kind == "lm":
        top: tuple[Row, ...] = (
            Row("cls.predictions.transform.dense", "head.transform.dense"),
            Row("cls.predictions.transform.LayerNorm", "head.transform.norm"),
            Row("cls.predictions.decoder", "head.matrix"),
            Row("cls.predictions", "head"),
        )
    else:
        top = (Row("bert.pooler.dense", "head.transform.dense"), Row("classifier", "head.matrix"))
    return (*trunk("bert"), *top)


def common_config(card: Card, name: str) -> dict[str, Any] | None:
    """The way back of `common`; `name` begins the names of the original's classes."""
    attention, mlp = card.attention, card.mlp
    if card.family != "encoder" or not isinstance(attention, MultiHead) or not isinstance(mlp, Plain):
        return None
    if not isinstance(card.norm, LayerNorm) or not isinstance(card.position, Learned):
        return None
    return {
        **heads.written(card, name),
        "vocab_size": card.vocab_size,
        "hidden_size": card.d_model,
        "num_hidden_layers": card.n_layers,
        "num_attention_heads": attention.n_heads,
        "intermediate_size": mlp.d_ff,
        "hidden_act": ACTIVATIONS[mlp.act],
        "max_position_embeddings": card.context,
        "type_vocab_size": card.embedding.types,
        "layer_norm_eps": card.norm.eps,
        "hidden_dropout_prob": card.dropout.residual,
        "attention_probs_dropout_prob": card.dropout.attention,
    }


def without_pooler(card: Card) -> dict[str, Any]:
    """What says that the class without a head has no pooler either."""
    bare = card.head.kind in ("none", "embedding") and card.head.transform is None
    return {"add_pooling_layer": False} if bare else {}


def _config(card: Card) -> dict[str, Any] | None:
    common = common_config(card, "Bert")
    return None if common is None else common | without_pooler(card)


FAMILY = Family(
    card=_card,
    config=_config,
    rows=_rows,
    prefix="bert.",
    # A head has one bias under two names: the table's own where the head is tied, the matrix's where it is not.
    ignored=(
        r"embeddings\.position_ids",
        r"pooler\.dense\..+",
        r"cls\.seq_relationship\..+",
        r"cls\.predictions\.(decoder\.)?bias",
    ),
    vocabulary_head=(r"cls\.predictions\..+",),
    irrelevant=WITHOUT_EFFECT,
    stacks="encoder",
    renamed=OLD_NORMS,
)
