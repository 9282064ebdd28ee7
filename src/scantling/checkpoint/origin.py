"""What a loaded checkpoint said of itself, so that saving can say it again, and the files that go along with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

CARRIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tekken.json",
    "*.spm",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
    "LICENSE*",
    "NOTICE*",
)
"""Files that belong to a model and that no weight changes: text to ids and back, chats, pooling, terms of use."""

WRITTEN = ("config.json", "card.yaml", "model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json")
"""Files that saving writes itself."""


@dataclass(frozen=True)
class Origin:
    """A checkpoint folder that a model was read from.

    Attributes:
        config: what its config.json says.
    """

    config: Mapping[str, Any]
    folder: Path


def carried(folder: Path) -> list[str]:
    """The files of a folder that go along, by their paths from it."""
    found = (path for pattern in CARRIED for path in folder.glob(pattern) if path.is_file())
    return sorted({path.relative_to(folder).as_posix() for path in found})


def is_ours(name: str) -> bool:
    """Whether a file of that path is written or carried along by saving."""
    return any(name.count("/") == p.count("/") and fnmatchcase(name, p) for p in (*WRITTEN, *CARRIED))
