"""What a card may say. Every key has a stated default or is required; unknown keys are errors.

Optional sizes are filled in by `cards.rules.complete`, so a card that was read has no blanks.
"""

from __future__ import annotations

from scantling.cards.schema.attention import REFUSED_KINDS, Latent, MultiHead, Projection, QKNorm, Stride
from scantling.cards.schema.card import Card, Dropout, Dtype, Inference, Layer, Published, Side, Source, Unknown
from scantling.cards.schema.ends import Embedding, Head, Transform
from scantling.cards.schema.mlp import Act, Clamp, Gated, MoE, Plain
from scantling.cards.schema.norm import LayerNorm, Place, Residual, RMSNorm
from scantling.cards.schema.position import ALiBi, Learned, NoPosition, Relative, RoPE, Sinusoidal
from scantling.cards.schema.rope_scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Scaling,
    YarnScaling,
)
from scantling.cards.section import Section
from scantling.cards.training import Training

__all__ = [
    "REFUSED_KINDS",
    "ALiBi",
    "Act",
    "Card",
    "Clamp",
    "Dropout",
    "Dtype",
    "DynamicScaling",
    "Embedding",
    "Gated",
    "Head",
    "Inference",
    "Latent",
    "Layer",
    "LayerNorm",
    "Learned",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "MoE",
    "MultiHead",
    "NoPosition",
    "Place",
    "Plain",
    "Projection",
    "Published",
    "QKNorm",
    "RMSNorm",
    "Relative",
    "Residual",
    "RoPE",
    "Scaling",
    "Section",
    "Side",
    "Sinusoidal",
    "Source",
    "Stride",
    "Training",
    "Transform",
    "Unknown",
    "YarnScaling",
]
