"""Sessions that go through the compiled pass: the same interface, weights packed as they are stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scantling.checkpoint.families.gguf import architecture
from scantling.checkpoint.gguf import read_gguf
from scantling.errors import ScantlingInputError
from scantling.native.decoder import Decoder
from scantling.native.library import missing
from scantling.native.packed import Packed
from scantling.native.program import outline
from scantling.native.weights import OfGGUF, OfNet, Weights

if TYPE_CHECKING:
    from scantling.model import Model

ACTIVATIONS = ("exact", "int8")


@dataclass(frozen=True)
class PackedWeights:
    """What a model decodes with instead of its net.

    Attributes:
        weights: in tiles.
        activations: ``exact``, in float32; or ``int8``, rounded where they meet 8- and 4-bit weights.
    """

    weights: Packed
    activations: str = "exact"

    def session(self, model: Model, batch: int, capacity: int) -> PackedSession:
        """An empty cache for so many positions of so many rows."""
        return PackedSession(model, self, batch, capacity)


def why_not(model: Model) -> str | None:
    """Why the compiled pass cannot decode with this model; None where it can."""
    found = outline(model.parts)
    if isinstance(found, str):
        return f"the compiled pass does not know {model.card.name}: {found}"
    if model.device.type != "cpu":
        return f"the compiled pass runs on the CPU, and the weights are on {model.device}"
    return missing()


def pack(model: Model, width: str, activations: str) -> PackedWeights:
    """See `Model.pack`."""
    if activations not in ACTIVATIONS:
        raise ScantlingInputError(f"activations are {activations!r}; use {' or '.join(ACTIVATIONS)}")
    if (why := why_not(model)) is not None:
        raise ScantlingInputError(why)
    found = outline(model.parts)
    assert not isinstance(found, str)
    packed = Packed(found, _weights(model, width), keep=model.file is not None)
    if activations == "int8" and not packed.library.sc_integer_dot():
        raise ScantlingInputError("8-bit activations need a processor with AVX-512 VNNI; the exact pass runs here")
    return PackedWeights(packed, activations)


def _weights(model: Model, width: str) -> Weights:
    if model.file is None:
        return OfNet(model.net.state_dict(), width)
    header = read_gguf(model.file)
    rows = tuple(architecture(header.metadata, str(model.file)).rows(model.card))
    return OfGGUF(header, rows, model.parts.named_weights, width)


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
        quantised = packed.activations == "int8"
        self.model, self._vocab = model, model.card.vocab_size
        self._decoder = Decoder(packed.weights, slots=batch, capacity=capacity, quantised=quantised)
        self.cache = Kept(self._decoder.cache_nbytes)
        self._lengths = [0] * batch

    @property
    def filled(self) -> int:
        """Positions of the longest row."""
        return max(self._lengths)

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
        self._lengths = [length - tokens for length in self._lengths]

    def select(self, rows: Tensor) -> None:
        """Make row i what row `rows[i]` was; the number of rows may change."""
        chosen = rows.tolist()
        self._decoder = self._decoder.select(chosen)
        self.cache = Kept(self._decoder.cache_nbytes)
        self._lengths = [self._lengths[row] for row in chosen]

    def _run(self, rows: list[tuple[int, int]], wanted: list[bool]) -> Tensor:
        """Tokens of slots in order, as many a pass as it takes: logits of the wanted ones, (n, V)."""
        found = []
        most = self._decoder.most_rows
        for start in range(0, len(rows), most):
            piece, asked = rows[start : start + most], wanted[start : start + most]
            slots = [slot for slot, _ in piece]
            self._decoder.run([token for _, token in piece], slots, self._places(slots), asked)
            if any(asked):
                found.append(torch.tensor(self._decoder.logits[: sum(asked), : self._vocab]))
        return torch.cat(found)

    def _places(self, slots: list[int]) -> list[int]:
        places = []
        for slot in slots:
            places.append(self._lengths[slot])
            self._lengths[slot] += 1
        return places
