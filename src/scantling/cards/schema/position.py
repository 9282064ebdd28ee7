"""Position: how order reaches the model."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from scantling.cards.schema.rope_scaling import Scaling
from scantling.cards.section import Positive, Section, Size, Width


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
