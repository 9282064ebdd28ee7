"""One decoded position as a function of tensors alone, which torch can export and compile."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from scantling.tensor.cache import KeyCache
from scantling.tensor.context import Context
from scantling.tensor.paged import TableRows
from scantling.tensor.slots import SlotRows

MOST, MOST_ROWS = 2**24, 2**16
"""Positions and rows that an export leaves room for."""


class _Step(Context):
    """The context of a step: the length of the text is open, and no scheme that is let in here asks for it."""

    @property
    def longest(self) -> int:
        return 1


class DecodeStep(nn.Module):
    """ids (B), pasts (B), weights, slots -> logits (B, V): a token behind what each row has, and its keys written.

    The weights are given with each call, so that none is kept with what is compiled.

    Attributes:
        names: of the weights, in the order in which they are given.
    """

    def __init__(self, net: nn.Module, paths: Sequence[str]) -> None:
        """paths: of the slots."""
        super().__init__()
        # Not a child: its weights would become those of the export.
        self._net, self._paths = (net,), tuple(paths)
        self.names = [*named(net)]

    def forward(self, ids: Tensor, pasts: Tensor, weights: list[Tensor], slots: list[Tensor]) -> Tensor:
        return self._logits(ids, pasts, SlotRows(self._by_path(slots), pasts, 1), weights)

    def over_net(self, ids: Tensor, pasts: Tensor, slots: Sequence[Tensor]) -> Tensor:
        """The same with the weights that the net has."""
        return self._logits(ids, pasts, SlotRows(self._by_path(slots), pasts, 1))

    def _by_path(self, slots: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self._paths, slots, strict=True))

    def _logits(self, ids: Tensor, pasts: Tensor, cache: KeyCache, weights: list[Tensor] | None = None) -> Tensor:
        ctx = _Step.of(ids[:, None], positions=pasts[:, None], cache=cache, last_only=True)
        given, net = (ids[:, None], ctx, None), self._net[0]
        if weights is None:
            return net(*given)[:, -1]  # type: ignore[no-any-return]
        named = dict(zip(self.names, weights, strict=True))
        return torch.func.functional_call(net, named, given)[:, -1]  # type: ignore[no-any-return]


class PagedStep(DecodeStep):
    """The same over a cache in blocks, whose stores (count, size, H, D) take the place of the slots.

    ids (B), pasts (B), tables (B, W) of the rows' blocks, weights, stores -> logits (B, V).
    """

    def forward(  # type: ignore[override]
        self, ids: Tensor, pasts: Tensor, tables: Tensor, weights: list[Tensor], stores: list[Tensor]
    ) -> Tensor:
        return self._logits(ids, pasts, TableRows(self._by_path(stores), tables, pasts), weights)

    def over_net(self, ids: Tensor, pasts: Tensor, tables: Tensor, stores: Sequence[Tensor]) -> Tensor:  # type: ignore[override]
        return self._logits(ids, pasts, TableRows(self._by_path(stores), tables, pasts))


def named(net: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, one that several modules share once."""
    return {**dict(net.named_parameters()), **dict(net.named_buffers())}


def exported(step: DecodeStep, weights: list[Tensor], slots: list[Tensor], rows: int) -> ExportedProgram:
    """The step for one row, or for any number of rows from 2 on, and any number of positions.

    Args:
        slots: of at least 3 positions, each (S, B, H, D), or of a paged step the stores; only their shapes count.
        rows: their B.
    """
    device = slots[0].device
    ids = torch.zeros(rows, dtype=torch.int64, device=device)
    positions, several = Dim("positions", min=2, max=MOST), Dim("rows", min=2, max=MOST_ROWS)
    row, inputs, sizes = {} if rows == 1 else {0: several}, [ids, torch.ones_like(ids)], list[Any]()
    if isinstance(step, PagedStep):
        inputs.append(torch.zeros(rows, 3, dtype=torch.int64, device=device))
        sizes = [row, row, {**row, 1: Dim("blocks", min=2, max=MOST)}]
        slot = {0: Dim("stored", min=2, max=MOST)}
    else:
        sizes, slot = [row, row], {0: positions} if rows == 1 else {0: positions, 1: several}
    sizes += [[None] * len(weights), [slot] * len(slots)]
    with torch.no_grad(), warnings.catch_warnings():
        # Torch's own, about names that it renamed.
        warnings.simplefilter("ignore")
        made = torch.export.export(step, (*inputs, weights, slots), dynamic_shapes=tuple(sizes), strict=False)
        return made.run_decompositions(_PRODUCTS) if rows == 1 and _by_sums(weights) else made


def _by_sums(weights: Sequence[Tensor]) -> bool:
    """Whether products of one row are sums that torch compiles itself: of 16-bit weights on a CPU, measured.

    Its library reads those of one row at half the rate at which memory gives them; those of float32 it reads faster.
    """
    return all(w.device.type == "cpu" and w.dtype in (torch.bfloat16, torch.float16) for w in weights if w.dim() > 1)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if x.numel() != x.shape[-1] or weight.dim() != 2:
        return NotImplemented
    out = (x.reshape(1, -1).float() * weight.float()).sum(-1)
    out = out if bias is None else out + bias.float()
    return out.to(x.dtype).view(*x.shape[:-1], -1)


def _matmul(x: Tensor, other: Tensor) -> Any:
    # A head that is tied to the table multiplies by it turned round.
    return _linear(x, other.T) if other.dim() == 2 and x.dim() > 1 else NotImplemented


_PRODUCTS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.linear.default: _linear,
    torch.ops.aten.matmul.default: _matmul,
}
