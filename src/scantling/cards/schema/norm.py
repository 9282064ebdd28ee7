"""Norms, and how sublayers hang on the residual stream."""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import field

from scantling.cards.section import Positive, Section

Place: TypeAlias = Literal["in", "res", "out"]


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
