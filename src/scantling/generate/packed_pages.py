"""The engine's cache in blocks, in the compiled pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from scantling.errors import ScantlingInputError
from scantling.native.decoder import Decoder
from scantling.native.tiles import ROWS

if TYPE_CHECKING:
    from scantling.generate.limits import Limits
    from scantling.generate.packed import PackedWeights
    from scantling.model import Model


class PackedPages:
    """Blocks of positions that requests take as they grow; a token's result does not depend on who else is computed.

    Attributes:
        nbytes: of keys and values.
    """

    def __init__(self, model: Model, packed: PackedWeights, limits: Limits) -> None:
        """Allocate as many blocks as `limits` say.

        Raises:
            ScantlingInputError: blocks or numbers that the compiled pass does not have.
        """
        if limits.block % ROWS:
            raise ScantlingInputError(
                f"the compiled pass keeps blocks of a multiple of {ROWS} positions, and {limits.block} are asked for"
            )
        if limits.numbers != "plain":
            raise ScantlingInputError(f"the compiled pass keeps float32, and numbers are to be {limits.numbers!r}")
        self._pages_of_block = limits.block // ROWS
        self._vocab = model.card.vocab_size
        self._count = count = limits.positions // limits.block
        self._decoder = Decoder(
            packed.weights,
            slots=limits.rows,
            capacity=min(model.card.context, count * limits.block),
            pages=count * self._pages_of_block,
            quantised=packed.activations == "int8",
        )
        self.nbytes = self._decoder.cache_nbytes

    def nbytes_of(self, blocks: int, source_blocks: int = 0) -> int:
        """Bytes of so many blocks; there are none of sources."""
        return self.nbytes // self._count * blocks

    def read(self, tables: Sequence[Sequence[int]], pasts: Sequence[int], ids: Tensor) -> Tensor:
        """Bring ids (B, T) behind what rows have in their blocks: logits (B, V) of the last position."""
        each, new = self._pages_of_block, ids.shape[1]
        for row, table in enumerate(tables):
            pages = (np.array(table)[:, None] * each + np.arange(each)).reshape(-1)[: self._decoder.pages.shape[1]]
            self._decoder.pages[row, : len(pages)] = pages
        tokens = [int(token) for row in ids.tolist() for token in row]
        slots = [row for row in range(len(pasts)) for _ in range(new)]
        places = [past + i for past in pasts for i in range(new)]
        wanted = [(i + 1) % new == 0 for i in range(len(tokens))]
        found = []
        for start in range(0, len(tokens), self._decoder.most_rows):
            piece = slice(start, start + self._decoder.most_rows)
            self._decoder.run(tokens[piece], slots[piece], places[piece], wanted[piece])
            if asked := sum(wanted[piece]):
                found.append(torch.tensor(self._decoder.logits[:asked, : self._vocab]))
        return torch.cat(found)
