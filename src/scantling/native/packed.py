"""A model's weights in tiles, in one arena that any number of decoders read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from scantling.native import library as native
from scantling.native.arena import Arena, Place
from scantling.native.kept import Kept
from scantling.native.program import Layer, Outline
from scantling.native.tiles import KINDS, ROWS, join, nbytes, pack, padded
from scantling.native.weights import Weights
from scantling.parts.leaf import RMSNorm
from scantling.parts.mlp import GatedMLP
from scantling.parts.rope import RoPE

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Tiled:
    """A matrix in the arena."""

    kind: str
    rows: int
    columns: int
    data: Place
    bias: Place | None


class Packed:
    """The weights of one model as the compiled pass reads them.

    Attributes:
        outline: what the model is.
        library: the compiled pass.
        nbytes: of the arena.
    """

    def __init__(self, outline: Outline, weights: Weights, *, march: str = "native", keep: bool = False) -> None:
        """Pack the weights.

        Args:
            march: the processor to compile for.
            keep: leave the packed weights in the cache folder, and read them from there the next time.

        Raises:
            ScantlingInputError: no compiler, an unknown width, or the memory does not suffice.
        """
        self.outline, self._weights = outline, weights
        self.library = native.library(march)
        self._arena = Arena(self.library)
        self.table = self._matrix(["embed.weight"])
        self.out = self.table if outline.head.tied else self._matrix(["head.matrix.weight"])
        self.layers = [self._layer(layer) for layer in outline.layers]
        assert outline.model.decoder is not None
        self.final_norm = self._gain("decoder.final_norm", outline.model.decoder.final_norm)
        self._bring(Kept.of(weights, outline) if keep else None)

    @property
    def nbytes(self) -> int:
        """Of all weights, gains and shifts, in tiles."""
        return self._arena.nbytes

    @property
    def read_nbytes(self) -> int:
        """Of that, what a token needs: of a table that only looks up, one row."""
        unread = 0 if self.outline.head.tied else self.table.data.nbytes * (self.table.rows - 1) // self.table.rows
        return self.nbytes - unread

    def _bring(self, kept: Kept | None) -> None:
        """Everything to its place, from the cache folder if it is there."""
        self._arena.allocate()
        whole = self._arena.bytes(Place(0, self._arena.nbytes))
        if kept is not None and kept.read(whole):
            return
        self._arena.write()
        if kept is not None:
            kept.write(whole)

    def layer(self, number: int) -> native.Layer:
        """What the pass is told of a layer's weights."""
        told, held = (
            native.Layer(window=self.outline.layers[number].attention.visibility.window or 0),
            self.layers[number],
        )
        for name in ("qkv", "o", "up", "down"):
            setattr(told, name, self.matrix(held[name]))
        for name in ("attn_norm", "mlp_norm", "q_norm", "k_norm"):
            setattr(told, name, self._arena.at(held[name]))
        return told

    def matrix(self, m: Tiled) -> native.Matrix:
        """What the pass is told of a matrix."""
        n, k = padded(m.rows, ROWS), padded(m.columns, 32)
        return native.Matrix(kind=KINDS[m.kind], n=n, k=k, data=self._arena.at(m.data), bias=self._arena.at(m.bias))

    def at(self, place: Place | None) -> int | None:
        """The address of something in the arena."""
        return self._arena.at(place)

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
            "attn_norm": self._gain(f"{path}.attn_norm", layer_norms(layer, self.outline)["attn"]),
            "mlp_norm": self._gain(f"{path}.mlp_norm", layer_norms(layer, self.outline)["mlp"]),
            "q_norm": self._gain(f"{path}.attn.q_norm", a.q_norm, order),
            "k_norm": self._gain(f"{path}.attn.k_norm", a.k_norm, order),
        }

    def _matrix(self, names: list[str], orders: list[Any] | None = None, by_turns: bool = False) -> Tiled:
        """One matrix of those with these names, under one another or by turns of 16 rows."""
        pieces = [self._weights.matrix(name) for name in names]
        rows, kind, columns = sum(len(p.data) for p in pieces), pieces[0].tiled, pieces[0].columns
        given = orders or [None] * len(pieces)
        turns = np.arange(rows).reshape(2, -1, ROWS).swapaxes(0, 1).reshape(-1) if by_turns else None

        def made() -> Any:
            whole = join([p if order is None else p.rows(order) for p, order in zip(pieces, given, strict=True)])
            return pack(whole if turns is None else whole.rows(turns))

        data = self._arena.fill(nbytes(kind, rows, columns), made)
        shifted = [name.removesuffix("weight") + "bias" in self.outline.model.named_weights for name in names]
        if not any(shifted):
            return Tiled(kind, rows, columns, data, None)

        def shift() -> Any:
            found = [self._shift(name, len(p.data)) for name, p in zip(names, pieces, strict=True)]
            found = [b if order is None else b[order] for b, order in zip(found, given, strict=True)]
            whole = np.concatenate(found)
            whole = whole if turns is None else whole[turns]
            return np.concatenate([whole, np.zeros(padded(rows, ROWS) - rows, np.float32)])

        return Tiled(kind, rows, columns, data, self._arena.fill(4 * padded(rows, ROWS), shift))

    def _shift(self, name: str, rows: int) -> NDArray[np.float32]:
        name = name.removesuffix("weight") + "bias"
        if name in self.outline.model.named_weights:
            return self._weights.vector(name)
        return np.zeros(rows, np.float32)

    def _gain(self, path: str, norm: Any, order: Any = None) -> Place | None:
        if norm is None:
            return None

        def made() -> Any:
            values = self._weights.vector(f"{path}.weight")
            values = values + np.float32(1) if isinstance(norm, RMSNorm) and norm.plus_one else values
            return np.ascontiguousarray(values if order is None else values[order], np.float32)

        return self._arena.fill(4 * norm.d, made)

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


def layer_norms(layer: Layer, outline: Outline) -> dict[str, RMSNorm]:
    """The norm before each sublayer of a layer."""
    assert outline.model.decoder is not None
    block: Any = outline.model.decoder.blocks[int(layer.path.rsplit(".", 1)[1])]
    return {sub.name: norm for sub in block.sublayers for _, norm in sub.norms}
