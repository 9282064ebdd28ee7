"""A decoder over packed weights: a cache for some sequences, and passes over it."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from scantling.errors import ScantlingInputError
from scantling.native import library as native
from scantling.native.arena import Arena, Place
from scantling.native.packed import Packed
from scantling.native.tiles import ROWS, padded
from scantling.parts.mlp import GatedMLP
from scantling.parts.position import Learned
from scantling.parts.rope import RoPE

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Decoder:
    """The cache of one or more sequences and the threads that fill it.

    Attributes:
        packed: the weights.
        slots: sequences that the cache holds.
        capacity: positions of each.
        pages: (slots, capacity / 16) where each 16 positions of a sequence are kept: at first every slot has its own
            pages, one behind the other.
        logits: (most rows, vocabulary) of the last pass, in the order of the rows that asked for them.
        cache_nbytes: of keys and values.
    """

    def __init__(
        self,
        packed: Packed,
        *,
        slots: int = 1,
        capacity: int,
        pages: int | None = None,
        threads: int | None = None,
        quantised: bool = False,
    ) -> None:
        """Allocate the cache and start the threads.

        Args:
            pages: of 16 positions that there are; default as many as all slots have. With fewer, whoever fills slots
                says which pages they have.
            threads: default one per core that this process may use.
            quantised: activations that meet 8- and 4-bit weights are rounded to 8 bits, with a scale for 32 of them.

        Raises:
            ScantlingInputError: 8-bit activations on a processor without them, or the memory does not suffice.
        """
        self.packed, self._library = packed, packed.library
        if quantised and not self._library.sc_integer_dot():
            raise ScantlingInputError("8-bit activations need a processor with AVX-512 VNNI; the exact pass runs here")
        self.slots, self.capacity = slots, padded(capacity, ROWS)
        self._own_pages = pages is None
        self._page_count = pages or slots * (self.capacity // ROWS)
        self._quantised, self._threads = quantised, threads or native.usable_cores()
        self._arena = Arena(self._library)
        self._lay_out()
        self._begin()

    def _lay_out(self) -> None:
        outline, out = self.packed.outline, self.packed.out
        a, d_head = outline.attention, outline.d_head
        widths = [out.columns, (a.n_heads + 2 * a.n_kv_heads) * d_head]
        shared = [layer.experts.shared for layer in outline.layers if layer.experts and layer.experts.shared]
        for mlp in (*(layer.mlp for layer in outline.layers), *shared):
            widths.append((2 if isinstance(mlp, GatedMLP) else 1) * padded(mlp.d_ff, ROWS))
        # An odd number of lines, so that the rows of a pass do not meet in a set of the cache.
        self._widest = padded(max(widths), 2 * ROWS) + ROWS
        most = self.most_rows
        self._scratch = self._arena.reserve(4 * self._library.sc_scratch(self._widest))
        self._scores = self._arena.reserve(4 * most * padded(out.rows, ROWS))
        schemes = {layer.attention.position for layer in outline.layers}
        self._turned = {position: self._turns(position) for position in schemes}
        kept = 4 * self._page_count * ROWS * a.n_kv_heads * d_head
        self._kept = [(self._arena.reserve(kept), self._arena.reserve(kept)) for _ in outline.layers]
        self.cache_nbytes = 2 * kept * len(outline.layers)
        self._paged = self._arena.reserve(4 * self.slots * (self.capacity // ROWS))

    def _begin(self) -> None:
        self._arena.allocate()
        self._arena.write()
        self.pages: NDArray[np.int32] = self._arena.bytes(self._paged).view(np.int32).reshape(self.slots, -1)
        if self._own_pages:
            self.pages[:] = np.arange(self.pages.size).reshape(self.pages.shape)
        told = [self._told(i) for i in range(len(self._kept))]
        self._layers = (native.Layer * len(told))(*told)
        self._program = self._program_of()
        out = self.packed.out
        shape = (self.most_rows, padded(out.rows, ROWS))
        scores: NDArray[np.float32] = self._arena.bytes(self._scores).view(np.float32).reshape(shape)
        self.logits = scores[:, : out.rows]
        self._library.sc_start(ctypes.byref(self._program), self._arena.at(self._scratch), self._widest)
        self._closed = weakref.finalize(self, _close, self._library, self._program, self._arena, self._layers)

    def _turns(self, position: Any) -> tuple[Place, Place] | None:
        """Cosines and sines of every position that fits: (capacity, turned / 2) each."""
        if not isinstance(position, RoPE):
            return None
        frequencies = np.array(position.frequencies(self.capacity), np.float32)
        angles = np.arange(self.capacity, dtype=np.float32)[:, None] * frequencies
        factor = np.float32(1.0 if position.scaling is None else position.scaling.factor_on_turns)
        size = 4 * angles.size
        return self._arena.fill(size, lambda: np.cos(angles) * factor), self._arena.fill(
            size, lambda: np.sin(angles) * factor
        )

    def _told(self, number: int) -> native.Layer:
        told = self.packed.layer(number)
        told.keys, told.values = map(self._arena.at, self._kept[number])
        turns = self._turned[self.packed.outline.layers[number].attention.position]
        told.cos, told.sin = map(self._arena.at, turns or (None, None))
        return told

    def _program_of(self) -> native.Program:
        packed, o = self.packed, self.packed.outline
        a, model, position = o.attention, o.model, o.stack.position
        return native.Program(
            d=model.table.d_model,
            heads=a.n_heads,
            kv_heads=a.n_kv_heads,
            head=o.d_head,
            turned=o.turned,
            layers=len(o.layers),
            vocab=o.head.vocab_size,
            slots=self.slots,
            capacity=self.capacity,
            threads=self._threads,
            quantised=self._quantised,
            parallel=o.parallel,
            offset=position.offset if isinstance(position, Learned) else 0,
            softcap=a.softcap or 0.0,
            clip=a.clip or 0.0,
            logit_softcap=o.head.softcap or 0.0,
            embed_scale=1.0 if model.scale is None else model.scale,
            logit_scale=1.0 if o.head.scale is None else o.head.scale,
            layer=ctypes.cast(self._layers, ctypes.c_void_p),
            table=packed.matrix(packed.table),
            out=packed.matrix(packed.out),
            places=packed.matrix(packed.places),
            embed_norm=packed.norm(packed.embed_norm),
            final_norm=packed.norm(packed.final_norm),
            pages=self._arena.at(self._paged),
            logits=self._arena.at(self._scores),
        )

    @property
    def most_rows(self) -> int:
        """Rows that one pass may have."""
        return int(self._library.sc_most_rows())

    def run(
        self, ids: Sequence[int], slots: Sequence[int], positions: Sequence[int], wanted: Sequence[bool]
    ) -> list[int]:
        """One pass: row i is the token ids[i] at positions[i] of the sequence in slots[i].

        A row reads the earlier positions of its sequence, those of this pass included.

        Returns:
            The likeliest next token of every wanted row; their logits are in `logits`.

        Raises:
            ScantlingInputError: too many rows, or something out of range.
        """
        rows = len(ids)
        given: list[NDArray[Any]] = [np.ascontiguousarray(values, np.int32) for values in (ids, slots, positions)]
        self._check(rows, *given)
        flags = np.ascontiguousarray(wanted, np.uint8)
        best = np.zeros(rows, np.int32)
        given += [flags, best]
        pointers = [values.ctypes.data_as(ctypes.c_void_p) for values in given]
        self._library.sc_pass(ctypes.byref(self._program), rows, *pointers)
        found: list[int] = best[: int(flags.sum())].tolist()
        return found

    def _check(self, rows: int, ids: Any, slots: Any, positions: Any) -> None:
        if not 0 < rows <= self.most_rows:
            raise ScantlingInputError(f"a pass has 1 to {self.most_rows} rows, and {rows} are given")
        for what, values, end in (
            ("token id", ids, self.packed.outline.head.vocab_size),
            ("slot", slots, self.slots),
            ("position", positions, self._positions),
        ):
            if values.min() < 0 or values.max() >= end:
                odd = values.min() if values.min() < 0 else values.max()
                raise ScantlingInputError(f"{what} {odd} is outside 0 to {end - 1}")

    @property
    def _positions(self) -> int:
        """Positions that a text may have: as many as fit, and no more than have a vector."""
        scheme = self.packed.outline.stack.position
        return min(self.capacity, scheme.n_positions) if isinstance(scheme, Learned) else self.capacity

    def select(self, rows: Sequence[int]) -> Decoder:
        """A decoder whose slot i is what slot rows[i] is here: this one, or a larger one where there are more rows."""
        chosen, target = list(rows), self
        if len(chosen) > self.slots:
            target = Decoder(
                self.packed,
                slots=len(chosen),
                capacity=self.capacity,
                threads=self._threads,
                quantised=self._quantised,
            )
        assert self._own_pages, "slots that share pages are selected by whoever fills them"
        for own, theirs in zip(self._kept, target._kept, strict=True):
            for source, place in zip(own, theirs, strict=True):
                slots = self._arena.bytes(source).reshape(self.slots, -1)
                target._arena.bytes(place).reshape(target.slots, -1)[: len(chosen)] = slots[chosen]
        return target

    def close(self) -> None:
        """End the threads and give the memory back."""
        self._closed()


def _close(library: Any, program: Any, *held: Any) -> None:
    """`held` are the arena and the layers, which the threads read to the last."""
    library.sc_stop(ctypes.byref(program))
