"""A cache in blocks of positions: rows take them as they grow and share them where they begin alike.

(Kwon et al., arXiv:2309.06180, section 4.)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from scantling.errors import ScantlingInputError
from scantling.tensor.store import Store, store

Chain: TypeAlias = int | tuple[int, ...]
"""What stands before a block: the number of the block before it, or what a beginning depends on besides its ids."""


class Blocks:
    """Who holds which of `count` blocks of `size` positions.

    A full block is known by what stands in it and before it, so that another row that begins alike reads it too. One
    that nobody holds any more stays known until its place is needed, the one unused for longest first.
    """

    def __init__(self, count: int, size: int) -> None:
        for name, value, least in (("blocks", count, 0), ("block size", size, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ScantlingInputError(
                    f"{name} of the cache: {value!r}; a whole number of at least {least} is needed"
                )
        self.count, self.size = count, size
        self._holders = [0] * count
        self._fresh = list(range(count - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._known: dict[tuple[Chain, tuple[int, ...]], tuple[int, int]] = {}
        self._name: dict[int, tuple[Chain, tuple[int, ...]]] = {}
        self._chains = 0

    @property
    def free(self) -> int:
        """Blocks that may be taken."""
        return len(self._fresh) + len(self._idle)

    def needed(self, positions: int) -> int:
        """Blocks that hold so many positions of a row."""
        return -(-positions // self.size)

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

    def begin(self, ids: Sequence[int], root: Chain = 0) -> tuple[list[int], Chain]:
        """Blocks, now held, that have the beginning of `ids` already, but not all; and the chain that they end.

        Args:
            root: what the row depends on besides its ids, such as its source: rows of different roots share nothing.
        """
        held, chain = list[int](), root
        for start in range(0, len(ids) - self.size, self.size):
            found = self._known.get((chain, tuple(ids[start : start + self.size])))
            if found is None:
                break
            block, chain = found
            self._idle.pop(block, None)
            self._holders[block] += 1
            held.append(block)
        return held, chain

    def publish(self, block: int, chain: Chain, ids: Sequence[int]) -> int:
        """Say what a full block holds behind a chain (the root at the beginning); the chain that it ends."""
        name = (chain, tuple(ids))
        if name in self._known:
            return self._known[name][1]
        self._chains += 1
        self._known[name], self._name[block] = (block, self._chains), name
        return self._chains


class Places:
    """Where the positions of some rows are in stores of blocks.

    Attributes:
        lengths: (B,) positions of each row.
        longest: of them.
    """

    def __init__(
        self, tables: Sequence[Sequence[int]], lengths: Sequence[int], size: int, device: torch.device | str
    ) -> None:
        """tables: the blocks of each row, at least as many as its positions need."""
        width = max(map(len, tables))
        self._tables = torch.tensor([[*table, *[0] * (width - len(table))] for table in tables], device=device)
        self._size, self.longest = size, max(lengths)
        self.lengths = torch.tensor(lengths, device=device)
        self.alike = min(lengths) == self.longest

    def real(self) -> Tensor | None:
        """(B, longest) bool, True at the positions of each row; None where all have as many."""
        if self.alike:
            return None
        return torch.arange(self.longest, device=self.lengths.device) < self.lengths[:, None]

    def put(self, kept: Store, new: Tensor, first: Tensor, real: Tensor | None = None) -> None:
        """Keep new (B, H, T, D) from position `first` (B,) of each row on; of them only the `real` (B, T)."""
        places = first[:, None] + torch.arange(new.shape[2], device=new.device)
        blocks, values = self._tables.gather(1, places // self._size), new.transpose(1, 2)
        if real is not None:
            blocks, places, values = blocks[real], places[real], values[real]
        kept.put((blocks, places % self._size), values)

    def get(self, kept: Store, end: int) -> Tensor:
        """The positions before `end`: (B, H, end, D), where a row has fewer with what happens to stand there."""
        return kept.get((self._tables[:, : -(-end // self._size)],)).flatten(1, 2).transpose(1, 2)[:, :, :end]


class PagedCache:
    """The blocks' numbers: by path (count, size, H_kv, D); those of sources have a count of their own.

    Positions come before heads, so that blocks that are read lie one after the other as a row's positions do.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        count: int,
        dtype: torch.dtype,
        device: torch.device | str,
        numbers: str = "plain",
        of_source: Collection[str] = (),
        source_count: int = 0,
    ) -> None:
        """shapes: `Part.named_state` of the model at one row of a block's positions; of_source: its `source_slots`."""
        counts = {path: source_count if path in of_source else count for path in shapes}
        self.stores = {
            path: store(numbers, (counts[path], size, heads, width), dtype, device)
            for path, (_, heads, size, width) in shapes.items()
        }
        self._counts, self._of_source, self._device = (count, source_count), frozenset(of_source), device

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(kept.nbytes for kept in self.stores.values())

    def nbytes_of(self, blocks: int, source_blocks: int = 0) -> int:
        """Bytes of so many blocks of texts and of sources."""
        sources = sum(self.stores[path].nbytes for path in self._of_source)
        texts, (count, source_count) = self.nbytes - sources, self._counts
        return texts // count * blocks + (sources // source_count * source_blocks if source_count else 0)

    def rows(
        self,
        tables: Sequence[Sequence[int]],
        pasts: Sequence[int],
        size: int,
        source_tables: Sequence[Sequence[int]] = (),
        source_lengths: Sequence[int] = (),
    ) -> PagedRows:
        """The cache as a pass sees it whose row i has `pasts[i]` positions in the blocks `tables[i]`.

        Args:
            source_tables, source_lengths: of an encoder-decoder, the same of each row's source.
        """
        sources = Places(source_tables, source_lengths, size, self._device) if source_tables else None
        return PagedRows(self, Places(tables, pasts, size, self._device), sources)


class PagedRows:
    """Some rows of a paged cache during one pass; see `KeyCache`.

    Attributes:
        length: positions of the longest row.
        pasts: (B,) of each.
        source_padding: (B, S) of the sources, S being the longest.
    """

    def __init__(self, cache: PagedCache, texts: Places, sources: Places | None) -> None:
        self._cache, self._texts, self._sources = cache, texts, sources
        self.length, self.pasts = texts.longest, None if texts.alike else texts.lengths
        self.source_padding = None if sources is None else sources.real()

    def append(self, path: str, new: Tensor) -> Tensor:
        """Keep new (B, H, T, D) behind each row's own and return all, padded on the right: (B, H, length + T, D)."""
        kept = self._cache.stores[path]
        self._texts.put(kept, new, self._texts.lengths)
        return self._texts.get(kept, self.length + new.shape[2])

    def read(self, path: str) -> Tensor:
        """What is kept of the sources, padded on the right: (B, H, S, D)."""
        sources = self._of_source()
        return sources.get(self._cache.stores[path], sources.longest)

    def write(self, path: str, whole: Tensor) -> None:
        """Keep (B, H, S, D) of the sources, of each row what is no padding.

        Raises:
            ScantlingInputError: of sources of another length.
        """
        sources = self._of_source()
        if whole.shape[2] != sources.longest:
            raise ScantlingInputError(
                f"the cache holds a source of {sources.longest} positions and this one has {whole.shape[2]}"
            )
        sources.put(self._cache.stores[path], whole, torch.zeros_like(sources.lengths), self.source_padding)

    def _of_source(self) -> Places:
        if self._sources is None:
            raise ScantlingInputError("rows of an encoder-decoder need the blocks of their sources")
        return self._sources


class TableRows:
    """One token of each of some rows of a paged cache, where every size may be open; see `KeyCache`.

    Attributes:
        length: positions that the tables hold beside this pass.
        pasts: (B,) of each row.
    """

    source_padding: None = None

    def __init__(self, stores: Mapping[str, Tensor], tables: Tensor, pasts: Tensor) -> None:
        """stores: by path (count, size, H, D), written to; tables: (B, W) blocks, any block behind a row's own."""
        self._stores, self._tables, self.pasts = stores, tables, pasts
        self._size = next(iter(stores.values())).shape[1]
        self.length = tables.shape[1] * self._size - 1

    def append(self, path: str, new: Tensor) -> Tensor:
        """Keep new (B, H, 1, D) behind each row's own and return all that the tables hold: (B, H, W * size, D)."""
        kept = self._stores[path]
        block = self._tables.gather(1, self.pasts[:, None] // self._size)[:, 0]
        kept.index_put_((block, self.pasts % self._size), new[:, :, 0].to(kept.dtype))
        return kept[self._tables].flatten(1, 2).transpose(1, 2)

    def read(self, path: str) -> Tensor:
        """Not in a compiled step, which is one of a decoder."""
        raise ScantlingInputError("a compiled step reads one text and has no source")

    def write(self, path: str, whole: Tensor) -> None:
        """Not in a compiled step, which is one of a decoder."""
        raise ScantlingInputError("a compiled step reads one text and has no source")
