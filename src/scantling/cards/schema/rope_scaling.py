"""How rotary angles are changed for contexts beyond the trained length."""

from __future__ import annotations

from typing import TypeAlias

from scantling.cards.section import Positive, Section, Size


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
