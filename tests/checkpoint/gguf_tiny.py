"""Tiny recorded models, and a vocabulary for them, as the GGUF tests need them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from msgspec.structs import replace as changed
from safetensors.torch import load_file
from tests.conftest import GOLDEN

import scantling as sc
from scantling.cards.schema import Layer, MultiHead
from scantling.text.tokenizer import Tokenizer

ARCHITECTURE = {
    "llama-gqa": "llama",
    "llama-mha-tied-bias": "llama",
    "llama-rope-llama3": "llama",
    "llama-rope-linear": "llama",
    "llama-rope-yarn": "llama",
    "mistral-full": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "phi3": "llama",
    "phi3-longrope-long": "llama",
    "phi3-partial-swa-tied": "phi3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3-text": "gemma3",
    "gpt2": "gpt2",
}
"""Recorded model: the architecture that it is written as. A phi3 without a window is a llama in all but its name."""


def tiny(name: str) -> sc.Model:
    return sc.load(GOLDEN / "tiny" / name)


def recorded(name: str) -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "tiny" / name / "io.safetensors")


def with_card(lm: sc.Model, **changes: Any) -> sc.Model:
    """The same weights under a changed card."""
    card = changed(lm.card, **changes)
    parts = sc.assemble(card)
    net = parts.build()
    net.load_state_dict(lm.net.state_dict())
    return replace(lm, card=card, parts=parts, net=net.eval().requires_grad_(False))


def with_attention(lm: sc.Model, **changes: Any) -> sc.Model:
    """The same in every layer's attention."""

    def attend(spec: Any) -> Any:
        return changed(spec, **changes) if isinstance(spec, MultiHead) else spec

    pattern = [changed(layer, attention=attend(layer.attention)) for layer in lm.card.pattern]
    assert all(isinstance(layer, Layer) for layer in pattern)
    return with_card(lm, attention=attend(lm.card.attention), pattern=pattern)


def metadata_of_131_tokens() -> dict[str, Any]:
    """Whole ASCII characters and pairs of them: llama.cpp shows no probabilities for half a character."""
    pairs = [a + b for a in "abcdefg" for b in "abcdefg"][:35]
    tokens = ["<s>", "</s>", *map(chr, range(33, 127)), *pairs]
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3, 3, *[1] * 129],
        "merges": [" ".join(pair) for pair in pairs],
        "bos_token_id": 0,
        "eos_token_id": 1,
        "add_bos_token": False,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def vocabulary() -> Tokenizer:
    return Tokenizer.from_gguf(metadata_of_131_tokens())
