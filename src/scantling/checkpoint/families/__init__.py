"""Checkpoint families: for each, how its config maps to a card and its tensor names to ours."""

from __future__ import annotations

from scantling.cards.schema import REFUSED_KINDS
from scantling.checkpoint.config_keys import near
from scantling.checkpoint.families import (
    bart,
    bert,
    bloom,
    deepseek,
    distilbert,
    electra,
    falcon,
    gemma,
    glm,
    gpt2,
    gpt_oss,
    gptj,
    llama,
    modernbert,
    mpt,
    neox,
    olmo,
    openai_gpt,
    opt,
    own,
    phi,
    phi3,
    qwen,
    roberta,
    smollm3,
    stablelm,
    t5,
)
from scantling.checkpoint.family import Family
from scantling.checkpoint.header import shown
from scantling.errors import ScantlingInputError

FAMILIES: dict[str, Family] = {
    "gpt2": gpt2.FAMILY,
    "llama": llama.LLAMA,
    "mistral": llama.MISTRAL,
    "mixtral": llama.MIXTRAL,
    "qwen2": qwen.QWEN2,
    "qwen2_moe": qwen.QWEN2_MOE,
    "qwen3": qwen.QWEN3,
    "qwen3_moe": qwen.QWEN3_MOE,
    "smollm3": smollm3.FAMILY,
    "phi3": phi3.FAMILY,
    "glm": glm.FAMILY,
    "olmo2": olmo.OLMO2,
    "gemma": gemma.GEMMA,
    "gemma2": gemma.GEMMA2,
    "gemma3_text": gemma.GEMMA3_TEXT,
    "gpt_oss": gpt_oss.FAMILY,
    "stablelm": stablelm.FAMILY,
    "phi": phi.FAMILY,
    "gpt_neox": neox.FAMILY,
    "gptj": gptj.FAMILY,
    "deepseek_v2": deepseek.V2,
    "deepseek_v3": deepseek.V3,
    "falcon": falcon.FAMILY,
    "bloom": bloom.FAMILY,
    "mpt": mpt.FAMILY,
    "opt": opt.FAMILY,
    "openai-gpt": openai_gpt.FAMILY,
    "bert": bert.FAMILY,
    "roberta": roberta.FAMILY,
    "distilbert": distilbert.FAMILY,
    "electra": electra.FAMILY,
    "modernbert": modernbert.FAMILY,
    "t5": t5.FAMILY,
    "bart": bart.BART,
    "marian": bart.MARIAN,
}
"""By the `model_type` of a Hugging Face config."""


REFUSED = {"reformer": REFUSED_KINDS["hashed"]}
"""Model types that are known and cannot be cards, and why."""


def family(model_type: object, where: str) -> Family:
    """The family of that model type.

    Raises:
        ScantlingInputError: unknown; the message names the nearest.
    """
    if model_type == own.MODEL_TYPE:
        return own.FAMILY
    if isinstance(model_type, str) and model_type in REFUSED:
        raise ScantlingInputError(
            f"{where}: model_type is {shown(model_type)}, which cannot be read: {REFUSED[model_type]}"
        )
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ScantlingInputError(
            f"{where}: model_type is {shown(model_type)}; known: {known}{near(model_type, FAMILIES)}"
        )
    return FAMILIES[model_type]
