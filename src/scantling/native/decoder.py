"""A decoder in one block of memory, run by the compiled pass."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from scantling.errors import ScantlingInputError
from scantling.native import library as native
from scantling.native.kept import Packed
from scantling.native.program import ACTS, Layer, Outline
from scantling.native.tiles import KINDS, ROWS, join, nbytes, pack, padded
from scantling.native.weights import Weights
from scantling.parts.leaf import RMSNorm
from scantling.parts.mlp import GatedMLP
from scantling.parts.rope import RoPE

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LINE = 64


@dataclass(frozen=True)
class Place:
    """Where something lies in the arena: bytes from its start."""

    start: int
    nbytes: int


@dataclass(frozen=True)
class Tiled:
    """A matrix in the arena."""

    kind: str
    rows: int
    columns: int
    data: Place
    bias: Place | None


class Decoder:
    """Weights, cache and scratch of one model in one arena; passes over it.

    Attributes:
        slots: sequences that the cache holds.
        capacity: positions of each.
        logits: (most rows, vocabulary) of the last pass, in the order of the rows that asked for them.
        nbytes: of the arena.
        cache_nbytes: of its keys and values.
    """

    def __init__(
        self,
        outline: Outline,
        weights: Weights,
        *,
        slots: int = 1,
        capacity: int,
        threads: int | None = None,
        quantised: bool = False,
        march: str = "native",
        keep: bool = False,
    ) -> None:
        """Pack the weights.

        Args:
            threads: default one per core that this process may use.
            quantised: activations that meet 8- and 4-bit weights are rounded to 8 bits, with a scale for 32 of them.
            march: the processor to compile for.
            keep: leave the packed weights in the cache folder, and read them from there the next time.

        Raises:
            ScantlingInputError: no compiler, an unknown width, or the memory does not suffice.
        """
        self._library = native.library(march)
        if quantised and not self._library.sc_integer_dot():
            raise ScantlingInputError("8-bit activations need a processor with AVX-512 VNNI; the exact pass runs here")
        self.slots, self.capacity = slots, padded(capacity, ROWS)
        self._outline, self._weights, self._quantised = outline, weights, quantised
        self._threads = threads or usable_cores()
        self._end = 0
        self._filled: list[tuple[Place, Callable[[], Any]]] = []
        self._keep = Packed.of(weights, outline) if keep else None
        self._build()

    def _build(self) -> None:
        outline, model = self._outline, self._outline.model
        table = self._matrix(["embed.weight"])
        out = table if outline.head.tied else self._matrix(["head.matrix.weight"])
        layers = [self._layer(layer) for layer in outline.layers]
        assert model.decoder is not None
        final = self._gain("decoder.final_norm", model.decoder.final_norm)
        self._packed_end = self._end
        turns = {layer.attention.position: self._turns(layer.attention.position) for layer in outline.layers}
        for told, layer in zip(layers, outline.layers, strict=True):
            a = layer.attention
            kept = 4 * self.slots * a.n_kv_heads * self.capacity * a.d_head
            told |= {"keys": self._reserve(kept), "values": self._reserve(kept), "turns": turns[a.position]}
        widest = max(padded(n, _LINE) for n in (out.columns, *self._widths()))
        most = self._library.sc_most_rows()
        scratch = self._reserve(4 * self._library.sc_scratch(widest))
        logits = self._reserve(4 * most * padded(out.rows, ROWS))
        self._own(layers, table, out, (final, scratch, logits, widest))

    def _widths(self) -> list[int]:
        a, mlp = self._outline.attention, self._outline.mlp
        gates = 2 if isinstance(mlp, GatedMLP) else 1
        return [(a.n_heads + 2 * a.n_kv_heads) * a.d_head, gates * mlp.d_ff]

    def _layer(self, layer: Layer) -> dict[str, Any]:
        a, path, mlp = layer.attention, layer.path, layer.mlp
        order = self._pairs(a.position, a.d_head)
        orders = {"q": self._heads(order, a.n_heads), "k": self._heads(order, a.n_kv_heads), "v": None}
        gated = isinstance(mlp, GatedMLP)
        return {
            "qkv": self._matrix([f"{path}.attn.{p}.weight" for p in "qkv"], list(orders.values())),
            "o": self._matrix([f"{path}.attn.o.weight"]),
            "up": self._matrix(
                [f"{path}.mlp.{p}.weight" for p in (("gate", "up") if gated else ("up",))], by_turns=gated
            ),
            "down": self._matrix([f"{path}.mlp.down.weight"]),
            "attn_norm": self._gain(f"{path}.attn_norm", dict(layer_norms(layer, self._outline))["attn"]),
            "mlp_norm": self._gain(f"{path}.mlp_norm", dict(layer_norms(layer, self._outline))["mlp"]),
            "q_norm": self._gain(f"{path}.attn.q_norm", a.q_norm, order),
            "k_norm": self._gain(f"{path}.attn.k_norm", a.k_norm, order),
            "window": a.visibility.window or 0,
        }

    def _reserve(self, size: int) -> Place:
        place = Place(self._end, size)
        self._end = padded(self._end + size, _LINE)
        return place

    def _fill(self, size: int, make: Callable[[], Any]) -> Place:
        place = self._reserve(size)
        self._filled.append((place, make))
        return place

    def _matrix(self, names: list[str], orders: list[Any] | None = None, by_turns: bool = False) -> Tiled:
        """One matrix of those with these names, under one another or by turns of 16 rows."""
        pieces = [self._weights.matrix(name) for name in names]
        rows, kind, columns = sum(len(p.data) for p in pieces), pieces[0].tiled, pieces[0].columns
        given = orders or [None] * len(pieces)
        turns = np.arange(rows).reshape(2, -1, ROWS).swapaxes(0, 1).reshape(-1) if by_turns else None

        def made() -> Any:
            whole = join([p if order is None else p.rows(order) for p, order in zip(pieces, given, strict=True)])
            return pack(whole if turns is None else whole.rows(turns))

        data = self._fill(nbytes(kind, rows, columns), made)
        shifted = [name.removesuffix("weight") + "bias" in self._outline.model.named_weights for name in names]
        if not any(shifted):
            return Tiled(kind, rows, columns, data, None)

        def shift() -> Any:
            found = [self._shift(name, len(p.data)) for name, p in zip(names, pieces, strict=True)]
            found = [b if order is None else b[order] for b, order in zip(found, given, strict=True)]
            whole = np.concatenate(found)
            whole = whole if turns is None else whole[turns]
            return np.concatenate([whole, np.zeros(padded(rows, ROWS) - rows, np.float32)])

        return Tiled(kind, rows, columns, data, self._fill(4 * padded(rows, ROWS), shift))

    def _shift(self, name: str, rows: int) -> NDArray[np.float32]:
        name = name.removesuffix("weight") + "bias"
        if name in self._outline.model.named_weights:
            return self._weights.vector(name)
        return np.zeros(rows, np.float32)

    def _gain(self, path: str, norm: Any, order: Any = None) -> Place | None:
        if norm is None:
            return None

        def made() -> Any:
            values = self._weights.vector(f"{path}.weight")
            values = values + np.float32(1) if isinstance(norm, RMSNorm) and norm.plus_one else values
            return np.ascontiguousarray(values if order is None else values[order], np.float32)

        return self._fill(4 * norm.d, made)

    def _turns(self, position: Any) -> tuple[Place, Place] | None:
        """Cosines and sines of every position that fits: (capacity, turned / 2) each."""
        if not isinstance(position, RoPE):
            return None
        frequencies = np.array(position.frequencies(self.capacity), np.float32)
        angles = np.arange(self.capacity, dtype=np.float32)[:, None] * frequencies
        factor = np.float32(1.0 if position.scaling is None else position.scaling.factor_on_turns)
        size = 4 * angles.size
        return self._fill(size, lambda: np.cos(angles) * factor), self._fill(size, lambda: np.sin(angles) * factor)

    def _pairs(self, position: Any, d_head: int) -> NDArray[np.int64] | None:
        """A head's channels with pairs half a head apart, where the card pairs neighbours; None where it does not.

        Queries and keys in another order have the same products.
        """
        if not isinstance(position, RoPE) or not position.interleaved:
            return None
        turned = np.arange(position.d_rotary)
        return np.concatenate([turned[::2], turned[1::2], np.arange(position.d_rotary, d_head)])

    def _heads(self, order: Any, n_heads: int) -> NDArray[np.int64] | None:
        if order is None:
            return None
        rows: NDArray[np.int64] = (np.arange(n_heads)[:, None] * len(order) + order).reshape(-1)
        return rows

    def _own(self, layers: list[dict[str, Any]], table: Tiled, out: Tiled, rest: tuple[Any, ...]) -> None:
        """Allocate, copy, and tell the pass where everything lies."""
        final, scratch, logits, widest = rest
        self.nbytes = self._end
        self._start = self._library.sc_arena(self._end)
        if not self._start:
            raise ScantlingInputError(f"{self._end:,} bytes for the packed model and its cache cannot be allocated")
        self._write()
        self._layers = (native.Layer * len(layers))(*[self._told(layer) for layer in layers])
        self._program = self._program_of(table, out)
        self._program.final_norm = self._at(final)
        self._program.logits = self._at(logits)
        most = self._library.sc_most_rows()
        shape = (most, padded(out.rows, ROWS))
        self.logits: NDArray[np.float32] = self._bytes(logits).view(np.float32).reshape(shape)[:, : out.rows]
        self.cache_nbytes = sum(layer["keys"].nbytes + layer["values"].nbytes for layer in layers)
        self._library.sc_start(ctypes.byref(self._program), self._at(scratch), widest)
        self._closed = weakref.finalize(self, _close, self._library, self._program, self._start)

    def _write(self) -> None:
        """Bring everything to its place: what is kept in the cache folder from there."""
        packed = self._bytes(Place(0, self._packed_end))
        read = self._keep is not None and self._keep.read(packed)
        for place, make in self._filled:
            if not read or place.start >= self._packed_end:
                self._bytes(place)[:] = np.ascontiguousarray(make()).view(np.uint8).reshape(-1)
        self._filled.clear()
        if self._keep is not None and not read:
            self._keep.write(packed)

    def _told(self, layer: dict[str, Any]) -> native.Layer:
        told = native.Layer(window=layer["window"], keys=self._at(layer["keys"]), values=self._at(layer["values"]))
        for name in ("qkv", "o", "up", "down"):
            setattr(told, name, self._matrix_of(layer[name]))
        for name in ("attn_norm", "mlp_norm", "q_norm", "k_norm"):
            setattr(told, name, self._at(layer[name]))
        told.cos, told.sin = map(self._at, layer["turns"] or (None, None))
        return told

    def _program_of(self, table: Tiled, out: Tiled) -> native.Program:
        o = self._outline
        a, mlp, model = o.attention, o.mlp, o.model
        assert model.decoder is not None
        first = dict(layer_norms(o.layers[0], o))["attn"]
        return native.Program(
            d=model.table.d_model,
            heads=a.n_heads,
            kv_heads=a.n_kv_heads,
            head=a.d_head,
            turned=o.turned,
            d_ff=mlp.d_ff,
            gated=isinstance(mlp, GatedMLP),
            act=ACTS[mlp.act],
            layers=len(o.layers),
            vocab=o.head.vocab_size,
            slots=self.slots,
            capacity=self.capacity,
            threads=self._threads,
            quantised=self._quantised,
            eps=first.eps,
            qk_eps=getattr(a.q_norm, "eps", 0.0),
            scale=a.scale,
            softcap=a.softcap or 0.0,
            logit_softcap=o.head.softcap or 0.0,
            embed_scale=1.0 if model.scale is None else model.scale,
            logit_scale=1.0 if o.head.scale is None else o.head.scale,
            layer=ctypes.cast(self._layers, ctypes.c_void_p),
            table=self._matrix_of(table),
            out=self._matrix_of(out),
        )

    def _matrix_of(self, m: Tiled) -> native.Matrix:
        n, k = padded(m.rows, ROWS), padded(m.columns, 32)
        return native.Matrix(kind=KINDS[m.kind], n=n, k=k, data=self._at(m.data), bias=self._at(m.bias))

    def _at(self, place: Place | None) -> int | None:
        return None if place is None else self._start + place.start

    def _bytes(self, place: Place) -> NDArray[np.uint8]:
        memory = (ctypes.c_uint8 * place.nbytes).from_address(self._start + place.start)
        found: NDArray[np.uint8] = np.ctypeslib.as_array(memory)
        return found

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
            ("token id", ids, self._outline.head.vocab_size),
            ("slot", slots, self.slots),
            ("position", positions, self.capacity),
        ):
            if values.min() < 0 or values.max() >= end:
                odd = values.min() if values.min() < 0 else values.max()
                raise ScantlingInputError(f"{what} {odd} is outside 0 to {end - 1}")

    def close(self) -> None:
        """End the threads and give the memory back."""
        self._closed()


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def layer_norms(layer: Layer, outline: Outline) -> list[tuple[str, RMSNorm]]:
    """The norm before each sublayer of a layer."""
    assert outline.model.decoder is not None
    block: Any = outline.model.decoder.blocks[int(layer.path.rsplit(".", 1)[1])]
    return [(sub.name, norm) for sub in block.sublayers for _, norm in sub.norms]


def _close(library: Any, program: Any, start: int) -> None:
    library.sc_stop(ctypes.byref(program))
    library.sc_free(start)
