"""The same sums in another order: how large rounding is, measured on the subject itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

Operands = tuple[Any, ...]
Call = Callable[..., Any]


def _halves(at: int, turned: int) -> Callable[[Call, Operands], Any]:
    """A matrix product as the sum of two over half of the summed index each.

    Args:
        at: of the first operand among the arguments.
        turned: the axis of the second operand that is summed: -2, or -1 where it is stored transposed.
    """

    def product(func: Call, given: Operands) -> Any:
        a, b = given[at], given[at + 1]
        half = a.shape[-1] // 2
        if half == 0 or b.dim() < 2:
            return func(*given)
        first, second = (
            (a.narrow(-1, start, size), b.narrow(turned, start, size))
            for start, size in ((0, half), (half, a.shape[-1] - half))
        )
        # What is added to the product is added once.
        plain = aten.linear.default if func is aten.linear.default else aten.matmul.default
        return func(*given[:at], *first, *given[at + 2 :]) + plain(*second)

    return product


def _channels(func: Call, given: Operands) -> Any:
    """Attention whose queries and keys have the channels of a head turned round."""
    return func(given[0].flip(-1), given[1].flip(-1), *given[2:])


_TURNED: Mapping[Any, Callable[[Call, Operands], Any]] = {
    aten.mm.default: _halves(0, -2),
    aten.bmm.default: _halves(0, -2),
    aten.matmul.default: _halves(0, -2),
    aten.addmm.default: _halves(1, -2),
    aten.baddbmm.default: _halves(1, -2),
    aten.linear.default: _halves(0, -1),
}
_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_attention_math.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
}


class OtherOrder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every matrix product inside is summed in two halves: equal in exact arithmetic, another rounding in floating
    point."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Operands = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _ATTENTION:
            return _channels(lambda *given: func(*given, **(kwargs or {})), args)
        if func in _TURNED and not kwargs:
            return _TURNED[func](func, args)
        return func(*args, **(kwargs or {}))
