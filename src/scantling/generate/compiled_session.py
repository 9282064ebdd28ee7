"""Sessions whose steps are compiled: the interface of `Session`, over a cache of a fixed size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scantling.errors import ScantlingInputError
from scantling.generate.session import check_chunk
from scantling.tensor.context import Context
from scantling.tensor.pages import for_pass

if TYPE_CHECKING:
    from scantling.generate.compiled import Compiled
    from scantling.model import Model

PIECE = 64
"""Positions that a step reads are rounded up to a multiple of this: those behind a row's own are masked."""


class CompiledSession:
    """Rows that advance together, each from position 0 of its own: padding of prompts is never kept.

    Prompts, and several tokens at once, go through the net; single tokens through the compiled step. Both fill one
    cache.

    Attributes:
        cache: holds `capacity` positions of every layer.
        filled: positions of the longest row.
    """

    source = None

    def __init__(self, model: Model, compiled: Compiled, batch: int, capacity: int) -> None:
        from scantling.generate.compiled import fits, slots

        if (why := fits(model, capacity)) is not None:
            raise ScantlingInputError(why)
        self.model, self._compiled = model, compiled
        self.cache = slots(model, batch, capacity)
        self.filled = 0
        self._pasts = torch.zeros(batch, dtype=torch.int64, device=model.device)
        self._alike = True
        self._step = compiled.step(model, self.cache, batch)
        self._slots: list[Tensor] = []
        self._read = 0

    def prefill(self, ids: Tensor, attention_mask: Tensor | None = None, chunk: int | None = None) -> Tensor:
        """The prompts, ids (B, T), padded left where `attention_mask` is 0: logits (B, V) of each one's last token.

        Raises:
            ScantlingInputError: padded rows after others, a chunk below 1, or chunks where pieces are not the whole.
        """
        if attention_mask is None or bool(attention_mask.all()):
            prefixes = self._prefixes(ids.shape[1])
            if chunk is None or chunk >= ids.shape[1]:
                return self._through_net(ids, prefixes=prefixes)[:, -1]
            check_chunk(self.model, chunk)
            for start in range(0, ids.shape[1], chunk):
                logits = self._through_net(ids[:, start : start + chunk])
            return logits[:, -1]
        if self.filled:
            raise ScantlingInputError("padded rows are prefilled in one piece")
        return self._padded(ids, attention_mask.bool(), chunk)

    def _padded(self, ids: Tensor, real: Tensor, chunk: int | None) -> Tensor:
        """Rows moved to the left: what then stands behind one is written over by its next tokens before it is read."""
        lengths, width = real.sum(-1), ids.shape[1]
        places = torch.arange(width, device=ids.device) + (width - lengths)[:, None]
        moved = ids.gather(1, places.clamp(max=width - 1))
        if chunk is not None:
            check_chunk(self.model, chunk)
        size, found = min(chunk or width, width), None
        for start in range(0, width, size):
            piece, ends = moved[:, start : start + size], lengths - 1 - start
            last = ends.clamp(0, piece.shape[1] - 1)
            logits = self._through_net(piece, prefixes=lengths if self.model.reads_prefix else None, last_at=last)[:, 0]
            here = ((ends >= 0) & (ends < piece.shape[1]))[:, None]
            found = logits if found is None else torch.where(here, logits, found)
        self._pasts, self._alike = lengths.clone(), False
        assert found is not None
        return found

    def _prefixes(self, tokens: int) -> Tensor | None:
        return (
            self._pasts.new_full((len(self._pasts),), tokens) if self.model.reads_prefix and not self.filled else None
        )

    def step(self, ids: Tensor) -> Tensor:
        """One more token per row, ids (B): logits (B, V)."""
        if self.filled >= self._read:
            self._read = max(min(-(-(self.filled + 1) // PIECE) * PIECE, self.cache.capacity), self.filled + 1)
            self._slots = self.cache.first(self._read)
        logits = self._step(ids, self._pasts, self._slots)
        self._advance(1)
        return logits

    def score(self, ids: Tensor, last_only: bool = False) -> Tensor:
        """More tokens per row, ids (B, T): logits (B, T, V) of every position, or of the last one (B, 1, V)."""
        return self.step(ids[:, 0])[:, None] if ids.shape[1] == 1 else self._through_net(ids, last_only)

    def rewind(self, tokens: int) -> None:
        """Forget the last so many positions of every row."""
        self._advance(-tokens)

    def select(self, rows: Tensor) -> None:
        """Make row i what row `rows[i]` was; the number of rows may change."""
        self.cache.select(rows)
        self._pasts = self._pasts[rows]
        self._step, self._read = self._compiled.step(self.model, self.cache, len(rows)), 0

    def _through_net(
        self,
        ids: Tensor,
        last_only: bool = True,
        *,
        prefixes: Tensor | None = None,
        last_at: Tensor | None = None,
    ) -> Tensor:
        tokens, cache, positions = ids.shape[1], self.cache, None
        if not self._alike:
            cache = self.cache.rows(self._pasts, self.filled + tokens, tokens)  # type: ignore[assignment]
            positions = self._pasts[:, None] + torch.arange(tokens, device=ids.device)
        ctx = Context.of(ids, positions=positions, cache=cache, last_only=last_only, prefix_lengths=prefixes)
        ctx.last_at = last_at
        with for_pass(ids.device, ids.numel()):
            logits: Tensor = self.model.net(ids, ctx, None)
        self._advance(tokens)
        return logits

    def _advance(self, tokens: int) -> None:
        self.filled += tokens
        self._pasts = self._pasts + tokens
        self.cache.length = self.filled
