"""Rotary positions and the ways to stretch them. All frequencies are plain numbers, in radians per position."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from scantling.parts.part import Workload
from scantling.parts.position import Position, inverse_frequencies
from scantling.parts.saved import Value

Frequencies = tuple[float, ...]


class Scaling:
    """A change of RoPE's frequencies for contexts beyond the trained length."""

    def frequencies(self, theta: float, width: int, length: int) -> Frequencies:
        """The frequencies of a sequence of `length` positions; `width` channels are turned."""
        raise NotImplementedError(type(self).__name__)

    @property
    def factor_on_turns(self) -> float:
        """Factor on cosines and sines."""
        return 1.0

    @property
    def renewed_past(self) -> int | None:
        """See `Position.renewed_past`."""
        return None


@dataclass(frozen=True)
class Linear(Scaling):
    """Every frequency divided by the factor (Chen et al., arXiv:2306.15595, eq. 4)."""

    factor: float

    def frequencies(self, theta: float, width: int, length: int) -> Frequencies:
        return tuple(f / self.factor for f in inverse_frequencies(theta, width))


@dataclass(frozen=True)
class Dynamic(Scaling):
    """Base theta * (factor * length / trained - (factor - 1))^(width / (width - 2)) once length > trained."""

    factor: float
    trained_length: int

    def frequencies(self, theta: float, width: int, length: int) -> Frequencies:
        length = max(length, self.trained_length)
        growth = self.factor * length / self.trained_length - (self.factor - 1)
        return inverse_frequencies(theta * growth ** (width / (width - 2)), width)


@dataclass(frozen=True)
class Yarn(Scaling):
    """Interpolated slow channels, kept fast ones, a linear ramp between (Peng et al., arXiv:2309.00071, eq. 19-23)."""

    factor: float
    trained_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def frequencies(self, theta: float, width: int, length: int) -> Frequencies:
        low, high = (self._channel(turns, theta, width) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        span = high - low or 0.001
        out = []
        for i, kept in enumerate(inverse_frequencies(theta, width)):
            slow = min(max((i - low) / span, 0.0), 1.0)
            out.append(kept / self.factor * slow + kept * (1 - slow))
        return tuple(out)

    def _channel(self, turns: float, theta: float, width: int) -> float:
        """The pair of channels that turns this often over the trained length."""
        return width * math.log(self.trained_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    @property
    def factor_on_turns(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)

    @property
    def factor_on_scores(self) -> float:
        """DeepSeek's factor on the attention scale: the square of the mscale of all dimensions."""
        return _mscale(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class Llama3(Scaling):
    """Long wavelengths divided by the factor, short ones kept, a blend between (Llama 3.1's reference code)."""

    factor: float
    trained_length: int
    low_freq_factor: float
    high_freq_factor: float

    def frequencies(self, theta: float, width: int, length: int) -> Frequencies:
        out = []
        for kept in inverse_frequencies(theta, width):
            turns = self.trained_length * kept / (2 * math.pi)
            blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            blend = min(max(blend, 0.0), 1.0)
            out.append((1 - blend) * kept / self.factor + blend * kept)
        return tuple(out)


@dataclass(frozen=True)
class LongRope(Scaling):
    """A divisor per pair: the short list up to the trained length, the long one beyond (Ding et al., arXiv:2402.13753).

    Keys cached before the switch keep the short divisors, so whoever generates across it fills the cache anew.
    """

    trained_length: int
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    attention_factor: float

    def frequencies(self, theta: float, width: int, length: int) -> Frequencies:
        divisors = self.long_factor if length > self.trained_length else self.short_factor
        return tuple(f / d for f, d in zip(inverse_frequencies(theta, width), divisors, strict=True))

    @property
    def factor_on_turns(self) -> float:
        return self.attention_factor

    @property
    def renewed_past(self) -> int | None:
        return self.trained_length


@dataclass(frozen=True)
class RoPE(Position):
    """Turns pairs of channels of q and k by angles that grow with the position (Su et al., arXiv:2104.09864, eq. 34).

    Attributes:
        d_rotary: channels turned, the first of each head; even.
        theta: base of the angles.
        interleaved: pairs are neighbours (2i, 2i + 1); otherwise (i, i + d_rotary / 2), the halves.
        scaling: None for none.
    """

    d_rotary: int
    theta: float
    interleaved: bool = False
    scaling: Scaling | None = None

    def frequencies(self, length: int) -> Frequencies:
        """Radians per position of every pair, for a sequence of `length` positions."""
        if self.scaling is None:
            return inverse_frequencies(self.theta, self.d_rotary)
        return self.scaling.frequencies(self.theta, self.d_rotary, length)

    def rotation(self, ctx: Any) -> Any:
        factor = 1.0 if self.scaling is None else self.scaling.factor_on_turns
        # Only a scaling asks for the length, which of packed rows is known by their numbers alone.
        length = 0 if self.scaling is None else ctx.longest
        return ctx.turns(self.frequencies(length), self.interleaved, factor)

    def turning(self, w: Workload, x: Value) -> tuple[Value, ...]:
        numel, dtype = w.places.size * w.tokens * self.d_rotary, x.dtype or w.dtype
        return tuple(Value(name, numel, dtype, (name, self, dtype)) for name in ("cosines", "sines"))

    @property
    def turned(self) -> int:
        return self.d_rotary

    @property
    def renewed_past(self) -> int | None:
        return None if self.scaling is None else self.scaling.renewed_past
