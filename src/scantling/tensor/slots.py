"""A cache of a fixed size whose rows may stand at different positions, as a compiled step fills it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from scantling.errors import ScantlingInputError
from scantling.tensor.cache import Cache
from scantling.tensor.store import Plain


class _Leading(Plain):
    """Values (B, H, S, D) that lie in memory as (S, B, H, D), so that the first n positions are one piece of it."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> None:
        b, h, s, d = shape
        self._data = torch.zeros((s, b, h, d), dtype=dtype, device=device).permute(1, 2, 0, 3)

    @property
    def leading(self) -> Tensor:
        """(S, B, H, D), contiguous."""
        return self._data.permute(2, 0, 1, 3)

    def select(self, rows: Tensor) -> None:
        self._data = self.leading.index_select(1, rows).permute(1, 2, 0, 3)


class SlotCache(Cache):
    """Every position of every layer, plain; passes see it whole, or as `SlotRows` where rows have their own pasts."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device | str) -> None:
        """shapes: `Part.named_state` of the model at the full length."""
        self._slots = {path: _Leading(shape, dtype, device) for path, shape in shapes.items()}
        self._stores = dict(self._slots)
        self.length = 0
        self.capacity = min(shape[2] for shape in shapes.values())

    def first(self, positions: int) -> list[Tensor]:
        """The first so many positions of every slot, each (positions, B, H, D), in the order of the shapes.

        Raises:
            ScantlingInputError: there are fewer.
        """
        if positions > self.capacity:
            raise ScantlingInputError(
                f"the cache holds {self.capacity} positions and {positions} are needed: allocate it larger"
            )
        return [slot.leading[:positions] for slot in self._slots.values()]

    def rows(self, pasts: Tensor, positions: int, tokens: int) -> SlotRows:
        """The cache as a pass of `tokens` per row sees it whose row i has `pasts[i]` of the first `positions`."""
        return SlotRows(dict(zip(self._slots, self.first(positions), strict=True)), pasts, tokens)


class SlotRows:
    """Slots during one pass; see `KeyCache`. Keys behind a row's own are of no query's past, so nobody reads them.

    Attributes:
        length: what the slots hold beside this pass.
        pasts: (B,) positions filled in each row.
    """

    source_padding: None = None

    def __init__(self, slots: Mapping[str, Tensor], pasts: Tensor, tokens: int) -> None:
        """slots: by path (S, B, H, D); they are written to."""
        self._slots, self.pasts = slots, pasts
        self.length = next(iter(slots.values())).shape[0] - tokens

    def append(self, path: str, new: Tensor) -> Tensor:
        """Write new (B, H, T, D) behind each row's own and return the whole slot, (B, H, S, D)."""
        slot, (batch, _, tokens, _) = self._slots[path], new.shape
        places = self.pasts[:, None] + torch.arange(tokens, device=new.device)
        rows = torch.arange(batch, device=new.device)[:, None]
        slot.index_put_((places, rows), new.transpose(1, 2).to(slot.dtype))
        return slot.permute(1, 2, 0, 3)

    def read(self, path: str) -> Tensor:
        """Not of a decoder: it has no source."""
        raise ScantlingInputError("slots hold decoders; an encoder-decoder keeps its source whole")

    def write(self, path: str, whole: Tensor) -> None:
        """Not of a decoder: it has no source."""
        raise ScantlingInputError("slots hold decoders; an encoder-decoder keeps its source whole")
