"""The two ends of the model: the token table and the output."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from scantling.cards.schema.mlp import Act
from scantling.cards.schema.norm import LayerNorm, RMSNorm
from scantling.cards.section import Positive, Rows, Section, Width


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
