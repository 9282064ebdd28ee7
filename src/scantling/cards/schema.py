"""What a card may say. Every key has a stated default or is required; unknown keys are errors.

Optional sizes are filled in by `cards.rules.complete`, so a card that was read has no blanks.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, field

from scantling.cards.section import Chance, Layers, Positive, Rows, Size, Width
from scantling.cards.section import Section as Section
from scantling.cards.training import Training

Act: TypeAlias = Literal["relu", "gelu", "gelu_tanh", "quick_gelu", "relu2", "silu", "tanh"]
Projection: TypeAlias = Literal["q", "k", "v", "o"]
Place: TypeAlias = Literal["in", "res", "out"]
Dtype: TypeAlias = Literal["float32", "float16", "bfloat16", "unknown"]
Unknown: TypeAlias = Literal["unknown"]


class QKNorm(Section):
    """A norm on queries and keys before positions are applied.

    Attributes:
        kind: layernorm has a shift only if `bias` says so.
        over: head (one gain for all heads, over d_head), each_head (a gain per head), width (over all heads together).
        plus_one: the gain is 1 + weight.
        rounded: as for the blocks' RMSNorm.
    """

    kind: Literal["rmsnorm", "layernorm"]
    eps: Positive
    over: Literal["head", "each_head", "width"] = "head"
    bias: bool = False
    plus_one: bool = False
    rounded: bool | None = None


class Stride(Section):
    """What is read far away (Sparse Transformer, arXiv:1904.10509, section 4.3), beside the window or the chunk.

    Attributes:
        every: positions whose distance is a multiple of this are read.
        last: read are instead the last so many positions of each block of `every` (the paper's fixed pattern).
    """

    every: Size
    last: Size | None = None


class MultiHead(Section, tag_field="kind", tag="multi_head"):
    """Multi-head, multi-query and grouped-query attention.

    Attributes:
        n_heads: query heads H.
        n_kv_heads: key/value heads H_kv; default n_heads. Must divide n_heads.
        d_head: width of a head; default d_model / n_heads, which must then be whole.
        window: positions a query reads, its own included; default no limit.
        chunk: positions stand in chunks of this many, and a query reads its own chunk only (Llama 4); default not.
        stride: what is read beyond window or chunk; where neither is given, what is read besides the own position;
            default nothing.
        prefix: the first positions of a row, as many as each run says, read each other both ways (prefix LM).
            Chunks, blocks and prefixes are counted from a row's first real token.
        bias: which projections have one: a list of q, k, v, o; default none.
        scale: factor on the scores; default d_head^-0.5.
        scale_by_layer: the factor is divided by the layer's number, from 1 (GPT-2's scale_attn_by_inverse_layer_idx).
        qk_norm: default none.
        softcap: c in c * tanh(scores / c); default none.
        sinks: a learned score per head that takes weight and gives no value.
        clip: q, k and v are clamped to [-clip, clip]; default not.
    """

    n_heads: Width
    n_kv_heads: Width | None = None
    d_head: Width | None = None
    window: Size | None = None
    chunk: Size | None = None
    stride: Stride | None = None
    prefix: bool = False
    bias: list[Projection] = field(default_factory=list)
    scale: Positive | None = None
    scale_by_layer: bool = False
    qk_norm: QKNorm | None = None
    softcap: Positive | None = None
    sinks: bool = False
    clip: Positive | None = None


REFUSED_KINDS = {
    "hashed": "hashed attention (Reformer, arXiv:2001.04451) finds the tokens that it compares by hashing them at run "
    "time, so its pairs cannot be counted beforehand"
}
"""Kinds of sections that exist elsewhere, and why they are none here."""


class Latent(Section, tag_field="kind", tag="latent"):
    """Multi-head latent attention (DeepSeek V2, arXiv:2405.04434, section 2.1).

    Attributes:
        kv_rank: width of the latent that keys and values are made from, and that the cache keeps.
        q_rank: width of the latent that queries are made from; default none, queries come from the stream.
        d_nope: channels of a head's query and key without position.
        d_rope: channels with RoPE; the key's are shared by all heads.
        d_value: channels of a head's value.
        eps: of the RMSNorms on the latents.
        scale: factor on the scores; default (d_nope + d_rope)^-0.5, with YaRN's mscale_all_dim times the square of the
            mscale that it gives.
    """

    n_heads: Width
    kv_rank: Width
    d_nope: Width
    d_rope: Width
    d_value: Width
    eps: Positive
    q_rank: Width | None = None
    scale: Positive | None = None


class NoPosition(Section, tag_field="kind", tag="none"):
    """No position; order shows only through the causal mask."""


class Sinusoidal(Section, tag_field="kind", tag="sinusoidal"):
    """Fixed waves added to the embeddings.

    Attributes:
        theta: base of the wavelengths.
        halves: all sines, then all cosines, instead of each pair side by side (Marian).
        table: the waves are kept as a table of `context` rows, which is counted and never trained (Marian).
    """

    theta: Positive = 10000.0
    halves: bool = False
    table: bool = False


class Learned(Section, tag_field="kind", tag="learned"):
    """A trained vector per position, added to the embeddings; the table has `context` rows.

    Attributes:
        offset: rows that stand before position 0 in addition (OPT and BART 2, RoBERTa its padding id + 1).
        from_mask: where no positions are given, real tokens are counted and padding is not (OPT); without it every
            column counts.
        pad_id: where no positions are given, tokens other than this one are counted, and it stands one row below
            position 0 (RoBERTa); of encoders only.
    """

    offset: Annotated[int, Meta(ge=0, le=1024)] = 0
    from_mask: bool = False
    pad_id: Annotated[int, Meta(ge=0, le=2**24)] | None = None


class Relative(Section, tag_field="kind", tag="relative"):
    """A learned shift of the scores for each bucket of distances and each head, shared by all layers of a stack (T5,
    arXiv:1910.10683, section 2.1).

    Attributes:
        buckets: of distances; half of them are for keys after the query where a layer reads both ways. The small
            distances have a bucket each, the larger ones share buckets that grow with the logarithm.
        max_distance: from here on all distances share the last bucket.
    """

    buckets: Annotated[int, Meta(ge=4, le=4096)] = 32
    max_distance: Size = 128


class ALiBi(Section, tag_field="kind", tag="alibi"):
    """A penalty on the scores that grows with the distance, a slope per head (Press et al., arXiv:2108.12409).

    Attributes:
        max_bias: the slopes are 2^(-max_bias i / H).
        scaled: the penalty is multiplied by the attention scale, as Falcon does.
        rounded: slopes and penalties are rounded to bfloat16, as Falcon does.
    """

    max_bias: Positive = 8.0
    scaled: bool = False
    rounded: bool = False


class LinearScaling(Section, tag_field="kind", tag="linear"):
    """Positions divided by `factor` (Chen et al., arXiv:2306.15595)."""

    factor: Positive


class DynamicScaling(Section, tag_field="kind", tag="dynamic"):
    """The base grows with the length once it exceeds `trained_length` (dynamic NTK)."""

    factor: Positive
    trained_length: Size


class YarnScaling(Section, tag_field="kind", tag="yarn"):
    """Slow channels interpolated, fast ones kept, a ramp between (Peng et al., arXiv:2309.00071).

    Attributes:
        beta_fast, beta_slow: turns over the trained length at the two ends of the ramp.
        attention_factor: on cosines and sines; default from factor, or from mscale and mscale_all_dim.
        truncate: the ends of the ramp are rounded outward to whole channels.
    """

    factor: Positive
    trained_length: Size
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    attention_factor: Positive | None = None
    mscale: Positive | None = None
    mscale_all_dim: Positive | None = None
    truncate: bool = True


class Llama3Scaling(Section, tag_field="kind", tag="llama3"):
    """Wavelengths longer than trained_length / low_freq_factor divided by `factor`, a blend up to high_freq_factor."""

    factor: Positive
    trained_length: Size
    low_freq_factor: Positive
    high_freq_factor: Positive


class LongRopeScaling(Section, tag_field="kind", tag="longrope"):
    """A divisor per channel, one list up to `trained_length` and one beyond (Ding et al., arXiv:2402.13753).

    Attributes:
        attention_factor: on cosines and sines; default sqrt(1 + ln(context / trained_length) / ln(trained_length)).
    """

    trained_length: Size
    short_factor: list[Positive]
    long_factor: list[Positive]
    attention_factor: Positive | None = None


Scaling: TypeAlias = LinearScaling | DynamicScaling | YarnScaling | Llama3Scaling | LongRopeScaling


class RoPE(Section, tag_field="kind", tag="rope"):
    """Rotary positions.

    Attributes:
        theta: base of the angles.
        d_rotary: channels turned in each head, even; default d_head.
        interleaved: pairs are neighbours instead of halves.
        scaling: how the angles are changed for contexts beyond the trained length; default not.
    """

    theta: Positive
    d_rotary: Width | None = None
    interleaved: bool = False
    scaling: Scaling | None = None


class RMSNorm(Section, tag_field="kind", tag="rmsnorm"):
    """Root-mean-square norm.

    Attributes:
        eps: added to the mean square; always explicit.
        at: where a sublayer is normalised: in (pre-norm), out (post-norm), res (before the addition).
        plus_one: the gain is 1 + weight (Gemma).
        rounded: the normed vector is rounded to its dtype before the gain multiplies it (Llama), not after (OLMo 2),
            which shows in 16 bits; default yes unless `plus_one`.
        final: the stack ends in a norm; default yes unless `at` has out.
        skip_first: the first sublayer of a stack reads the stream as it is (ModernBERT).
    """

    eps: Positive
    at: list[Place] = field(default_factory=lambda: ["in"])
    plus_one: bool = False
    rounded: bool | None = None
    final: bool | None = None
    skip_first: bool = False


class LayerNorm(Section, tag_field="kind", tag="layernorm"):
    """Layer norm.

    Attributes:
        eps: added to the variance; always explicit.
        at: where a sublayer is normalised: in (pre-norm), out (post-norm), res (before the addition).
        bias: with a shift.
        final: the stack ends in a norm; default yes unless `at` has out.
        skip_first: the first sublayer of a stack reads the stream as it is (ModernBERT).
    """

    eps: Positive
    at: list[Place] = field(default_factory=lambda: ["in"])
    bias: bool = True
    final: bool | None = None
    skip_first: bool = False


class Residual(Section):
    """How sublayers hang on the residual stream.

    Attributes:
        parallel: attention and MLP read the same stream and are added together (GPT-J, NeoX, Falcon, Phi).
        shared_norm: in parallel, one norm serves both.
        from_norm: what is added to is the normed stream (BLOOM's apply_residual_connection_post_layernorm).
    """

    parallel: bool = False
    shared_norm: bool = False
    from_norm: bool = False


class Plain(Section, tag_field="kind", tag="plain"):
    """down(act(up(x))).

    Attributes:
        d_ff: width of the hidden layer; default 4 d_model.
        bias: both matrices have a shift.
    """

    act: Act
    d_ff: Width | None = None
    bias: bool = False


class Clamp(Section):
    """gpt-oss's gate: gate at most `limit`, up within it, (up + 1) * gate * sigmoid(alpha * gate)."""

    limit: Positive
    alpha: Positive


class Gated(Section, tag_field="kind", tag="gated"):
    """down(act(gate(x)) * up(x)).

    Attributes:
        d_ff: width of one matrix; default 8 d_model / 3 rounded up to a multiple of 256.
        bias: the three matrices have a shift.
        clamp: default none; with it `act` must be silu.
    """

    act: Act
    d_ff: Width | None = None
    bias: bool = False
    clamp: Clamp | None = None


class MoE(Section, tag_field="kind", tag="moe"):
    """A router and many MLPs.

    Attributes:
        n_experts: MLPs per layer.
        top_k: experts that each token uses.
        normalize: the weights of the chosen experts are divided by their sum.
        expert: what each expert is.
        scores: softmax over all experts, sigmoid of each, or softmax over the chosen ones only (top_softmax).
        bias: the router's matrix has a shift.
        selection_bias: a learned shift that decides who is chosen and not with what weight (DeepSeek V3).
        scale: factor on the weights of the chosen.
        groups: experts in this many groups, of which only `top_groups` are looked at; default one.
        group_score: a group counts by its best expert (max) or by its two best (top2).
        shared: an MLP that every token uses besides; default none.
        shared_gate: a learned number from 0 to 1 per token on what the shared MLP gives (Qwen 1.5 MoE).
    """

    n_experts: Width
    top_k: Width
    expert: Plain | Gated
    normalize: bool = True
    scores: Literal["softmax", "sigmoid", "top_softmax"] = "softmax"
    bias: bool = False
    selection_bias: bool = False
    scale: Positive = 1.0
    groups: Width = 1
    top_groups: Width = 1
    group_score: Literal["max", "top2"] = "max"
    shared: Plain | Gated | None = None
    shared_gate: bool = False


class Embedding(Section):
    """The token table.

    Attributes:
        scale: factor on the vectors; default none.
        scale_rounded: the factor is rounded to the vectors' dtype first (Gemma), which shows in bfloat16.
        vocab_multiple: the table's rows are vocab_size rounded up to a multiple of this.
        width: of the table, where it is not d_model: a projection widens it (and narrows it again for a tied head).
        widen: before positions and norm are added, or after (ELECTRA), when both are as narrow as the table.
        widen_bias: the projection has a shift.
        norm: on the sum of token and position vectors; kind and eps as for the blocks; default none.
        types: kinds of tokens that have a vector each, added to the token's (BERT's segments); default none.
        shared: an encoder-decoder has one table for source and target.
    """

    scale: Positive | None = None
    scale_rounded: bool = False
    vocab_multiple: Rows = 1
    width: Width | None = None
    widen: Literal["before", "after"] = "before"
    widen_bias: bool = False
    norm: RMSNorm | LayerNorm | None = None
    types: Annotated[int, Meta(ge=1, le=4096)] | None = None
    shared: bool = True


class Transform(Section):
    """A matrix, an activation and (if `norm`) a norm of the card's kind, before the output.

    Attributes:
        bias: the matrix has a shift.
    """

    act: Act
    norm: bool = False
    bias: bool = True


class Head(Section):
    """The output.

    Attributes:
        kind: lm scores the vocabulary at every position; tokens gives each token one of `n_labels`; sequence gives the
            text one; replaced says of each token whether it was replaced (ELECTRA); embedding gives the text's vector;
            none gives the stream.
        bias: a shift per score.
        bias_fixed: that shift is stored with the weights and never trained (BART, Marian).
        scale: factor on the stream before the matrix; default none.
        softcap: c in c * tanh(logits / c); default none.
        transform: before the matrix; its result is as wide as what the matrix reads. Default none.
        spare: the transform is kept and its result is not read (all-MiniLM has BERT's pooler and takes the mean).
        pool: what stands for the text: the first token, the mean of all real tokens, or the last real token.
        normalize: the text's vector is divided by its length.
        n_labels: of the kinds tokens and sequence.
        scores: labels exclude each other (softmax) or not (sigmoid).
    """

    kind: Literal["lm", "tokens", "sequence", "replaced", "embedding", "none"] = "lm"
    bias: bool = False
    bias_fixed: bool = False
    scale: Positive | None = None
    softcap: Positive | None = None
    transform: Transform | None = None
    spare: bool = False
    pool: Literal["first", "mean", "last"] | None = None
    normalize: bool = False
    n_labels: Width | None = None
    scores: Literal["softmax", "sigmoid"] = "softmax"


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
