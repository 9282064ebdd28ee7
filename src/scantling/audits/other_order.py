"""The same sums in another order: how large rounding is, measured on the subject itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

Operands = tuple[Any, ...]


def _product(at: int) -> Callable[[Operands], Operands]:
    """Both operands of a matrix product, from argument `at`, with the summed index turned round."""

    def turn(given: Operands) -> Operands:
        a, b = given[at], given[at + 1]
        if b.dim() < 2:
            return given
        return (*given[:at], a.flip(-1), b.flip(-2), *given[at + 2 :])

    return turn


def _scores(given: Operands) -> Operands:
    """Queries and keys with the channels of a head turned round."""
    return given[0].flip(-1), given[1].flip(-1), *given[2:]


def _linear(given: Operands) -> Operands:
    return given[0].flip(-1), given[1].flip(-1), *given[2:]


_TURNED: Mapping[Any, Callable[[Operands], Operands]] = {
    aten.mm.default: _product(0),
    aten.bmm.default: _product(0),
    aten.matmul.default: _product(0),
    aten.addmm.default: _product(1),
    aten.baddbmm.default: _product(1),
    aten.linear.default: _linear,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _scores,
    aten._scaled_dot_product_attention_math.default: _scores,
    aten._scaled_dot_product_efficient_attention.default: _scores,
    aten._scaled_dot_product_flash_attention.default: _scores,
}


class OtherOrder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every matrix product inside sums from the other end: equal in exact arithmetic, another rounding in floating
    point."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Operands = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        turn = _TURNED.get(func)
        return func(*(args if turn is None else turn(args)), **(kwargs or {}))
