"""The leaves: parts that own weights and are torch's own modules when built."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scantling.parts.dims import Dim, Shape, elements
from scantling.parts.part import FREE, Cost, Factor, Part, Step, Workload
from scantling.parts.saved import NARROW, Value
from scantling.units import DTYPE_BYTES

if TYPE_CHECKING:
    from torch import nn

WIDE = "float32"
"""What norms, softmax and losses are computed in."""
GAIN = "dy x / size, summed over rows"


def read_by(w: Workload, x: Value, numel: int, weights: int) -> tuple[Value, ...]:
    """What a product keeps: `numel` elements of x; and where autocast made one, the narrow copy of the weights."""
    read = w.factor(x, numel)
    return (read,) if w.autocast is None else (read, Value(NARROW, weights, w.autocast))


@dataclass(frozen=True)
class Linear(Part):
    """A matrix product with an optional shift: (..., d_in) -> (..., d_out)."""

    d_in: int
    d_out: int
    bias: bool = False

    def weights(self) -> Mapping[str, Shape]:
        matrix = {"weight": (self.d_out, self.d_in)}
        return matrix | {"bias": (self.d_out,)} if self.bias else matrix

    def steps(self, w: Workload) -> Iterator[Step]:
        rows = elements(w.rows)
        cost = Cost.of(2 * rows * self.d_in * self.d_out)
        saved = read_by(w, w.read(rows * self.d_in), rows * self.d_in, self.d_in * self.d_out)
        d_in, d_out = Dim("d_in", self.d_in), Dim("d_out", self.d_out)
        x = Factor("x", (*w.rows, d_in), formula="dy W")
        factors = (x, _weight("W", d_out, d_in), *_shift(self.bias, d_out))
        yield Step(
            "",
            "linear",
            (*w.rows, d_out),
            self.params,
            cost,
            formula="x W^T + b" if self.bias else "x W^T",
            dtype=w.autocast,
            factors=factors,
            saved=w.keep(*saved),
        )

    def module(self, path: str) -> nn.Module:
        from torch import nn

        return nn.Linear(self.d_in, self.d_out, bias=self.bias)


@dataclass(frozen=True)
class GroupedLinear(Part):
    """One linear map per expert, applied to rows sorted by expert: (R, d_in) -> (R, d_out)."""

    n_experts: int
    d_in: int
    d_out: int
    bias: bool = False

    def weights(self) -> Mapping[str, Shape]:
        matrix: dict[str, Shape] = {"weight": (self.n_experts, self.d_out, self.d_in)}
        return matrix | {"bias": (self.n_experts, self.d_out)} if self.bias else matrix

    def steps(self, w: Workload) -> Iterator[Step]:
        rows = elements(w.rows)
        cost = Cost.of(2 * rows * self.d_in * self.d_out)
        E, d_in, d_out = Dim("E", self.n_experts), Dim("d_in", self.d_in), Dim("d_out", self.d_out)
        x = Factor("x", (*w.rows, d_in), formula="dy W_e")
        factors = (x, _weight("W", E, d_out, d_in), *_shift(self.bias, E, d_out))
        ends = w.beside or Value("ends", self.n_experts, "int32")
        owner = (Value("each row's expert", rows, "int64"),) if self.bias else ()
        read = read_by(w, w.read(rows * self.d_in), rows * self.d_in, self.n_experts * self.d_in * self.d_out)
        yield Step(
            "",
            "expert linear",
            (*w.rows, d_out),
            self.params,
            cost,
            formula="x W_e^T + b_e" if self.bias else "x W_e^T",
            # A shift is not cast, and the sum is as wide as the shift.
            dtype=None if self.bias else w.autocast,
            factors=factors,
            saved=w.keep(*read, ends, *owner),
            before_saving=cost if self.bias else FREE,
        )

    def forward(self, net: Any, x: Any, groups: Any) -> Any:
        return groups.linear(x, net.weight, net.bias if self.bias else None)


@dataclass(frozen=True)
class Embedding(Part):
    """A table of vectors looked up by token id: (B, T) -> (B, T, d). A lookup, not a product: no FLOPs."""

    rows: int
    d_model: int

    def weights(self) -> Mapping[str, Shape]:
        return {"weight": (self.rows, self.d_model)}

    def steps(self, w: Workload) -> Iterator[Step]:
        saved, d = w.keep(w.read(elements(w.rows), "int64")), Dim("d", self.d_model)
        out, factors = (*w.rows, d), (_gain("E", "dy added to the rows of the ids", Dim("rows", self.rows), d),)
        yield Step("", "embedding lookup", out, self.params, formula="E[ids]", factors=factors, saved=saved)

    def module(self, path: str) -> nn.Module:
        import torch
        from torch import nn

        # Given a table, torch draws none: a draw on the meta device would import all of torch._dynamo.
        table: nn.Module = nn.Embedding.from_pretrained(  # type: ignore[no-untyped-call]
            torch.empty(self.rows, self.d_model), freeze=False
        )
        return table


@dataclass(frozen=True)
class RMSNorm(Part):
    """x / sqrt(mean(x^2) + eps) * w (Zhang and Sennrich, arXiv:1910.07467, eq. 4).

    Attributes:
        plus_one: the gain is 1 + w, multiplied before the result is rounded (Gemma).
        rounded: the normed vector is rounded to its dtype before the gain multiplies it (Llama); without it only the
            result is.
    """

    d: int
    eps: float
    plus_one: bool = False
    rounded: bool = True
    role = "norm"

    @property
    def initial(self) -> Mapping[str, float]:
        return {"weight": 0.0 if self.plus_one else 1.0}

    def weights(self) -> Mapping[str, Shape]:
        return {"weight": (self.d,)}

    def steps(self, w: Workload) -> Iterator[Step]:
        formula = f"x / sqrt(mean(x^2) + {self.eps:g}) * " + ("(1 + w)" if self.plus_one else "w")
        note, d, rows = "Sets each vector's size.", Dim("d", self.d), elements(w.rows)
        x, out = w.read(rows * self.d), (*w.rows, d)
        # Rounded vectors are multiplied by a gain that may be wider.
        dtype = w.joint(x, Value("w", self.d)) if self.rounded and not self.plus_one else x.dtype
        yield Step(
            "",
            "RMSNorm",
            out,
            self.params,
            formula=formula,
            note=note,
            dtype=dtype,
            factors=(_gain("w", GAIN, d),),
            saved=w.keep(*self._saved(w, x, rows)),
        )

    def _saved(self, w: Workload, x: Value, rows: int) -> tuple[Value, ...]:
        """On CPU torch computes the norm of 16-bit vectors in float32, step by step."""
        if w.accelerator:
            return x, Value("1 / size of each vector", rows, WIDE)
        own = x.dtype or w.dtype
        wide = WIDE if self.plus_one or DTYPE_BYTES[own] <= 2 else own
        sized = Value("vectors of size 1", rows * self.d, own if self.rounded and not self.plus_one else wide)
        gain = (Value("1 + w", self.d, WIDE),) if self.plus_one else ()
        return w.cast(x, rows * self.d, wide), Value("1 / size of each vector", rows, wide), sized, *gain

    def module(self, path: str) -> nn.Module:
        from scantling.tensor.norm import RoundedRMSNorm, WideRMSNorm

        if self.plus_one:
            return super().module(path)
        return (RoundedRMSNorm if self.rounded else WideRMSNorm)(self.d, eps=self.eps)

    def forward(self, net: Any, x: Any) -> Any:
        wide = x.float()
        sized = wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (sized * (1.0 + net.weight.float())).to(x.dtype)


@dataclass(frozen=True)
class LayerNorm(Part):
    """(x - mean(x)) / sqrt(var(x) + eps) * w + b (Ba et al., arXiv:1607.06450, eq. 3-4)."""

    d: int
    eps: float
    bias: bool = True
    role = "norm"

    def weights(self) -> Mapping[str, Shape]:
        scale: dict[str, Shape] = {"weight": (self.d,)}
        return scale | {"bias": (self.d,)} if self.bias else scale

    def steps(self, w: Workload) -> Iterator[Step]:
        formula = f"(x - mean) / sqrt(var + {self.eps:g}) * w" + (" + b" if self.bias else "")
        note = "Centres each vector and sets its size."
        rows, d = elements(w.rows), Dim("d", self.d)
        x, factors = w.read(rows * self.d), (_gain("w", GAIN, d), *_shift(self.bias, d))
        yield Step(
            "",
            "LayerNorm",
            (*w.rows, d),
            self.params,
            formula=formula,
            note=note,
            dtype=x.dtype,
            factors=factors,
            saved=w.keep(x, Value("means", rows), Value("1 / deviations", rows)),
        )

    def module(self, path: str) -> nn.Module:
        from torch import nn

        return nn.LayerNorm(self.d, eps=self.eps, bias=self.bias)


@dataclass(frozen=True)
class HeadNorm(Part):
    """A norm over each head's channels with a gain per head: (B, H, T, d) -> (B, H, T, d).

    Attributes:
        centred: LayerNorm without a shift instead of RMSNorm.
    """

    n_heads: int
    d: int
    eps: float
    centred: bool = False
    role = "norm"

    @property
    def initial(self) -> Mapping[str, float]:
        return {"weight": 1.0}

    def weights(self) -> Mapping[str, Shape]:
        return {"weight": (self.n_heads, self.d)}

    def steps(self, w: Workload) -> Iterator[Step]:
        H, d, op = Dim("H", self.n_heads), Dim("d", self.d), "LayerNorm" if self.centred else "RMSNorm"
        rows = w.batch * self.n_heads * w.tokens
        x, formula = w.read(rows * self.d), f"norm(x) * w_h, eps {self.eps:g}"
        yield Step(
            "",
            f"{op} per head",
            (w.B, H, w.T, d),
            self.params,
            formula=formula,
            dtype=x.dtype,
            factors=(_gain("w", GAIN, H, d),),
            saved=w.keep(*self._saved(w, x, rows)),
        )

    def _saved(self, w: Workload, x: Value, rows: int) -> tuple[Value, ...]:
        if w.accelerator:
            return x, Value("1 / size of each vector", rows, WIDE)
        read = Value("centred vectors", rows * self.d, WIDE) if self.centred else w.cast(x, rows * self.d, WIDE)
        sized = Value("vectors of size 1", rows * self.d, WIDE)
        gain = () if w.dtype == WIDE else (Value("w in float32", self.params, WIDE),)
        return read, Value("1 / size of each vector", rows, WIDE), sized, *gain

    def forward(self, net: Any, x: Any) -> Any:
        wide = x.float()
        if self.centred:
            wide = wide - wide.mean(-1, keepdim=True)
        sized = wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (sized * net.weight.float()[:, None]).to(x.dtype)


Norm = RMSNorm | LayerNorm


def _weight(name: str, *dims: Dim) -> Factor:
    """The matrix of a product."""
    return Factor(name, dims, weight=True, formula="dy^T x")


def _gain(name: str, formula: str, *dims: Dim) -> Factor:
    """A weight whose gradient takes no product."""
    return Factor(name, dims, FREE, weight=True, formula=formula)


def _shift(present: bool, *dims: Dim) -> tuple[Factor, ...]:
    return (_gain("b", "dy summed over rows", *dims),) if present else ()
