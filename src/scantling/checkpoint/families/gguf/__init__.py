"""GGUF architectures: their metadata as a card and back, their tensor names and ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scantling.cards import Card
from scantling.cards.read import from_dict
from scantling.checkpoint.config_keys import near
from scantling.checkpoint.families.gguf import bert, gemma, gpt2, llama
from scantling.checkpoint.families.gguf.architecture import Architecture, Meta
from scantling.checkpoint.files import shown
from scantling.errors import ScantlingInputError

ARCHITECTURES = {
    "qwen2": llama.QWEN2,
    "llama": llama.LLAMA,
    "qwen3": llama.QWEN3,
    "qwen3moe": llama.QWEN3_MOE,
    "phi3": llama.PHI3,
    "gemma": gemma.GEMMA,
    "gemma2": gemma.GEMMA2,
    "gemma3": gemma.GEMMA3,
    "gpt2": gpt2.GPT2,
    "bert": bert.BERT,
}
"""By ``general.architecture``; Llama, Mistral, Mixtral and SmolLM are all ``llama`` there.

A card is written as the first that can say all of it, so what only a few cards need comes before ``llama`` if ``llama``
could say it too.
"""


def card_of_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Any], where: str) -> Card:
    """The card that GGUF metadata describes.

    Args:
        tensors: by name; whether one is there tells what no key says, and ``rope_freqs.weight`` and its like are read.

    Raises:
        ScantlingInputError: an unknown architecture, or a key that is missing, unknown or out of range.
    """
    kind = architecture(metadata, where)
    _check_whole(metadata, where)
    meta = Meta(metadata, tensors, where)
    sections = kind.read(meta)
    meta.finish()
    name = metadata.get("general.name")
    plain = str(name) if isinstance(name, str) and name else "model"
    return from_dict({"name": plain, "family": "decoder", **sections}, where)


def architecture(metadata: Mapping[str, Any], where: str) -> Architecture:
    """The architecture of a GGUF file.

    Raises:
        ScantlingInputError: unknown; the message names the nearest.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ScantlingInputError(
            f"{where}: general.architecture is {shown(name)}; known: {known}{near(name, ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def _check_whole(metadata: Mapping[str, Any], where: str) -> None:
    """Refuse a file that is no model, or only a part of one."""
    if (kind := metadata.get("general.type", "model")) != "model":
        raise ScantlingInputError(f"{where}: general.type is {shown(kind)}; only a model can be read")
    if (parts := metadata.get("split.count", 1)) != 1:
        raise ScantlingInputError(
            f"{where}: split.count is {shown(parts)}: one file of several; join them with llama-gguf-split --merge"
        )
