"""Rows sorted by expert: static shapes whatever the router decides."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula


class Groups:
    """Which token goes to which expert in one pass.

    Attributes:
        order: (R,) the rows in the order of their experts; row r is token r // top_k.
        place: (R,) where each row stands in that order.
        ends: (E,) int32, where each expert's rows end in that order.
    """

    def __init__(self, experts: Tensor, n_experts: int) -> None:
        """experts: (..., top_k) expert ids."""
        self.shape = experts.shape
        self._known: list[tuple[int, int, int]] | None = None
        flat = experts.flatten()
        self.order = flat.argsort(stable=True)
        places = torch.arange(flat.numel(), device=flat.device)
        self.place = torch.empty_like(self.order).scatter_(0, self.order, places)
        every = torch.arange(n_experts, device=flat.device)
        self.ends = (flat[:, None] == every).sum(0).cumsum(0).to(torch.int32)

    def send(self, x: Tensor) -> Tensor:
        """x (..., d) -> (R, d): each token once per chosen expert."""
        return x.flatten(0, -2)[self.order // self.shape[-1]]

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x (R, d_in), weight (E, d_out, d_in) -> (R, d_out), each row by its expert's matrix."""
        if x.device.type == "meta":
            # Any one expert has the right shape and cost for all rows; torch's own counter then counts it.
            return F.linear(x, weight[0], None if bias is None else bias[0])
        # An operator's way to its code takes as long as the products of one token.
        direct = not torch.is_grad_enabled() and type(x) is Tensor and not torch.compiler.is_compiling()
        out = _products(x, weight, self._spans()) if direct else cast(Tensor, grouped_linear(x, weight, self.ends))
        if bias is None:
            return out
        rows = torch.arange(x.shape[0], device=x.device)
        return out + bias[torch.searchsorted(self.ends, rows, right=True)]

    def _spans(self) -> list[tuple[int, int, int]]:
        if self._known is None:
            self._known = _spans(self.ends)
        return self._known

    def combine(self, out: Tensor, kept: Tensor) -> Tensor:
        """out (R, d) in sorted order, kept (..., top_k) weights -> (..., d)."""
        rows = out.index_select(0, self.place)
        return (rows.view(*self.shape, -1) * kept[..., None]).sum(-2)


@torch.library.custom_op("scantling::grouped_linear", mutates_args=())
def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x (R, d_in) sorted by expert, weight (E, d_out, d_in), ends (E,) -> (R, d_out)."""
    return _products(x, weight, _spans(ends))


def _products(x: Tensor, weight: Tensor, spans: Iterable[tuple[int, int, int]]) -> Tensor:
    """Each expert's rows, [start, end) of x, by its matrix."""
    out = x.new_empty(x.shape[0], weight.shape[1])
    for expert, start, end in spans:
        torch.mm(x[start:end], weight[expert].T, out=out[start:end])
    return out


@torch.library.custom_op("scantling::grouped_outer", mutates_args=())
def grouped_outer(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """The weight gradient: grad (R, d_out), x (R, d_in) -> (E, d_out, d_in)."""
    out = x.new_zeros(ends.shape[0], grad.shape[1], x.shape[1])
    for expert, start, end in _spans(ends):
        torch.mm(grad[start:end].T, x[start:end], out=out[expert])
    return out


def _spans(ends: Tensor) -> list[tuple[int, int, int]]:
    """(expert, start, end) of every expert that has rows."""
    bounds = [0, *ends.tolist()]
    return [(i, a, b) for i, (a, b) in enumerate(pairwise(bounds)) if b > a]


@grouped_linear.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@grouped_outer.register_fake
def _(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], grad.shape[1], x.shape[1])


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    x, weight, ends = ctx.saved_tensors
    grad = grad.contiguous()
    to_x = grouped_linear(grad, weight.transpose(1, 2), ends) if ctx.needs_input_grad[0] else None
    to_weight = grouped_outer(grad, x, ends) if ctx.needs_input_grad[1] else None
    return to_x, to_weight, None


grouped_linear.register_autograd(_backward, setup_context=_setup)


@register_flop_formula(torch.ops.scantling.grouped_linear)
def _linear_flops(x_shape, weight_shape, *args, out_shape=None, **kwargs) -> int:  # type: ignore[no-untyped-def]
    return int(2 * x_shape[0] * weight_shape[1] * weight_shape[2])


@register_flop_formula(torch.ops.scantling.grouped_outer)
def _outer_flops(grad_shape, x_shape, *args, out_shape=None, **kwargs) -> int:  # type: ignore[no-untyped-def]
    return int(2 * x_shape[0] * grad_shape[1] * x_shape[1])


for _device in ("cpu", "cuda"):
    # As every other product under autocast.
    grouped_linear.register_autocast(_device, torch.bfloat16)
