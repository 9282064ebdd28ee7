"""Sessions that go through the compiled pass: the interface of `Session`, tensors in and out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scantling.errors import ScantlingInputError

if TYPE_CHECKING:
    from scantling.generate.packed import PackedWeights
    from scantling.model import Model


@dataclass(frozen=True)
class Kept:
    """The cache of a packed session, as others report it."""

    nbytes: int


class PackedSession:
    """Rows that advance together, each a sequence of its own in the compiled pass: padding is never read.

    Attributes:
        cache: how many bytes it has.
        filled: positions of the longest row.
    """

    source = None

    def __init__(self, model: Model, packed: PackedWeights, batch: int, capacity: int) -> None:
        self.model, self._vocab = model, model.card.vocab_size
        self._texts = packed.texts(batch, capacity)
        self.cache = Kept(self._texts.decoder.cache_nbytes)

    @property
    def filled(self) -> int:
        """Positions of the longest row."""
        return max(self._texts.lengths)

    def prefill(self, ids: Tensor, attention_mask: Tensor | None = None, chunk: int | None = None) -> Tensor:
        """The prompts, ids (B, T), padded anywhere where `attention_mask` is 0: logits (B, V) of each one's last token.

        Args:
            chunk: checked; the pass takes rows in pieces of its own.

        Raises:
            ScantlingInputError: a chunk below 1, or a row without a token.
        """
        if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
            raise ScantlingInputError(f"prefill chunk is {chunk!r}; a whole number of at least 1 is needed")
        real = torch.ones_like(ids) if attention_mask is None else attention_mask
        texts = [row[mask.bool()].tolist() for row, mask in zip(ids, real, strict=True)]
        if not all(texts):
            raise ScantlingInputError("a row is padding only: at least one real token is needed")
        rows = [(slot, token) for slot, text in enumerate(texts) for token in text]
        ends = [slot + 1 == len(rows) or rows[slot + 1][0] != rows[slot][0] for slot in range(len(rows))]
        return self._run(rows, ends)

    def step(self, ids: Tensor) -> Tensor:
        """One more token per row, ids (B): logits (B, V)."""
        return self._run(list(enumerate(ids.tolist())), [True] * len(ids))

    def score(self, ids: Tensor, last_only: bool = False) -> Tensor:
        """More tokens per row, ids (B, T): logits (B, T, V) of every position, or of the last one (B, 1, V)."""
        batch, tokens = ids.shape
        rows = [(slot, token) for slot, text in enumerate(ids.tolist()) for token in text]
        wanted = [not last_only or (i + 1) % tokens == 0 for i in range(len(rows))]
        return self._run(rows, wanted).view(batch, -1, self._vocab)

    def rewind(self, tokens: int) -> None:
        """Forget the last so many positions of every row."""
        self._texts.lengths = [length - tokens for length in self._texts.lengths]

    def select(self, rows: Tensor) -> None:
        """Make row i what row `rows[i]` was; the number of rows may change."""
        self._texts.select(rows.tolist())
        self.cache = Kept(self._texts.decoder.cache_nbytes)

    def _run(self, rows: list[tuple[int, int]], wanted: list[bool]) -> Tensor:
        """Tokens of slots in order: logits of the wanted ones, (n, V)."""
        return torch.from_numpy(self._texts.read(rows, wanted)[:, : self._vocab])
