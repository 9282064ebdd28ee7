"""How a model knows order: `embed` adds to the residual stream, `rotation` turns queries and keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from scantling.parts.leaf import Embedding
from scantling.parts.part import Part, Step, Workload


class Position(Part):
    """No position at all: both hooks do nothing. Other schemes override the hook they use."""

    role = "position"

    def steps(self, w: Workload) -> Iterator[Step]:
        """Rows of what is added to the residual stream."""
        return iter(())

    def embed(self, net: Any, x: Any, ctx: Any) -> Any:
        """x (B, T, d) with whatever the scheme adds to it; `net` is the built part."""
        return x

    def rotation(self, ctx: Any) -> Any | None:
        """Cosines and sines, each (1 or B, 1, T, d_rotary), or None where nothing is turned."""
        return None

    @property
    def turned(self) -> int:
        """Channels of each head that are turned."""
        return 0


@dataclass(frozen=True)
class NoPosition(Position):
    """Order is known only through the causal mask, if there is one."""


@dataclass(frozen=True)
class Learned(Position):
    """A trained vector per position, added once at the bottom (GPT-2, BERT)."""

    n_positions: int
    d_model: int

    def children(self) -> Mapping[str, Part]:
        return {"table": Embedding(self.n_positions, self.d_model)}

    def steps(self, w: Workload) -> Iterator[Step]:
        yield from self.steps_of("table", Workload(1, w.tokens), "position lookup", "One trained vector per position.")
        yield Step(":added", "add positions", (*w.rows, self.d_model), formula="x + P[positions]")

    def embed(self, net: Any, x: Any, ctx: Any) -> Any:
        return ctx.mark(net, "added", x + net.table(ctx.positions))


@dataclass(frozen=True)
class Sinusoidal(Position):
    """Fixed waves added at the bottom (Vaswani et al., arXiv:1706.03762, section 3.5).

    Channel 2i is sin(p / theta^(2i/d)), channel 2i + 1 the cosine of the same angle.
    """

    d_model: int
    theta: float = 10000.0

    def steps(self, w: Workload) -> Iterator[Step]:
        yield Step(":added", "add waves", (*w.rows, self.d_model), formula="x + [sin, cos](p / theta^(2i/d))")

    def embed(self, net: Any, x: Any, ctx: Any) -> Any:
        return ctx.mark(
            net, "added", x + ctx.waves(inverse_frequencies(self.theta, self.d_model), self.d_model).to(x.dtype)
        )


@dataclass(frozen=True)
class RoPE(Position):
    """Turns pairs of channels of q and k by angles that grow with the position (Su et al., arXiv:2104.09864, eq. 34).

    Attributes:
        d_rotary: channels turned, the first of each head; even.
        theta: base of the angles.
        interleaved: pairs are neighbours (2i, 2i + 1); otherwise (i, i + d_rotary / 2), the halves.
    """

    d_rotary: int
    theta: float
    interleaved: bool = False

    def rotation(self, ctx: Any) -> Any:
        return ctx.turns(inverse_frequencies(self.theta, self.d_rotary), self.interleaved)

    @property
    def turned(self) -> int:
        return self.d_rotary


def inverse_frequencies(theta: float, width: int) -> tuple[float, ...]:
    """theta^(-2i / width) for i = 0 .. ceil(width / 2) - 1, in radians per position."""
    return tuple(theta ** (-(2 * i) / width) for i in range((width + 1) // 2))
