"""Which ids of a vocabulary mean something, by the files of a folder, the metadata of a GGUF file, or by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scantling.errors import ScantlingInputError
from scantling.text import folder as files
from scantling.text import gguf_vocab


@dataclass(frozen=True)
class Marks:
    """Which ids mean what; `add_bos` is None where the file leaves it to the post-processor."""

    bos_id: int | None
    eos_ids: tuple[int, ...]
    add_bos: bool | None
    chat_template: str | None
    mask_id: int | None = None
    pad_id: int | None = None


def marks_of_folder(root: Path, library: Any) -> Marks:
    """By the files beside tokenizer.json.

    Raises:
        ScantlingInputError: a file is too large, malformed, or names a token that does not exist.
    """
    sources = {name: files.read_json(root / name) for name in ("tokenizer_config.json", "special_tokens_map.json")}
    config = sources["tokenizer_config.json"]
    generation = files.read_json(root / "generation_config.json")
    bos = files.named_id(library, sources, "bos_token")
    eos = files.named_id(library, sources, "eos_token")
    more_bos = files.listed_ids(generation, "bos_token_id")
    ends = [*([] if eos is None else [eos]), *files.listed_ids(generation, "eos_token_id")]
    marks = Marks(
        bos_id=next(iter(more_bos), None) if bos is None else bos,
        eos_ids=tuple(dict.fromkeys(ends)),
        add_bos=files.optional_flag(config, "add_bos_token"),
        chat_template=files.chat_template(root, config),
        mask_id=files.named_id(library, sources, "mask_token"),
        pad_id=files.named_id(library, sources, "pad_token", required=False),
    )
    if marks.add_bos and marks.bos_id is None:
        raise ScantlingInputError(f"{root}: tokenizer_config.json sets add_bos_token, but no file names the token")
    return marks


def marks_of_gguf(metadata: Mapping[str, object]) -> Marks:
    """By the `tokenizer.*` keys of a GGUF file.

    Raises:
        ScantlingInputError: a key is missing or malformed.
    """
    if metadata.get("tokenizer.ggml.model") == "bert":
        mask, pad = (gguf_vocab.token_id(metadata, name) for name in ("mask", "padding"))
        return Marks(bos_id=None, eos_ids=(), add_bos=None, chat_template=None, mask_id=mask, pad_id=pad)
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ScantlingInputError("GGUF metadata: tokenizer.chat_template is not text")
    ends = [gguf_vocab.token_id(metadata, name) for name in ("eos", "eot", "eom")]
    marks = Marks(
        bos_id=gguf_vocab.token_id(metadata, "bos"),
        eos_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        add_bos=gguf_vocab.adds_bos(metadata),
        chat_template=template,
        pad_id=gguf_vocab.token_id(metadata, "padding"),
    )
    if marks.add_bos and marks.bos_id is None:
        raise ScantlingInputError("GGUF metadata: BOS is to be added, but tokenizer.ggml.bos_token_id is missing")
    return marks


def marks_of_names(library: Any, names: Mapping[str, str], chat_template: str | None) -> Marks:
    """By tokens as the vocabulary spells them.

    Args:
        names: the tokens that mean something, by role: bos, eos, mask, pad.

    Raises:
        ScantlingInputError: the vocabulary does not have such a token.
    """
    found = {role: library.token_to_id(token) for role, token in names.items()}
    for role, token in names.items():
        if found[role] is None:
            raise ScantlingInputError(f"the vocabulary has no token {token!r}, which is to be its {role}")
    ends = (found["eos"],) if "eos" in found else ()
    return Marks(found.get("bos"), ends, None, chat_template, mask_id=found.get("mask"), pad_id=found.get("pad"))
