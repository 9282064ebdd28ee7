"""Checkpoint families: for each, how its config maps to a card and its tensor names to ours."""

from __future__ import annotations

from scantling.checkpoint.config_keys import near
from scantling.checkpoint.families import gpt2, llama
from scantling.checkpoint.family import Family
from scantling.checkpoint.header import shown
from scantling.errors import ScantlingInputError

FAMILIES: dict[str, Family] = {
    "gpt2": gpt2.FAMILY,
    "llama": llama.LLAMA,
    "mistral": llama.MISTRAL,
    "mixtral": llama.MIXTRAL,
}
"""By the `model_type` of a Hugging Face config."""


def family(model_type: object, where: str) -> Family:
    """The family of that model type.

    Raises:
        ScantlingInputError: unknown; the message names the nearest.
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ScantlingInputError(
            f"{where}: model_type is {shown(model_type)}; known: {known}{near(model_type, FAMILIES)}"
        )
    return FAMILIES[model_type]
