"""Folders of sentence-transformers: what lies beside config.json says how a text becomes one vector."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from scantling.cards.schema import Card, Head
from scantling.checkpoint.config_keys import Keys, read_json, read_json_list
from scantling.checkpoint.header import shown
from scantling.errors import ScantlingInputError

LENGTHS = "sentence_bert_config.json"

_POOLS: Mapping[str, Any] = {"cls_token": "first", "mean_tokens": "mean", "lasttoken": "last"}
_MODES = (*_POOLS, "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens")
_WITHOUT_EFFECT = frozenset({"modality_config", "module_output_name", "unpad_inputs"})
_OTHER_KEYS = frozenset({"word_embedding_dimension", "include_prompt"})


@dataclass(frozen=True)
class TextRules:
    """What happens to a text before it becomes a vector.

    Attributes:
        max_length: tokens that are read, special ones included; None for as many as the context holds.
        lower: the text is put in lower case first.
    """

    max_length: int | None = None
    lower: bool = False


def text_rules(folder: Path) -> TextRules:
    """What sentence_bert_config.json says; where there is no such file, nothing.

    Raises:
        ScantlingInputError: a key that is unknown or has a value of another kind.
    """
    path = folder / LENGTHS
    if not path.exists():
        return TextRules()
    keys = Keys(read_json(path), str(path))
    rules = TextRules(keys.optional_size("max_seq_length"), keys.flag("do_lower_case", False))
    keys.only("transformer_task", "feature-extraction")
    keys.finish(_WITHOUT_EFFECT)
    return rules


def with_pooling(card: Card, folder: Path) -> Card:
    """The card with the head that modules.json asks for; the card itself where there is no such file.

    A pooler that the model has anyway stays in it, and nothing reads its result.

    Raises:
        ScantlingInputError: a module or a way of pooling that is not known.
    """
    path = folder / "modules.json"
    if card.family != "encoder" or not path.exists():
        return card
    steps = [_step(entry, path) for entry in read_json_list(path)]
    kinds = [kind for kind, _ in steps]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        right = "Transformer, Pooling and at most Normalize are known, in this order"
        raise ScantlingInputError(f"{path}: the modules are {', '.join(map(shown, kinds))}; {right}")
    pool = _pool(folder / steps[1][1] / "config.json")
    return pooled(card, Head(kind="embedding", pool=pool, normalize=len(kinds) == 3))


def pooled(card: Card, how: Head) -> Card:
    """The card with a head that pools and normalises as `how` does; a pooler of its own is left unread."""
    pooler = card.head.transform if card.head.kind == "embedding" else None
    head = Head(kind="embedding", pool=how.pool, transform=pooler, spare=pooler is not None, normalize=how.normalize)
    return replace(card, head=head, tied=False)


def modules(card: Card, rules: TextRules) -> dict[str, str]:
    """The files, by their paths, that say what `with_pooling` and `text_rules` read; the head's kind is embedding."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if card.head.normalize else [])]
    steps = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    asked = {f"pooling_mode_{mode}": _POOLS.get(mode) == card.head.pool for mode in _MODES}
    pooling = {"word_embedding_dimension": card.d_model, **asked}
    lengths = {"max_seq_length": rules.max_length or card.context, "do_lower_case": rules.lower}
    texts = {"modules.json": steps, "1_Pooling/config.json": pooling, LENGTHS: lengths}
    return {name: json.dumps(text, indent=2) + "\n" for name, text in texts.items()}


def _step(entry: Any, path: Path) -> tuple[str, str]:
    """A module's class and its folder."""
    kind, inner = (entry.get(key) if isinstance(entry, Mapping) else None for key in ("type", "path"))
    if not isinstance(kind, str) or not isinstance(inner, str):
        raise ScantlingInputError(f"{path}: a module is {shown(entry)}; an object with type and path is needed")
    if Path(inner).is_absolute() or ".." in Path(inner).parts:
        raise ScantlingInputError(f"{path}: path is {shown(inner)}; a folder inside this one is needed")
    return kind.rpartition(".")[2], inner


def _pool(path: Path) -> Any:
    keys = Keys(read_json(path), str(path))
    asked = [mode for mode in _MODES if keys.flag(f"pooling_mode_{mode}", False)]
    keys.finish(_OTHER_KEYS)
    if len(asked) != 1 or asked[0] not in _POOLS:
        known = ", ".join(f"pooling_mode_{mode}" for mode in _POOLS)
        found = " and ".join(f"pooling_mode_{mode}" for mode in asked) or "no mode"
        raise ScantlingInputError(f"{path}: {found} is asked for; exactly one of {known} is supported")
    return _POOLS[asked[0]]
