"""How a model knows order: `embed` adds to the stream, `rotation` turns queries and keys, `bias` adds to the scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from scantling.parts.dims import Dim, Shape
from scantling.parts.leaf import Embedding
from scantling.parts.part import Part, Step, Workload
from scantling.parts.saved import Value

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Shift:
    """What some queries' scores are shifted by.

    Attributes:
        numel: of the rows of the shift, all heads.
        trained: the shift gets a gradient.
        saved: what looking it up keeps for the backward.
    """

    numel: int
    trained: bool = False
    saved: tuple[Value, ...] = ()


class Position(Part):
    """No position at all: the hooks do nothing. Other schemes override the hook they use."""

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

    def bias(self, net: Any, ctx: Any) -> Any | None:
        """What is added to the scores, (1 or B, H, T, S), or None; `net` is the built part."""
        return None

    def turning(self, w: Workload, x: Value) -> tuple[Value, ...]:
        """The tables that turning x keeps for the backward, made once per pass for each dtype."""
        return ()

    def shift(self, w: Workload, rows: int) -> Shift | None:
        """The shift of the scores of `rows` queries, or None."""
        return None

    @property
    def turned(self) -> int:
        """Channels of each head that are turned."""
        return 0

    @property
    def renewed_past(self) -> int | None:
        """The length past which keys turned before are void, so that a cache is filled anew; None for never."""
        return None


@dataclass(frozen=True)
class NoPosition(Position):
    """Order is known only through the causal mask, if there is one."""


@dataclass(frozen=True)
class Learned(Position):
    """A trained vector per position, added once at the bottom (GPT-2, BERT).

    Attributes:
        offset: rows of the table before that of position 0.
        from_mask: where no positions are given, real tokens are counted and padding is not.
        pad_id: where no positions are given, tokens other than this one are counted (RoBERTa).
    """

    n_positions: int
    d_model: int
    offset: int = 0
    from_mask: bool = False
    pad_id: int | None = None

    def children(self) -> Mapping[str, Part]:
        return {"table": Embedding(self.n_positions + self.offset, self.d_model)}

    def steps(self, w: Workload) -> Iterator[Step]:
        # Where tokens are counted, each row has positions of its own.
        rows = replace(w, lead=(w.places if self.pad_id is None else w.B, w.T), x=None)
        d, note = Dim("d_model", self.d_model), "One trained vector per position."
        sizes = {"d": d, "rows": Dim("positions", self.n_positions + self.offset)}
        yield from self.steps_of("table", rows, "position lookup", note, sizes)
        note = "Now the order shows in the vectors."
        axes, dtype = (*w.rows, d), w.joint(w.read(0), Value("P", 0))
        yield Step(":added", "add positions", axes, formula="x + P[positions]", note=note, dtype=dtype)

    def embed(self, net: Any, x: Any, ctx: Any) -> Any:
        if self.pad_id is not None:
            places = ctx.counted(self.pad_id)
        else:
            places = ctx.counted_positions if self.from_mask else ctx.positions
        return ctx.mark(net, "added", x + net.table(places + self.offset if self.offset else places))


@dataclass(frozen=True)
class Sinusoidal(Position):
    """Fixed waves added at the bottom (Vaswani et al., arXiv:1706.03762, section 3.5).

    Channel 2i is sin(p / theta^(2i/d)), channel 2i + 1 the cosine of the same angle.

    Attributes:
        halves: all sines come first, then all cosines.
        rows: the waves are a table of that many rows, counted and never trained; None computes them when needed.
    """

    d_model: int
    theta: float = 10000.0
    halves: bool = False
    rows: int | None = None

    def children(self) -> Mapping[str, Part]:
        return {} if self.rows is None else {"table": WaveTable(self.rows, self.d_model, self.theta, self.halves)}

    def steps(self, w: Workload) -> Iterator[Step]:
        d = Dim("d_model", self.d_model)
        if self.rows is not None:
            rows, note = Workload(lead=(w.places, w.T)), "One fixed vector per position."
            yield from self.steps_of("table", rows, "position lookup", note, {"d": d})
        note, formula = "Now the order shows in the vectors.", "x + [sin, cos](p / theta^(2i/d))"
        x, axes = w.read(0), (*w.rows, d)
        dtype = x.dtype if self.rows is None else w.joint(x, Value("waves", 0))
        yield Step(":added", "add waves", axes, formula=formula, note=note, dtype=dtype)

    def embed(self, net: Any, x: Any, ctx: Any) -> Any:
        if self.rows is not None:
            return ctx.mark(net, "added", x + net.table(ctx.positions))
        waves = ctx.waves(inverse_frequencies(self.theta, self.d_model), self.d_model, self.halves)
        return ctx.mark(net, "added", x + waves.to(x.dtype))


@dataclass(frozen=True)
class WaveTable(Part):
    """Fixed waves as a table that is looked up: (1 or B, T) -> (1 or B, T, d)."""

    rows: int
    d_model: int
    theta: float
    halves: bool
    role = "position"
    computed = True

    def weights(self) -> Mapping[str, Shape]:
        return {"weight": (self.rows, self.d_model)}

    def steps(self, w: Workload) -> Iterator[Step]:
        yield Step("", "embedding lookup", (*w.rows, Dim("d", self.d_model)), self.params, formula="E[positions]")

    def module(self, path: str) -> nn.Module:
        import torch
        from torch import nn

        table: nn.Module = nn.Embedding.from_pretrained(torch.empty(self.rows, self.d_model))  # type: ignore[no-untyped-call]
        return table

    def compute(self) -> Mapping[str, Any]:
        import torch

        from scantling.tensor.rotate import waves

        frequencies = inverse_frequencies(self.theta, self.d_model)
        return {"weight": waves(torch.arange(self.rows), frequencies, self.d_model, self.halves)}


@dataclass(frozen=True)
class ALiBi(Position):
    """A penalty on the scores: slope times distance (Press et al., arXiv:2108.12409, section 3).

    Attributes:
        max_bias: head i of H has the slope 2^(-max_bias i / H); where H is no power of two, the slopes of the next
            lower power come first and every other one of the next higher power fills up.
        scale: factor on the penalty.
        rounded: slopes and penalties pass through bfloat16.
    """

    n_heads: int
    max_bias: float = 8.0
    scale: float = 1.0
    rounded: bool = False

    def slopes(self) -> tuple[float, ...]:
        """One slope per head."""
        power = 1 << (self.n_heads.bit_length() - 1)
        first = [2.0 ** (-self.max_bias * i / power) for i in range(1, power + 1)]
        rest = [2.0 ** (-self.max_bias * i / (2 * power)) for i in range(1, 2 * (self.n_heads - power), 2)]
        return tuple(first + rest)

    def bias(self, net: Any, ctx: Any) -> Any:
        return ctx.penalties(self.slopes(), self.scale, self.rounded)

    def shift(self, w: Workload, rows: int) -> Shift:
        # Rounded penalties depend on the key alone.
        return Shift(self.n_heads * w.keys * (w.places.size if self.rounded else rows))


def inverse_frequencies(theta: float, width: int) -> tuple[float, ...]:
    """theta^(-2i / width) for i = 0 .. ceil(width / 2) - 1, in radians per position."""
    return tuple(theta ** (-(2 * i) / width) for i in range((width + 1) // 2))
