"""A cache in blocks of positions: rows take them as they grow and share them where they begin alike.

(Kwon et al., arXiv:2309.06180, section 4.)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from scantling.errors import ScantlingInputError
from scantling.tensor.store import store


class Blocks:
    """Who holds which of `count` blocks of `size` positions.

    A full block is known by what stands in it and before it, so that another row that begins alike reads it too. One
    that nobody holds any more stays known until its place is needed, the one unused for longest first.
    """

    def __init__(self, count: int, size: int) -> None:
        for name, value in (("blocks", count), ("block size", size)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ScantlingInputError(f"{name} of the cache: {value!r}; a whole number of at least 1 is needed")
        self.count, self.size = count, size
        self._holders = [0] * count
        self._fresh = list(range(count - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._known: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}
        self._name: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._chains = 0

    @property
    def free(self) -> int:
        """Blocks that may be taken."""
        return len(self._fresh) + len(self._idle)

    def take(self) -> int:
        """A block of one's own.

        Raises:
            ScantlingInputError: none is free; ask `free` first.
        """
        if self._fresh:
            block = self._fresh.pop()
        elif self._idle:
            block, _ = self._idle.popitem(last=False)
            del self._known[self._name.pop(block)]
        else:
            raise ScantlingInputError(f"all {self.count} blocks of the cache are held")
        self._holders[block] = 1
        return block

    def give_back(self, blocks: Sequence[int]) -> None:
        """Hold these no longer; the last ones of a row are the first to be forgotten."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if block in self._name:
                self._idle[block] = None
            else:
                self._fresh.append(block)

    def begin(self, ids: Sequence[int]) -> tuple[list[int], int]:
        """Blocks, now held, that have the beginning of `ids` already, but not all; and the chain that they end."""
        held, chain = [], 0
        for start in range(0, len(ids) - self.size, self.size):
            found = self._known.get((chain, tuple(ids[start : start + self.size])))
            if found is None:
                break
            block, chain = found
            self._idle.pop(block, None)
            self._holders[block] += 1
            held.append(block)
        return held, chain

    def publish(self, block: int, chain: int, ids: Sequence[int]) -> int:
        """Say what a full block holds behind a chain (0 at the beginning); the chain that it ends."""
        name = (chain, tuple(ids))
        if name in self._known:
            return self._known[name][1]
        self._chains += 1
        self._known[name], self._name[block] = (block, self._chains), name
        return self._chains


class PagedCache:
    """The blocks' numbers: by path (count, H_kv, size, D)."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        count: int,
        dtype: torch.dtype,
        device: torch.device | str,
        numbers: str = "plain",
    ) -> None:
        """shapes: `Part.named_state` of the model at one row of a block's positions."""
        self.stores = {path: store(numbers, (count, *shape[1:]), dtype, device) for path, shape in shapes.items()}
        self._device = device

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(kept.nbytes for kept in self.stores.values())

    def rows(self, tables: Sequence[Sequence[int]], pasts: Sequence[int], size: int) -> PagedRows:
        """The cache as a pass sees it whose row i has `pasts[i]` positions in the blocks `tables[i]`."""
        width = max(map(len, tables))
        padded = [[*table, *[0] * (width - len(table))] for table in tables]
        places = torch.tensor(padded, device=self._device), torch.tensor(pasts, device=self._device)
        return PagedRows(self, *places, size)


class PagedRows:
    """Some rows of a paged cache during one pass; see `KeyCache`.

    Attributes:
        length: positions of the longest row.
        pasts: (B,) of each.
    """

    def __init__(self, cache: PagedCache, tables: Tensor, pasts: Tensor, size: int) -> None:
        self._cache, self._tables, self._size, self._each = cache, tables, size, pasts
        self.length = int(pasts.max())
        self.pasts = None if int(pasts.min()) == self.length else pasts

    def append(self, path: str, new: Tensor) -> Tensor:
        """Keep new (B, H, T, D) behind each row's own and return all, padded on the right: (B, H, length + T, D)."""
        kept, tokens = self._cache.stores[path], new.shape[2]
        places = self._each[:, None] + torch.arange(tokens, device=new.device)
        blocks = self._tables.gather(1, places // self._size)
        kept.put((blocks, slice(None), places % self._size), new.transpose(1, 2))
        end = self.length + tokens
        found = kept.get((self._tables[:, : -(-end // self._size)],))
        batch, blocks_read, heads, size, width = found.shape
        return found.transpose(1, 2).reshape(batch, heads, blocks_read * size, width)[:, :, :end]

    def read(self, path: str) -> Tensor:
        """Not of a decoder: it has no source."""
        raise ScantlingInputError("a paged cache holds decoders; an encoder-decoder keeps its source whole")

    def write(self, path: str, whole: Tensor) -> None:
        """Not of a decoder: it has no source."""
        raise ScantlingInputError("a paged cache holds decoders; an encoder-decoder keeps its source whole")


class TableRows:
    """One token of each of some rows of a paged cache, where every size may be open; see `KeyCache`.

    Attributes:
        length: positions that the tables hold beside this pass.
        pasts: (B,) of each row.
    """

    def __init__(self, stores: Mapping[str, Tensor], tables: Tensor, pasts: Tensor) -> None:
        """stores: by path (count, H, size, D), written to; tables: (B, W) blocks, any block behind a row's own."""
        self._stores, self._tables, self.pasts = stores, tables, pasts
        self._size = next(iter(stores.values())).shape[2]
        self.length = tables.shape[1] * self._size - 1

    def append(self, path: str, new: Tensor) -> Tensor:
        """Keep new (B, H, 1, D) behind each row's own and return all that the tables hold: (B, H, W * size, D)."""
        kept = self._stores[path]
        block = self._tables.gather(1, self.pasts[:, None] // self._size)[:, 0]
        kept.transpose(1, 2).index_put_((block, self.pasts % self._size), new[:, :, 0].to(kept.dtype))
        found = kept[self._tables]
        batch, blocks, heads, size, width = found.shape
        return found.transpose(1, 2).reshape(batch, heads, blocks * size, width)

    def read(self, path: str) -> Tensor:
        """Not of a decoder: it has no source."""
        raise ScantlingInputError("a paged cache holds decoders; an encoder-decoder keeps its source whole")

    def write(self, path: str, whole: Tensor) -> None:
        """Not of a decoder: it has no source."""
        raise ScantlingInputError("a paged cache holds decoders; an encoder-decoder keeps its source whole")
