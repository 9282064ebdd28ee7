"""A Hugging Face config.json as a card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scantling.cards.read import from_dict
from scantling.cards.schema import Card
from scantling.checkpoint.config_keys import Keys, read_json
from scantling.checkpoint.families import family


def read_config(path: Path) -> tuple[Card, str]:
    """The card of a config file, named after its folder, and its model type.

    Raises:
        ScantlingInputError: the file is not a config of a known family, or asks for something unknown.
    """
    data = read_json(path)
    named = data.get("_name_or_path")
    folder = path.resolve().parent.name if path.name == "config.json" else path.stem
    name = folder or (named if isinstance(named, str) and named else "model")
    return card_of_config(data, name, str(path)), str(data["model_type"])


def card_of_config(data: Mapping[str, Any], name: str, where: str) -> Card:
    """The card that a config describes.

    Raises:
        ScantlingInputError: an unknown family, a key that is unknown to it, or a value out of range.
    """
    kind = family(data.get("model_type"), where)
    keys = Keys(data, where)
    sections = kind.card(keys)
    sections["tied"] = keys.flag("tie_word_embeddings", kind.tied_by_default)
    sections["dtype"] = keys.dtype()
    keys.finish(kind.irrelevant)
    sections = {key: _present(value) for key, value in sections.items()}
    return from_dict({"name": name, "family": "decoder", **sections}, where)


def _present(value: Any) -> Any:
    return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value
