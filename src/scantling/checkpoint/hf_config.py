"""A Hugging Face config.json as a card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scantling.cards.read import from_dict, read_file
from scantling.cards.schema import Card
from scantling.checkpoint.config_keys import Keys, read_json
from scantling.checkpoint.families import family, own
from scantling.checkpoint.family import Family
from scantling.checkpoint.header import shown
from scantling.checkpoint.layer_keys import MAX_LAYERS
from scantling.checkpoint.sentence import with_pooling
from scantling.errors import ScantlingInputError


def read_config(path: Path, *, weights: bool = False) -> tuple[Card, str]:
    """The card of a config file, named after its folder, and its model type.

    What sentence-transformers keeps beside the config counts too.

    Args:
        weights: the tensors beside it are to be read too.

    Raises:
        ScantlingInputError: the file is not a config of a known family, or asks for something unknown; or its weights
            are to be read and are quantised.
    """
    data = read_json(path)
    if weights and (method := _quantised(data, str(path))):
        raise ScantlingInputError(
            f"{path}: the weights are quantised ({method}), which cannot be read; plain floating-point ones can"
        )
    if data.get("model_type") == own.MODEL_TYPE:
        own.check(Keys(data, str(path)))
        return read_file(path.with_name(own.CARD_FILE)), own.MODEL_TYPE
    named = data.get("_name_or_path")
    folder = path.resolve().parent.name if path.name == "config.json" else path.stem
    name = folder or (named if isinstance(named, str) and named else "model")
    return with_pooling(card_of_config(data, name, str(path)), path.parent), str(data["model_type"])


def card_of_config(data: Mapping[str, Any], name: str, where: str) -> Card:
    """The card that a config describes.

    Raises:
        ScantlingInputError: an unknown family, a key that is unknown to it, or a value out of range.
    """
    kind = family(data.get("model_type"), where)
    keys = Keys(data, where)
    sections = kind.card(keys)
    sections.setdefault("tied", keys.flag("tie_word_embeddings", kind.tied_by_default))
    sections["dtype"] = keys.dtype()
    keys.finish(kind.irrelevant)
    sections = {key: _present(value) for key, value in sections.items()}
    if method := _quantised(data, where):
        note = f"stored quantised ({method}); sizes are those of the numbers that the blocks stand for"
        sections["source"] = {"config": f"config.json of {name}", "note": note}
    if sections.get("head", {}).get("kind", "lm") != "lm":
        sections["tied"] = False
    return from_dict({"name": name, "family": kind.stacks, **sections}, where)


def end_ids(path: Path) -> frozenset[int]:
    """The ids that end a text, by the config: one, several, or none."""
    found = read_json(path).get("eos_token_id")
    listed = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in listed):
        raise ScantlingInputError(f"{path}: eos_token_id is {shown(found)}; an id or a list of ids is needed")
    return frozenset(listed)


def start_id(path: Path) -> int | None:
    """What a target begins with, by the config; None where it does not say."""
    found = read_json(path).get("decoder_start_token_id")
    if found is not None and (not isinstance(found, int) or isinstance(found, bool) or found < 0):
        raise ScantlingInputError(f"{path}: decoder_start_token_id is {shown(found)}; an id is needed")
    return found


def labels(path: Path, card: Card) -> tuple[str, ...]:
    """Names of the labels that the card's head scores, by the config; numbers where it has no names."""
    count = card.head.n_labels or 0
    found = read_json(path).get("id2label")
    named = found if isinstance(found, Mapping) else {}
    return tuple(str(named.get(str(i), f"LABEL_{i}"))[:200] for i in range(count))


def beyond(path: Path, kind: Family, n_layers: int) -> tuple[str, ...]:
    """Patterns, without the prefix, of tensors of layers beyond the model's own, as many as the config announces."""
    if kind.extra_layers is None:
        return ()
    extra = Keys(read_json(path), str(path)).size(kind.extra_layers, 0, least=0)
    return tuple(rf"layers\.{i}\..+" for i in range(n_layers, n_layers + min(extra, MAX_LAYERS)))


def _quantised(data: Mapping[str, Any], where: str) -> str | None:
    """How the stored weights are quantised; None where they are plain."""
    found = data.get("quantization_config")
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise ScantlingInputError(f"{where}: quantization_config is {shown(found)}; a mapping is needed")
    return shown(found.get("quant_method"))


def _present(value: Any) -> Any:
    return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value
