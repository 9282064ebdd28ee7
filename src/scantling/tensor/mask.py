"""Visibility and padding as the boolean masks that kernels take, by rows, and the cases where none is needed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from scantling.visibility import Visibility


@dataclass(frozen=True)
class Packed:
    """Rows that hold several documents, each of which is read as if it were alone.

    Attributes:
        documents: (B, T) numbers; each run of one number is a document, of a negative one padding.
        starts: (B, T) where the document of each token begins in its row.
    """

    documents: Tensor
    starts: Tensor

    @classmethod
    def of(cls, documents: Tensor) -> Packed:
        """The documents of a pass by the number of each token, (B, T)."""
        place = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
        new = torch.ones_like(documents, dtype=torch.bool)
        new[:, 1:] = documents[:, 1:] != documents[:, :-1]
        return cls(documents, place.masked_fill(~new, 0).cummax(-1).values)

    @property
    def positions(self) -> Tensor:
        """(B, T) positions that begin at 0 in every document."""
        return torch.arange(self.starts.shape[1], device=self.starts.device) - self.starts

    @property
    def longest(self) -> int:
        """Tokens of the longest document; padding is none."""
        return int(self.positions.masked_fill(self.documents < 0, 0).max()) + 1


@dataclass(frozen=True)
class Seen:
    """What the queries of one pass may read; its rows are made when they are asked for, so no T x S mask need exist.

    Attributes:
        past: positions before the first query.
        tokens: queries.
        padding: (B, past + tokens) bool, True where a key is a real token; None where all are.
        prefix: (B,) lengths of the rows' prefixes, or None.
        packed: the documents of the rows, or None; then there is neither past, nor padding, nor prefix.
        first: the position of the first key; those before it are out of every query's reach.
        pasts: (B,) positions before each row's first query where rows differ, `past` being the most; or None.
        made: what a kernel makes of it, once for all layers of a pass.
    """

    visibility: Visibility
    past: int
    tokens: int
    padding: Tensor | None
    device: torch.device
    prefix: Tensor | None = None
    packed: Packed | None = None
    first: int = 0
    pasts: Tensor | None = None
    made: dict[str, Any] = field(default_factory=dict, compare=False)
    _last: list[tuple[tuple[int, int, int, int], Tensor]] = field(default_factory=list, compare=False)

    @property
    def shared(self) -> bool:
        """Whether all rows see alike."""
        return self.padding is None and self.prefix is None and self.packed is None and self.pasts is None

    def at(self, row: Any, query: Any, key: Any) -> Any:
        """Whether a query, counted from the first of the pass, reads a key, counted from the first that there is."""
        if self.packed is not None:
            begun = self.packed.starts
            of_query, of_key = begun[row, query], begun[row, key]
            return self.visibility.sees(query - of_query, key - of_key) & (of_query == of_key)
        query = query + (self.past if self.pasts is None else self.pasts[row])
        prefix = 0 if self.prefix is None else self.prefix[row]
        if self.padding is None:
            return self.visibility.sees(query, key + self.first, prefix)
        real, key = self.padding[row, key + self.first], key + self.first
        first = self.padding.int().argmax(-1)[row] if self.visibility.anchored else 0
        # A padded query keeps itself, so that no row is empty and no softmax gives NaN.
        return (self.visibility.sees(query - first, key - first, prefix) & real) | (query == key)

    def rows(self, start: int, end: int, first_key: int = 0, last_key: int | None = None) -> Tensor:
        """For the queries [start, end) and the keys [first_key, last_key): (1 or B, 1, rows, keys), True where read."""
        keys = self.past + self.tokens - self.first if last_key is None else last_key
        wanted = (start, end, first_key, keys)
        # Layers of one pass ask for the same rows one after the other; sizes that an export leaves open have no hash.
        if not self._last or self._last[0][0] != wanted:
            self._last[:] = [(wanted, self._made(*wanted))]
        return self._last[0][1]

    def _made(self, start: int, end: int, first_key: int, keys: int) -> Tensor:
        first_key, keys = first_key + self.first, keys + self.first
        query = torch.arange(start, end, device=self.device)[None, :, None]
        query = query + (self.past if self.pasts is None else self.pasts[:, None, None])
        key = torch.arange(first_key, keys, device=self.device)[None, None, :]
        prefix = 0 if self.prefix is None else self.prefix[:, None, None]
        if self.padding is not None and self.visibility.anchored:
            first = self.padding.int().argmax(-1)[:, None, None]
            query, key = query - first, key - first
        if self.packed is not None:
            begun = self.packed.starts
            of_query, of_key = begun[:, start:end, None], begun[:, None, first_key:keys]
            alone: Tensor = self.visibility.sees(query - of_query, key - of_key) & (of_query == of_key)
            return alone[:, None]
        seen: Tensor = self.visibility.sees(query, key, prefix)[:, None]
        if self.padding is not None:
            # A padded query keeps itself, so that no row is empty and no softmax gives NaN.
            seen = (seen & self.padding[:, None, None, first_key:keys]) | (query == key)[:, None]
        return seen

    def span(self, start: int, end: int) -> tuple[int, int]:
        """The keys that the queries [start, end) can see at all, counted from the first that there is."""
        low, high = self._span(start, end)
        return max(0, low - self.first), high - self.first

    def _span(self, start: int, end: int) -> tuple[int, int]:
        keys, last = self.past + self.tokens, self.past + end - 1
        if (self.padding is not None or self.packed is not None) and self.visibility.anchored:
            # Each row has its own first position, so there are no edges that all share.
            return 0, last + 1 if self.visibility.causal and self.prefix is None else keys
        least = self.past if self.pasts is None else int(self.pasts.min())
        return self.visibility.span(least + start, last, keys, 0 if self.prefix is None else keys)


@dataclass(frozen=True)
class Real:
    """Every real key is read by every query: the source as the decoder sees it.

    Attributes:
        padding: (B, S) bool, True where a key is a real token.
    """

    padding: Tensor
    made: dict[str, Any] = field(default_factory=dict, compare=False)

    def rows(self, start: int, end: int, first_key: int = 0, last_key: int | None = None) -> Tensor:
        """(B, 1, rows, keys), True where a key is real."""
        seen = self.padding[:, None, None, first_key:last_key]
        return seen.expand(-1, 1, end - start, -1)

    def span(self, start: int, end: int) -> tuple[int, int]:
        """All keys."""
        return 0, self.padding.shape[1]


@dataclass(frozen=True)
class Paired:
    """The source as the decoder sees it where rows are packed: a document reads the source of the same number.

    Attributes:
        documents: (B, T) numbers of the queries.
        sources: (B, S) numbers of the keys.
    """

    documents: Tensor
    sources: Tensor
    made: dict[str, Any] = field(default_factory=dict, compare=False)

    def rows(self, start: int, end: int, first_key: int = 0, last_key: int | None = None) -> Tensor:
        """(B, 1, rows, keys), True where both are of one document."""
        seen = self.documents[:, start:end, None] == self.sources[:, None, :]
        # A document without a source, such as padding, reads all of them, so that no softmax gives NaN.
        return (seen | ~seen.any(-1, keepdim=True))[:, None, :, first_key:last_key]

    def span(self, start: int, end: int) -> tuple[int, int]:
        """All keys."""
        return 0, self.sources.shape[1]


def build(
    visibility: Visibility,
    tokens: int,
    past: int,
    padding: Tensor | None,
    device: torch.device,
    explicit: bool = False,
    prefix: Tensor | None = None,
    packed: Packed | None = None,
    first: int = 0,
    pasts: Tensor | None = None,
) -> tuple[Seen | None, bool]:
    """The mask for `tokens` queries after `past` keys.

    Args:
        padding: (B, past + tokens) bool, True where a key is a real token; None where all are.
        explicit: write the triangle out, for kernels that cannot be told of it.
        prefix: (B,) lengths of the rows' prefixes, or None.
        packed: the documents of the rows, or None.
        first: the position of the first key.
        pasts: (B,) keys before each row's first query, where rows differ; or None.

    Returns:
        (seen, is_causal): the rows of the mask; or None with `is_causal` telling the kernel the plain causal
        triangle; or (None, False) where everything is seen.
    """
    prefix = prefix if visibility.prefix else None
    alike = padding is None and prefix is None and packed is None and pasts is None
    if alike and not _narrows(visibility, tokens, past, first):
        if not visibility.causal or tokens == 1:
            return None, False
        if past == 0 and not explicit:
            return None, True
    return Seen(visibility, past, tokens, padding, device, prefix, packed, first, pasts), False


def _narrows(visibility: Visibility, tokens: int, past: int, first: int) -> bool:
    """Whether anything but causality hides one of the keys from `first` on."""
    keys = past + tokens
    if first and tokens == 1:
        return visibility.stride is not None or visibility.span(past, past, keys)[0] > first
    return visibility.narrows(keys)
