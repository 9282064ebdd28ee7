"""RoBERTa (arXiv:1907.11692): BERT without segments, its positions counted from the padding id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scantling.cards import Card
from scantling.cards.schema import Learned
from scantling.checkpoint.config_keys import Keys
from scantling.checkpoint.families import bert
from scantling.checkpoint.families import encoder_heads as heads
from scantling.checkpoint.family import Family
from scantling.checkpoint.names import Row


def _masked_lm(keys: Keys) -> dict[str, Any]:
    # Whatever hidden_act says, this head has the exact GELU.
    return {"kind": "lm", "bias": True, "transform": {"act": "gelu", "norm": True}}


def _bare(keys: Keys) -> dict[str, Any]:
    return heads.pooler(keys) if keys.flag("add_pooling_layer", True) else heads.stream(keys)


_HEADS: heads.Heads = {
    "RobertaForMaskedLM": _masked_lm,
    "RobertaForSequenceClassification": lambda keys: heads.sequence(keys, "tanh"),
    "RobertaForTokenClassification": heads.tokens,
    "RobertaModel": _bare,
}


def _card(keys: Keys) -> dict[str, Any]:
    pad = keys.size("pad_token_id", 1, least=0)
    rows = keys.size("max_position_embeddings", 512, least=pad + 2)
    sections = bert.common(keys, context=rows - pad - 1, usual={"vocab_size": 50265})
    sections["position"] |= {"offset": pad + 1, "pad_id": pad}
    return sections | {"head": heads.head(keys, _HEADS, "RobertaModel")}


def _rows(card: Card) -> Sequence[Row]:
    match card.head.kind:
        case "lm":
            top: tuple[Row, ...] = (
                Row("lm_head.dense", "head.transform.dense"),
                Row("lm_head.layer_norm", "head.transform.norm"),
                Row("lm_head.decoder", "head.matrix"),
                Row("lm_head", "head"),
            )
        case "sequence":
            top = (Row("classifier.dense", "head.transform.dense"), Row("classifier.out_proj", "head.matrix"))
        case _:
            top = (Row("roberta.pooler.dense", "head.transform.dense"), Row("classifier", "head.matrix"))
    return (*bert.trunk("roberta"), *top)


def _config(card: Card) -> dict[str, Any] | None:
    common, position = bert.common_config(card, "Roberta"), card.position
    if common is None or not isinstance(position, Learned) or position.pad_id is None:
        return None
    counted = {"max_position_embeddings": card.context + position.offset, "pad_token_id": position.pad_id}
    return common | bert.without_pooler(card) | counted


FAMILY = Family(
    card=_card,
    config=_config,
    rows=_rows,
    prefix="roberta.",
    ignored=(r"embeddings\.position_ids", r"pooler\.dense\..+", r"lm_head\.(decoder\.)?bias"),
    vocabulary_head=(r"lm_head\..+",),
    irrelevant=bert.WITHOUT_EFFECT,
    stacks="encoder",
    renamed=bert.OLD_NORMS,
)
