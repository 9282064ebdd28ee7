"""The cache of an engine, and which of its blocks each request holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from scantling.errors import ScantlingInputError
from scantling.generate.packed_pages import PackedPages
from scantling.parts.part import Workload
from scantling.tensor.paged import Blocks, PagedCache, PagedRows

if TYPE_CHECKING:
    from scantling.generate.limits import Limits
    from scantling.generate.request import Handle
    from scantling.model import Model


class Pages:
    """Blocks that requests take as their texts grow, and others that an encoder-decoder's sources take once.

    What is kept of a source stays with its request until the request is over, also while it has no block of its text.

    Attributes:
        texts, sources: who holds which; of a model that reads no source there are no blocks of sources.
        cache: what stands in them.
    """

    def __init__(self, model: Model, limits: Limits, shares: bool) -> None:
        """shares: requests that begin alike, and have the same source if any, share the blocks of their beginning."""
        size, self._shares = limits.block, shares
        self.texts = Blocks(limits.positions // size, size)
        self.sources = Blocks(limits.of_sources // size if model.parts.two_stacks else 0, size)
        self.cache: PagedCache | PackedPages
        if model.packed is not None:
            self.cache = PackedPages(model, model.packed, limits)
        else:
            parts, place = model.parts, (model.dtype, model.device, limits.numbers)
            shapes, of_source = parts.named_state(Workload(tokens=size)), parts.source_slots
            self.cache = PagedCache(shapes, self.texts.count, *place, of_source, self.sources.count)

    def check(self, handle: Handle) -> None:
        """Refuse what does not fit.

        Raises:
            ScantlingInputError: the cache could not hold the request even alone.
        """
        source, needed = len(handle.source), self.texts.needed(handle.most)
        if needed > self.texts.count:
            read = "" if source else f"a prompt of {len(handle.prompt)} tokens and "
            raise ScantlingInputError(
                f"{read}{handle.limit} new {'tokens' if source else 'ones'} need {needed} blocks of {self.texts.size} "
                f"positions and the cache has {self.texts.count}: allow fewer new tokens, or give the cache more "
                "positions"
            )
        if (needed := self.sources.needed(source)) > self.sources.count:
            raise ScantlingInputError(
                f"a source of {source} tokens needs {needed} blocks of {self.sources.size} positions and the cache has "
                f"{self.sources.count} for sources: give it more positions of sources"
            )

    def admit(self, handle: Handle, positions: int, spare: int) -> bool:
        """Blocks for so many positions of a request's text, and for its source; whether there were enough.

        Args:
            spare: blocks of texts that have to stay free beside.
        """
        table, chain = self.texts.begin(handle.whole, handle.root) if self._shares else ([], handle.root)
        new = self.texts.needed(positions) - len(table)
        of_source = self.sources.needed(len(handle.source)) - len(handle.source_table)
        if new + spare > self.texts.free or of_source > self.sources.free:
            self.texts.give_back(table)
            return False
        handle.table, handle.chain, handle.past = table, chain, len(table) * self.texts.size
        handle.source_table += [self.sources.take() for _ in range(of_source)]
        return self.hold(handle, positions)

    def hold(self, handle: Handle, positions: int) -> bool:
        """Blocks for so many positions of a request's text; whether there were enough."""
        while len(handle.table) < self.texts.needed(positions):
            if not self.texts.free:
                return False
            handle.table.append(self.texts.take())
        return True

    def filled(self, handle: Handle, new: int) -> None:
        """So many more positions of its text, and what is kept of its source, are in the cache."""
        size, whole = self.texts.size, handle.whole
        if self._shares:
            for i in range(handle.past // size, (handle.past + new) // size):
                handle.chain = self.texts.publish(handle.table[i], handle.chain, whole[i * size : (i + 1) * size])
        handle.past, handle.unread = handle.past + new, False

    def forget(self, handle: Handle) -> None:
        """Take the blocks of its text."""
        self.texts.give_back(handle.table)
        handle.table, handle.past, handle.chain = [], 0, handle.root

    def release(self, handle: Handle) -> None:
        """Take all its blocks."""
        self.forget(handle)
        self.sources.give_back(handle.source_table)
        handle.source_table = []

    def nbytes_of(self, handle: Handle) -> int:
        """Bytes of the blocks that it holds."""
        return self.cache.nbytes_of(len(handle.table), len(handle.source_table))

    def rows(self, handles: Sequence[Handle]) -> PagedRows:
        """The cache as a pass of these requests sees it; not of a compiled pass, which has its own."""
        assert isinstance(self.cache, PagedCache)
        texts = [handle.table for handle in handles], [handle.past for handle in handles]
        sources = [handle.source_table for handle in handles], [len(handle.source) for handle in handles]
        return self.cache.rows(*texts, self.texts.size, *(sources if self.sources.count else ()))
