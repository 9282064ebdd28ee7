"""The card itself, and the sections that say where layers differ, and what is no part of the model."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, field

from scantling.cards.schema.attention import Latent, MultiHead
from scantling.cards.schema.ends import Embedding, Head
from scantling.cards.schema.mlp import Gated, MoE, Plain
from scantling.cards.schema.norm import LayerNorm, Residual, RMSNorm
from scantling.cards.schema.position import ALiBi, Learned, NoPosition, Relative, RoPE, Sinusoidal
from scantling.cards.section import Chance, Layers, Rows, Section, Size, Width
from scantling.cards.training import Training

Dtype: TypeAlias = Literal["float32", "float16", "bfloat16", "unknown"]
Unknown: TypeAlias = Literal["unknown"]


class Side(Section):
    """What differs in one of the two stacks; sections as in the card, their keys laid over the card's own.

    Both stacks follow the pattern, whose sections come before those of a side.

    Attributes:
        n_layers: blocks of this stack.
        cross: attention from the decoder to the encoder; default the decoder's own heads, widths, biases, scale and
            softcap.
    """

    n_layers: Layers | None = None
    attention: MultiHead | None = None
    mlp: Plain | Gated | MoE | None = None
    cross: MultiHead | None = None


class Layer(Section):
    """What differs in some layers; sections as in the card, their keys laid over the card's own.

    Attributes:
        times: consecutive layers of this kind.
    """

    times: Layers = 1
    attention: MultiHead | Latent | None = None
    position: NoPosition | RoPE | None = None
    mlp: Plain | Gated | MoE | None = None


class Dropout(Section):
    """Probabilities in training; evaluation never drops.

    Attributes:
        embedding: on the sum of token and position vectors.
        attention: on attention weights.
        residual: on each sublayer's update.
    """

    embedding: Chance = 0.0
    attention: Chance = 0.0
    residual: Chance = 0.0


class Source(Section):
    """Where a card's figures come from.

    Attributes:
        config: the published file or paper.
        note: what the source leaves open.
    """

    config: str
    note: str | None = None


class Published(Section):
    """Figures others have published for the model, to compare with ours.

    Attributes:
        params: number of parameters.
        where: who says so.
    """

    params: Annotated[int, Meta(ge=1, le=10**15)]
    where: str


class Inference(Section):
    """How a checkpoint is stored and run; no part of the model depends on it. What nobody said is ``unknown``.

    Attributes:
        quantisation: kinds of the stored blocks, or none.
        cache: the dtype or form of keys and values.
        batch: rows.
        prompt_tokens, new_tokens: lengths.
    """

    quantisation: str | None = None
    cache: str | None = None
    batch: Size | Unknown | None = None
    prompt_tokens: Size | Unknown | None = None
    new_tokens: Size | Unknown | None = None


class Card(Section):
    """One Transformer.

    Attributes:
        family: which stacks exist.
        n_layers: blocks L of each stack; 0 is a model without any exchange between tokens.
        d_model: width d of the residual stream.
        vocab_size: tokens V that exist.
        context: longest sequence T_max.
        tied: the head's matrix is the embedding table.
        pattern: layers that differ, repeated until there are n_layers; default all alike.
        encoder, decoder: of an encoder-decoder, where the two stacks differ.
        dtype: in which the weights are stored.
        training: how `train` trains it, unless the command line says otherwise; unknown where the card was made from a
            checkpoint, which does not tell. The model is the same without it.
    """

    name: str
    family: Literal["decoder", "encoder", "encoder-decoder"]
    n_layers: Layers
    d_model: Width
    vocab_size: Rows
    context: Size
    attention: MultiHead | Latent
    position: NoPosition | Sinusoidal | Learned | RoPE | ALiBi | Relative
    norm: RMSNorm | LayerNorm
    mlp: Plain | Gated | MoE
    tied: bool
    residual: Residual = Residual()
    pattern: list[Layer] = field(default_factory=list)
    encoder: Side | None = None
    decoder: Side | None = None
    embedding: Embedding = Embedding()
    head: Head = Head()
    dropout: Dropout = Dropout()
    dtype: Dtype = "unknown"
    training: Training | Unknown | None = None
    inference: Inference | None = None
    source: Source | None = None
    published: Published | None = None
