"""Attention: which tokens a token reads, and through what heads."""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import field

from scantling.cards.section import Positive, Section, Size, Width

Projection: TypeAlias = Literal["q", "k", "v", "o"]


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
