"""ELECTRA (arXiv:2003.10555): BERT with tables of their own width; a generator, and what finds its replacements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scantling.cards import Card
from scantling.checkpoint.config_keys import Keys
from scantling.checkpoint.families import bert
from scantling.checkpoint.families import encoder_heads as heads
from scantling.checkpoint.family import Family
from scantling.checkpoint.names import Row


def _masked_lm(keys: Keys) -> dict[str, Any]:
    # The matrix reads vectors as wide as the tables; untied ones would be as wide as the stream here.
    if keys.size("embedding_size", 128) != keys.size("hidden_size", 256):
        keys.only("tie_word_embeddings", True)
    return {"kind": "lm", "bias": True, "transform": {"act": "gelu", "norm": True}}


def _replaced(keys: Keys) -> dict[str, Any]:
    return {"kind": "replaced", "bias": True, "transform": {"act": keys.activation("hidden_act", "gelu")}}


_HEADS: heads.Heads = {
    "ElectraForPreTraining": _replaced,
    "ElectraForMaskedLM": _masked_lm,
    "ElectraForSequenceClassification": lambda keys: heads.sequence(keys, "gelu"),
    "ElectraForTokenClassification": heads.tokens,
    "ElectraModel": heads.stream,
}

_USUAL = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
"""Where a small config of this family leaves a key out, it means other sizes than BERT's."""


def _card(keys: Keys) -> dict[str, Any]:
    width, d_model = keys.size("embedding_size", 128), keys.size("hidden_size", 256)
    sections = bert.common(keys, usual=_USUAL)
    if width != d_model:
        sections["embedding"] |= {"width": width, "widen": "after", "widen_bias": True}
    return sections | {"head": heads.head(keys, _HEADS, "ElectraModel")}


def _rows(card: Card) -> Sequence[Row]:
    match card.head.kind:
        case "lm":
            top: tuple[Row, ...] = (
                Row("generator_predictions.dense", "head.transform.dense"),
                Row("generator_predictions.LayerNorm", "head.transform.norm"),
                Row("generator_lm_head", "head.matrix"),
                Row("generator_lm_head", "head"),
            )
        case "replaced":
            top = (
                Row("discriminator_predictions.dense", "head.transform.dense"),
                Row("discriminator_predictions.dense_prediction", "head.matrix"),
            )
        case "sequence":
            top = (Row("classifier.dense", "head.transform.dense"), Row("classifier.out_proj", "head.matrix"))
        case _:
            top = (Row("classifier", "head.matrix"),)
    return (*bert.trunk("electra"), Row("electra.embeddings_project", "encoder.widen"), *top)


def _config(card: Card) -> dict[str, Any] | None:
    common = bert.common_config(card, "Electra")
    return None if common is None else common | {"embedding_size": card.embedding.width or card.d_model}


FAMILY = Family(
    card=_card,
    config=_config,
    rows=_rows,
    prefix="electra.",
    ignored=(r"embeddings\.position_ids",),
    vocabulary_head=(r"generator_(predictions|lm_head)\..+",),
    irrelevant=bert.WITHOUT_EFFECT | {"summary_activation", "summary_last_dropout", "summary_type", "summary_use_proj"},
    stacks="encoder",
    renamed=bert.OLD_NORMS,
)
