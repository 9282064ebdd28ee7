"""An encoder's matrices laid out for the processor's products, with shifts and GELU inside them.

As torch runs a linear layer on the CPU, it writes the shift into the result before the product, and orders 16-bit
weights anew each time. oneDNN takes weights that are ordered once, adds the shift while the result is in registers, and
applies the activation there; the operators are those that torch.compile uses on the CPU. A processor without matrix
units multiplies bfloat16 more slowly than float32: there the twin of a net in bfloat16 holds the same values in
float32, which is faster and more exact.
"""

from __future__ import annotations

import copy
import sys
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from scantling.parts.mlp import MLP

ROWS = 512
"""Tokens of a batch that the order of the weights is made for; others may come."""
OPERATORS = ("_reorder_linear_weight", "_linear_pointwise")
"""Of oneDNN, in torch; they are its own, for torch.compile, and may be gone in another version."""
GELU = {"gelu": "none", "gelu_tanh": "tanh"}
"""What oneDNN calls the ways to compute it."""


def can(net: nn.Module) -> bool:
    """Whether these weights can be laid out here: on the CPU, in float32 or bfloat16, by a torch that has oneDNN.

    A net that is watched or edited (`lens`) stays as it was built. Where it is the torch that cannot, standard error
    says so, once.
    """
    first = next(net.parameters())
    if first.device.type != "cpu" or first.dtype not in (torch.float32, torch.bfloat16) or hooked(net):
        return False
    lacking = [f"torch.ops.mkldnn.{name}" for name in OPERATORS if not hasattr(torch.ops.mkldnn, name)]
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        lacking = ["oneDNN"]
    if lacking:
        _say(f"note: torch {torch.__version__} lacks {' and '.join(lacking)}: vectors are computed more slowly")
    return not lacking


def hooked(net: nn.Module) -> bool:
    """Whether anything looks at what passes the net: a twin would not show it, or would go on showing it."""
    return any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


@cache
def _say(note: str) -> None:
    print(note, file=sys.stderr)


def laid_out(net: nn.Module) -> nn.Module:
    """A twin of the net for inference; made once, and again when weights change."""
    state = [(p.data_ptr(), p._version) for p in net.parameters()]
    known = _TWINS.get(net)
    if known is None or known[0] != state:
        known = (state, _twin(net))
        _TWINS[net] = known
    return known[1]


_TWINS: WeakKeyDictionary[nn.Module, tuple[list[tuple[int, int]], nn.Module]] = WeakKeyDictionary()


def _twin(net: nn.Module) -> nn.Module:
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*net.parameters(), *net.buffers())}
    twin = copy.deepcopy(net, shared)
    if next(net.parameters()).dtype == torch.bfloat16 and not _has_matrix_units():
        twin = copy.deepcopy(net).float()
    for module in [*twin.modules()]:
        for name, child in [*module.named_children()]:
            part: Any = getattr(child, "part", None)
            if isinstance(part, MLP) and part.act in GELU and type(child.up) is nn.Linear:
                setattr(module, name, _Widened(child, GELU[part.act]))
            elif type(child) is nn.Linear:
                setattr(module, name, _Product(child))
    return twin


def _has_matrix_units() -> bool:
    """Whether the processor multiplies tiles of bfloat16 (AMX); a torch that does not tell is taken to have them."""
    tells: Any = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return tells is None or bool(tells())


class _Product(nn.Module):
    """A linear layer, with GELU behind it or nothing."""

    def __init__(self, linear: nn.Linear, gelu: str | None = None) -> None:
        super().__init__()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)
        self._shift = None if linear.bias is None else linear.bias.detach()
        self._after: tuple[str, list[float], str] = ("none", [], "") if gelu is None else ("gelu", [], gelu)

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        found: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._shift, *self._after)
        return found


class _Widened(nn.Module):
    """An MLP whose activation is inside its first product."""

    def __init__(self, mlp: Any, gelu: str) -> None:
        super().__init__()
        self.up, self.down = _Product(mlp.up, gelu), _Product(mlp.down)

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        found: Tensor = self.down(self.up(x))
        return found
