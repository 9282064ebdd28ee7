"""Which config.json a saved model gets: that of its origin, one written from its card, or our own layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from scantling.cards import Card, read_text, to_yaml
from scantling.checkpoint.families import FAMILIES, own
from scantling.checkpoint.hf_config import card_of_config
from scantling.checkpoint.origin import Origin
from scantling.checkpoint.sentence import pooled, with_pooling
from scantling.errors import ScantlingInputError

Describes = Callable[[Card], bool]
"""Whether a card is that of the model to be saved: equal parts, equal context."""


@dataclass(frozen=True)
class Choice:
    """A config.json.

    Attributes:
        notes: what it says differently than the one that was loaded.
        modules: files of sentence-transformers beside it must say how a text becomes one vector.
    """

    config: dict[str, Any]
    notes: tuple[str, ...] = ()
    modules: bool = False

    @property
    def model_type(self) -> str:
        """The family whose names the tensors get."""
        return str(self.config["model_type"])


def choose(
    card: Card,
    origin: Origin | None,
    describes: Describes,
    dtype: str,
    tokens: Mapping[str, Any],
    in_use: Describes = lambda _: False,
) -> Choice:
    """The config of the origin if it still describes the model; else the first that a family can write; else our own.

    Args:
        in_use: whether a card is that of the model but for its dropout: good enough where no family says all, as only
            training drops and card.yaml says it.
        dtype: of the weights that are saved.
        tokens: bos_token_id, eos_token_id and what else a config says of ids and labels, for one that is written anew.

    Raises:
        ScantlingInputError: the card does not describe the model.
    """
    # It goes beside every config, and what is read back from it must be this model too.
    if not describes(read_text(to_yaml(card), f"card {card.name[:60]!r}")):
        raise ScantlingInputError(f"card {card.name[:60]!r} does not describe the net that is to be saved, but another")
    if origin is not None and origin.config.get("model_type") in FAMILIES:
        found = _read(origin.config, card)
        if found is not None and describes(with_pooling(found, origin.folder)):
            return _kept(origin.config, dtype)
    return _of_a_family(card, origin, describes, dtype, tokens) or _own(card, origin, in_use, dtype, tokens)


def _of_a_family(
    card: Card, origin: Origin | None, describes: Describes, dtype: str, tokens: Mapping[str, Any]
) -> Choice | None:
    """The first config that a family can write and that is read back as this model."""
    for config in _written(card):
        full = {"pad_token_id": None, **config, "tie_word_embeddings": card.tied, "torch_dtype": dtype, **tokens}
        found = _read(full, card)
        if found is not None and describes(found):
            return Choice(full, _departure(origin, str(full["model_type"])))
        if found is not None and _pools(found, card) and describes(pooled(found, card.head)):
            return Choice(full, _departure(origin, str(full["model_type"])), modules=True)
    return None


def _own(card: Card, origin: Origin | None, in_use: Describes, dtype: str, tokens: Mapping[str, Any]) -> Choice:
    """Our own layout, unless a family says all but the dropout."""
    if (found := _of_a_family(card, origin, in_use, dtype, tokens)) is not None:
        return replace(found, notes=(*found.notes, "config.json does not say the dropout; card.yaml does"))
    config = {"model_type": own.MODEL_TYPE, "layout": own.LAYOUT, **tokens}
    return Choice(config, _departure(origin, own.MODEL_TYPE))


def _read(config: Mapping[str, Any], card: Card) -> Card | None:
    """What a config is read as; None where it is refused."""
    try:
        return card_of_config(config, card.name, "config.json")
    except ScantlingInputError:
        return None


def _pools(found: Card, card: Card) -> bool:
    """Whether files of sentence-transformers can say what is missing in a config."""
    return found.family == "encoder" and card.head.kind == "embedding"


def _written(card: Card) -> Iterator[dict[str, Any]]:
    for model_type, kind in FAMILIES.items():
        config = None if kind.config is None else kind.config(card)
        if config is not None:
            yield {"model_type": model_type, **config}


def _departure(origin: Origin | None, model_type: str) -> tuple[str, ...]:
    known = None if origin is None else origin.config.get("model_type")
    if known in (None, model_type):
        return ()
    return (f"the model is no longer what its config said; saved as {model_type}, not {known}",)


def _kept(config: Mapping[str, Any], dtype: str) -> Choice:
    """The config as it was, save for what is not true of the saved folder."""
    new, notes = dict(config), []
    spelled = [key for key in ("torch_dtype", "dtype") if new.get(key) is not None]
    new |= dict.fromkeys(spelled or (["torch_dtype"] if dtype != "float32" else []), dtype)
    ahead = FAMILIES[str(config["model_type"])].extra_layers
    if ahead is not None and new.get(ahead):
        new[ahead] = 0
        notes.append(f"{ahead} is now 0: layers beyond the model's own are not loaded, so they are not saved")
    if _is_local(new.get("auto_map")):
        del new["auto_map"]
        notes.append("auto_map is left out: it names code of the source folder, which is not copied")
    return Choice(new, tuple(notes))


def _is_local(auto_map: Any) -> bool:
    """Whether it names code of the folder itself; with `--` it names another repository's."""
    values: Sequence[Any] = list(auto_map.values()) if isinstance(auto_map, Mapping) else []
    flat = [name for value in values for name in (value if isinstance(value, list) else [value])]
    return any(isinstance(name, str) and "--" not in name for name in flat)
