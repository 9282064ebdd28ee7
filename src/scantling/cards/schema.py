"""What a card may say. Every key has a stated default or is required; unknown keys are errors.

Optional sizes are filled in by `cards.rules.complete`, so a card that was read has no blanks.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct, field

Size: TypeAlias = Annotated[int, Meta(ge=1, le=2**32)]
Width: TypeAlias = Annotated[int, Meta(ge=1, le=2**20)]
Layers: TypeAlias = Annotated[int, Meta(ge=0, le=1024)]
Rows: TypeAlias = Annotated[int, Meta(ge=1, le=2**24)]
Positive: TypeAlias = Annotated[float, Meta(gt=0, le=1e12)]
Chance: TypeAlias = Annotated[float, Meta(ge=0, lt=1)]
Act: TypeAlias = Literal["relu", "gelu", "gelu_tanh", "quick_gelu", "relu2", "silu"]
Projection: TypeAlias = Literal["q", "k", "v", "o"]
Place: TypeAlias = Literal["in", "res", "out"]
Dtype: TypeAlias = Literal["float32", "float16", "bfloat16"]


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mapping of the card."""


class MultiHead(Section, tag_field="kind", tag="multi_head"):
    """Multi-head, multi-query and grouped-query attention.

    Attributes:
        n_heads: query heads H.
        n_kv_heads: key/value heads H_kv; default n_heads. Must divide n_heads.
        d_head: width of a head; default d_model / n_heads, which must then be whole.
        window: positions a query reads, its own included; default no limit.
        bias: which projections have one: a list of q, k, v, o; default none.
        scale: factor on the scores; default d_head^-0.5.
        scale_by_layer: the factor is divided by the layer's number, from 1 (GPT-2's scale_attn_by_inverse_layer_idx).
    """

    n_heads: Width
    n_kv_heads: Width | None = None
    d_head: Width | None = None
    window: Size | None = None
    bias: list[Projection] = []
    scale: Positive | None = None
    scale_by_layer: bool = False


class NoPosition(Section, tag_field="kind", tag="none"):
    """No position; order shows only through the causal mask."""


class Sinusoidal(Section, tag_field="kind", tag="sinusoidal"):
    """Fixed waves added to the embeddings.

    Attributes:
        theta: base of the wavelengths.
    """

    theta: Positive = 10000.0


class Learned(Section, tag_field="kind", tag="learned"):
    """A trained vector per position, added to the embeddings; the table has `context` rows."""


class RoPE(Section, tag_field="kind", tag="rope"):
    """Rotary positions.

    Attributes:
        theta: base of the angles.
        d_rotary: channels turned in each head, even; default d_head.
        interleaved: pairs are neighbours instead of halves.
    """

    theta: Positive
    d_rotary: Width | None = None
    interleaved: bool = False


class RMSNorm(Section, tag_field="kind", tag="rmsnorm"):
    """Root-mean-square norm.

    Attributes:
        eps: added to the mean square; always explicit.
        at: where a sublayer is normalised: in (pre-norm), out (post-norm), res (before the addition).
    """

    eps: Positive
    at: list[Place] = field(default_factory=lambda: ["in"])


class LayerNorm(Section, tag_field="kind", tag="layernorm"):
    """Layer norm.

    Attributes:
        eps: added to the variance; always explicit.
        at: where a sublayer is normalised: in (pre-norm), out (post-norm), res (before the addition).
        bias: with a shift.
    """

    eps: Positive
    at: list[Place] = field(default_factory=lambda: ["in"])
    bias: bool = True


class Plain(Section, tag_field="kind", tag="plain"):
    """down(act(up(x))).

    Attributes:
        d_ff: width of the hidden layer; default 4 d_model.
        bias: both matrices have a shift.
    """

    act: Act
    d_ff: Width | None = None
    bias: bool = False


class Gated(Section, tag_field="kind", tag="gated"):
    """down(act(gate(x)) * up(x)).

    Attributes:
        d_ff: width of one matrix; default 8 d_model / 3 rounded up to a multiple of 256.
        bias: the three matrices have a shift.
    """

    act: Act
    d_ff: Width | None = None
    bias: bool = False


class MoE(Section, tag_field="kind", tag="moe"):
    """A router and many MLPs.

    Attributes:
        n_experts: MLPs per layer.
        top_k: experts that each token uses.
        normalize: the weights of the chosen experts are divided by their sum.
        expert: what each expert is.
    """

    n_experts: Width
    top_k: Width
    expert: Plain | Gated
    normalize: bool = True


class Embedding(Section):
    """The token table.

    Attributes:
        scale: factor on the vectors; default none.
        vocab_multiple: the table's rows are vocab_size rounded up to a multiple of this.
    """

    scale: Positive | None = None
    vocab_multiple: Rows = 1


class Head(Section):
    """The output.

    Attributes:
        softcap: c in c * tanh(logits / c); default none.
    """

    softcap: Positive | None = None


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


class Card(Section):
    """One Transformer.

    Attributes:
        family: which stacks exist.
        n_layers: blocks L; 0 is a model without any exchange between tokens.
        d_model: width d of the residual stream.
        vocab_size: tokens V that exist.
        context: longest sequence T_max.
        tied: the head's matrix is the embedding table.
        dtype: in which the weights are stored.
    """

    name: str
    family: Literal["decoder"]
    n_layers: Layers
    d_model: Width
    vocab_size: Rows
    context: Size
    attention: MultiHead
    position: NoPosition | Sinusoidal | Learned | RoPE
    norm: RMSNorm | LayerNorm
    mlp: Plain | Gated | MoE
    tied: bool
    embedding: Embedding = Embedding()
    head: Head = Head()
    dropout: Dropout = Dropout()
    dtype: Dtype = "bfloat16"
    source: Source | None = None
    published: Published | None = None
