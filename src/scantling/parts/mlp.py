"""The MLP: each token's own computation, no exchange with others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from scantling.parts.dims import Dim, elements
from scantling.parts.leaf import GroupedLinear, Linear
from scantling.parts.part import Part, Step, Workload
from scantling.parts.saved import Value

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "quick_gelu", "relu2", "silu", "tanh")
"""Activation names: ``gelu`` is exact (erf), ``gelu_tanh`` its tanh approximation, ``relu2`` the squared ReLU."""


def activated(name: str, x: Value, numel: int) -> tuple[Value, tuple[Value, ...]]:
    """The activation's output, and what autograd keeps of it: the output where the slope can be read from it."""
    out = Value(f"{name}(x)", numel, x.dtype)
    match name:
        case "relu" | "tanh":
            return out, (out,)
        case "relu2":
            return out, (Value("relu(x)", numel, x.dtype),)
        case "quick_gelu":
            return out, (x, Value("sigmoid(1.702 x)", numel, x.dtype))
    return out, (x,)


def _linear(d_in: int, d_out: int, bias: bool, n_experts: int | None) -> Part:
    return Linear(d_in, d_out, bias) if n_experts is None else GroupedLinear(n_experts, d_in, d_out, bias)


@dataclass(frozen=True)
class MLP(Part):
    """down(act(up(x))) (Vaswani et al., arXiv:1706.03762, eq. 2).

    Attributes:
        n_experts: None for one MLP; a number for that many side by side, each row going to its expert.
    """

    d_model: int
    d_ff: int
    act: str
    bias: bool = False
    n_experts: int | None = None

    @property
    def role(self) -> str:
        return "mlp" if self.n_experts is None else "experts"

    def children(self) -> Mapping[str, Part]:
        return {
            "up": _linear(self.d_model, self.d_ff, self.bias, self.n_experts),
            "down": _linear(self.d_ff, self.d_model, self.bias, self.n_experts),
        }

    def steps(self, w: Workload) -> Iterator[Step]:
        d, d_ff = Dim("d_model", self.d_model), Dim("d_ff", self.d_ff)
        up = yield from self.steps_of("up", w, "up", "Widens each token's vector.", {"d_in": d, "d_out": d_ff})
        out = (*w.rows, d_ff)
        hidden, kept = activated(self.act, up, elements(out))
        note, formula = "The only step of the MLP that is not linear.", f"{self.act}(up)"
        saved = w.keep(*kept)
        yield Step(":hidden", self.act, out, formula=formula, note=note, dtype=up.dtype, saved=saved, out=hidden)
        narrower = {"d_in": d_ff, "d_out": d}
        yield from self.steps_of("down", w.on(hidden), "down", "Back to the stream's width.", narrower)

    def forward(self, net: Any, x: Any, ctx: Any, *groups: Any) -> Any:
        hidden = ctx.mark(net, "hidden", ctx.activate(self.act, net.up(x, *groups)))
        return net.down(hidden, *groups)


@dataclass(frozen=True)
class GatedMLP(Part):
    """down(act(gate(x)) * up(x)): SwiGLU, GEGLU, ReGLU by the activation (Shazeer, arXiv:2002.05202, eq. 6).

    Attributes:
        clamp: (limit, alpha) of gpt-oss's gate, or None.
        n_experts: None for one MLP; a number for that many side by side, each row going to its expert.
    """

    d_model: int
    d_ff: int
    act: str
    bias: bool = False
    n_experts: int | None = None
    clamp: tuple[float, float] | None = None

    @property
    def role(self) -> str:
        return "mlp" if self.n_experts is None else "experts"

    def children(self) -> Mapping[str, Part]:
        return {
            "gate": _linear(self.d_model, self.d_ff, self.bias, self.n_experts),
            "up": _linear(self.d_model, self.d_ff, self.bias, self.n_experts),
            "down": _linear(self.d_ff, self.d_model, self.bias, self.n_experts),
        }

    def steps(self, w: Workload) -> Iterator[Step]:
        d, d_ff = Dim("d_model", self.d_model), Dim("d_ff", self.d_ff)
        note, wider = "Decides how much of each hidden channel passes.", {"d_in": d, "d_out": d_ff}
        gate = yield from self.steps_of("gate", w, "gate", note, wider)
        up = yield from self.steps_of("up", w, "up", "Widens each token's vector.", wider)
        formula = f"{self.act}(gate) * up" if self.clamp is None else "(up + 1) * gate * sigmoid(alpha gate), clamped"
        note, out, op = "The gate scales each hidden channel.", (*w.rows, d_ff), f"{self.act}(gate) x up"
        hidden = Step(":hidden", op, out, formula=formula, note=note, dtype=w.joint(gate, up))
        yield replace(hidden, saved=w.keep(*self._saved(w, gate, up, elements(out))))
        narrower = {"d_in": d_ff, "d_out": d}
        yield from self.steps_of("down", w.on(hidden.out), "down", "Back to the stream's width.", narrower)

    def _saved(self, w: Workload, gate: Value, up: Value, numel: int) -> tuple[Value, ...]:
        if w.accelerator:
            return gate, up
        if self.clamp is None:
            passed, kept = activated(self.act, gate, numel)
            return *kept, passed, up
        names = ("clamped gate", "clamped up + 1", "their product", "sigmoid(alpha gate)")
        return gate, up, *(Value(name, numel, gate.dtype) for name in names)

    def forward(self, net: Any, x: Any, ctx: Any, *groups: Any) -> Any:
        gate, up = net.gate(x, *groups), net.up(x, *groups)
        if self.clamp is None:
            gated = ctx.gated(self.act, gate, up)
        else:
            limit, alpha = self.clamp
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            gated = (up + 1) * gate * (alpha * gate).sigmoid()
        return net.down(ctx.mark(net, "hidden", gated), *groups)
