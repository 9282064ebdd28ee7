"""A model's weights in tiles, in one arena that any number of decoders read."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from scantling.native import library as native
from scantling.native.arena import Arena, Place
from scantling.native.program import ACTS, SCORINGS, Layer, Outline
from scantling.native.tiles import KINDS, ROWS, in_heads, joint, lay, nbytes, padded, tile_kind
from scantling.native.weights import Weights
from scantling.parts.leaf import HeadNorm, LayerNorm, RMSNorm
from scantling.parts.mlp import MLP, GatedMLP
from scantling.parts.position import ALiBi, Learned
from scantling.parts.rope import RoPE

if TYPE_CHECKING:
    from numpy.typing import NDArray

NO_NORM, RMS, LAYER = range(3)


@dataclass(frozen=True)
class Tiled:
    """A matrix in the arena, or those of `experts` one behind the other, each of so many rows."""

    kind: str
    rows: int
    columns: int
    data: Place
    bias: Place | None
    experts: int = 1


@dataclass(frozen=True)
class Normed:
    """A norm in the arena."""

    eps: float
    kind: int
    n: int
    stride: int
    gain: Place
    shift: Place | None


@dataclass(frozen=True)
class Widened:
    """An MLP's matrices in the arena; gate and up are one."""

    up: Tiled
    down: Tiled


@dataclass(frozen=True)
class PackedLayer:
    """What a layer has in the arena; None where it has no such thing."""

    qkv: Tiled
    o: Tiled
    mlp: Widened
    shared: Widened | None
    router: Tiled | None
    shared_gate: Tiled | None
    norms: tuple[Normed | None, ...]
    q_norm: Normed | None
    k_norm: Normed | None
    slopes: Place | None
    sinks: Place | None
    selection: Place | None


class Packed:
    """The weights of one model as the compiled pass reads them.

    Attributes:
        outline: what the model is.
        library: the compiled pass.
        nbytes: of the arena.
    """

    def __init__(self, outline: Outline, weights: Weights, *, march: str = "native") -> None:
        """Pack the weights.

        Args:
            march: the processor to compile for.

        Raises:
            ScantlingInputError: no compiler, an unknown width, weights that do not fill tiles, or too little memory.
        """
        self.outline, self._weights, self._shapes = outline, weights, outline.model.named_stored
        self.library = native.library(march)
        self._arena, self._kinds = Arena(self.library), set[str]()
        stack, head = outline.stack, outline.head
        self.table = self._matrix(["embed.weight"], ["head.bias"])
        self.out = self.table if head.tied else self._matrix(["head.matrix.weight"], self._head_bias())
        learned = isinstance(stack.position, Learned)
        self.places = self._matrix(["decoder.position.table.weight"]) if learned else None
        self.embed_norm = self._norm("decoder.embed_norm", stack.embed_norm)
        self.layers = [self._layer(layer) for layer in outline.layers]
        self.final_norm = self._norm("decoder.final_norm", stack.final_norm)
        self._arena.allocate()
        self._arena.write()
        # A net's tensors are no longer needed here.
        del self._weights

    def _head_bias(self) -> list[str]:
        return ["head.bias" if "head.bias" in self._shapes else "head.matrix.bias"]

    @property
    def nbytes(self) -> int:
        """Of all weights, gains and shifts, in tiles."""
        return self._arena.nbytes

    @property
    def rounds(self) -> bool:
        """Whether a matrix is in blocks of 8 or 4 bits: what 8-bit activations may meet."""
        return not self._kinds.isdisjoint({"q4", "q8"})

    @property
    def read_nbytes(self) -> int:
        """Of that, what a token needs: of a table that only looks up, one row; of experts, the chosen ones."""
        unread = sum(m.data.nbytes * (m.rows - 1) // m.rows for m in self._looked_up())
        for layer, held in zip(self.outline.layers, self.layers, strict=True):
            if layer.experts is not None:
                idle = layer.experts.router.n_experts - layer.experts.router.top_k
                unread += sum(m.data.nbytes // m.experts * idle for m in (held.mlp.up, held.mlp.down))
        return self.nbytes - unread

    def _looked_up(self) -> list[Tiled]:
        return [m for m in (self.places, None if self.outline.head.tied else self.table) if m is not None]

    def layer(self, number: int) -> native.Layer:
        """What the pass is told of a layer's weights."""
        layer, held, at = self.outline.layers[number], self.layers[number], self._arena.at
        a, moe = layer.attention, layer.experts
        told = native.Layer(window=a.visibility.window or 0, scale=a.scale, mlp=self._widened(layer.mlp, held.mlp))
        for name in ("slopes", "sinks", "selection"):
            setattr(told, name, at(getattr(held, name)))
        for name in ("qkv", "o", "router", "shared_gate"):
            setattr(told, name, self.matrix(getattr(held, name)))
        for name in ("q_norm", "k_norm"):
            setattr(told, name, self.norm(getattr(held, name)))
        for i, norm in enumerate(held.norms):
            told.norms[i] = self.norm(norm)
        if moe is not None:
            router = moe.router
            told.experts, told.chosen = router.n_experts, router.top_k
            told.scoring, told.normalize = SCORINGS[router.scores], router.normalize
            told.kept_scale = router.scale
            told.expert_groups, told.top_groups = router.groups, router.top_groups
            told.best_of_group = 2 if router.group_score == "top2" else 1
            if moe.shared is not None and held.shared is not None:
                told.shared = self._widened(moe.shared, held.shared)
        return told

    def _widened(self, mlp: MLP | GatedMLP, held: Widened) -> native.Mlp:
        """What the pass is told of an MLP."""
        limit, alpha = getattr(mlp, "clamp", None) or (0.0, 0.0)
        return native.Mlp(
            up=self.matrix(held.up),
            down=self.matrix(held.down),
            d_ff=mlp.d_ff,
            gated=isinstance(mlp, GatedMLP),
            act=ACTS[mlp.act],
            limit=limit,
            alpha=alpha,
        )

    def matrix(self, m: Tiled | None) -> native.Matrix:
        """What the pass is told of a matrix."""
        if m is None:
            return native.Matrix()
        n, k = padded(m.rows, ROWS), padded(m.columns, 32)
        return native.Matrix(kind=KINDS[m.kind], n=n, k=k, data=self._arena.at(m.data), bias=self._arena.at(m.bias))

    def norm(self, m: Normed | None) -> native.Norm:
        """What the pass is told of a norm."""
        if m is None:
            return native.Norm()
        gain, shift = self._arena.at(m.gain), self._arena.at(m.shift)
        return native.Norm(gain=gain, shift=shift, eps=m.eps, kind=m.kind, n=m.n, stride=m.stride)

    def _layer(self, layer: Layer) -> PackedLayer:
        a, path, stored = layer.attention, f"{layer.path}.attn", self.outline.d_head
        pairs = _pairs(a.position, a.d_head)
        q, k = (in_heads(heads, a.d_head, stored, pairs) for heads in (a.n_heads, a.n_kv_heads))
        v, mixed = in_heads(a.n_kv_heads, a.d_head, stored), in_heads(a.n_heads, a.d_head, stored)
        norms = [self._norm(f"{layer.path}.{name}", norm) for name, norm in layer.norms]
        if self.outline.parallel and norms[3] is None:
            norms[3] = norms[0]
        slopes = np.array(a.position.slopes(), np.float32) * a.position.scale if isinstance(a.position, ALiBi) else None
        moe, mlp_path = layer.experts, f"{layer.path}.mlp"
        router, by = f"{mlp_path}.router", None
        if moe is not None and moe.router.selection_bias:
            by = self._vector(f"{router}.selection_bias", moe.router.n_experts)
        shared = None if moe is None or moe.shared is None else self._mlp(f"{mlp_path}.shared", moe.shared)
        return PackedLayer(
            qkv=self._matrix([f"{path}.{name}.weight" for name in "qkv"], rows=[q, k, v]),
            o=self._matrix([f"{path}.o.weight"], columns=mixed if stored != a.d_head else None),
            mlp=self._mlp(layer.mlp_path, layer.mlp, 1 if moe is None else moe.router.n_experts),
            shared=shared,
            router=None if moe is None else self._matrix([f"{router}.choose.weight"]),
            shared_gate=self._matrix([f"{mlp_path}.shared_gate.weight"]) if moe and moe.shared_gate else None,
            norms=tuple(norms),
            q_norm=self._norm(f"{path}.q_norm", a.q_norm, q, pairs),
            k_norm=self._norm(f"{path}.k_norm", a.k_norm, k, pairs),
            slopes=None if slopes is None else self._arena.fill(slopes.nbytes, lambda: slopes),
            sinks=self._vector(f"{path}.sinks", a.n_heads) if a.sinks else None,
            selection=by,
        )

    def _vector(self, name: str, n: int) -> Place:
        return self._arena.fill(4 * n, lambda: self._weights.vector(name))

    def _mlp(self, path: str, mlp: MLP | GatedMLP, experts: int = 1) -> Widened:
        """Gate and up by turns of 16 rows, so that both of a channel are there at once."""
        gated = isinstance(mlp, GatedMLP)
        names = [f"{path}.{name}.weight" for name in (("gate", "up") if gated else ("up",))]
        filled = in_heads(1, mlp.d_ff, padded(mlp.d_ff, ROWS))
        up = self._matrix(names, rows=[filled] * len(names), by_turns=gated, experts=experts)
        return Widened(up, self._matrix([f"{path}.down.weight"], experts=experts))

    def _matrix(
        self,
        names: list[str],
        biases: list[str] | None = None,
        *,
        rows: list[NDArray[np.int64]] | None = None,
        columns: NDArray[np.int64] | None = None,
        by_turns: bool = False,
        experts: int = 1,
    ) -> Tiled:
        """One matrix of those with these names, under one another or by turns of 16 rows.

        Args:
            biases: names of their shifts, where they are other than usual.
            rows: the order of each one's rows.
            columns: the order of their columns.
            experts: so many matrices of each name.
        """
        shapes = [self._shapes[name] for name in names]
        lengths = [prod(shape[:-1]) // experts for shape in shapes]
        orders = rows or [np.arange(length) for length in lengths]
        count = sum(map(len, orders))
        turns = np.arange(count).reshape(2, -1, ROWS).swapaxes(0, 1).reshape(-1) if by_turns else np.arange(count)
        wide = len(columns) if columns is not None else shapes[0][-1]
        held = joint([self._weights.kind(name) for name in names])
        kind = tile_kind(held)
        self._kinds.add(kind)
        one = nbytes(kind, count, wide)

        def written(to: NDArray[np.uint8]) -> None:
            pieces = [self._weights.matrix(name) for name in names]
            pieces = [(p if columns is None else p.columns_in(columns)).held_as(held) for p in pieces]
            for e in range(experts):
                firsts = zip(orders, lengths, strict=True)
                own = [np.where(order < 0, -1, order + e * length) for order, length in firsts]
                lay(self.library, pieces, own, turns, to[e * one : (e + 1) * one])

        data = self._arena.written(experts * one, written)
        shifts = biases or [name.removesuffix("weight") + "bias" for name in names]
        if not any(name in self._shapes for name in shifts):
            return Tiled(kind, count, wide, data, None, experts)

        def shift() -> Any:
            found = np.zeros((experts, padded(count, ROWS)), np.float32)
            each = [self._shift(name, experts, order) for name, order in zip(shifts, orders, strict=True)]
            found[:, :count] = np.concatenate(each, 1)[:, turns]
            return found

        return Tiled(kind, count, wide, data, self._arena.fill(4 * experts * padded(count, ROWS), shift), experts)

    def _shift(self, name: str, experts: int, order: NDArray[np.int64]) -> NDArray[np.float32]:
        if name not in self._shapes:
            return np.zeros((experts, len(order)), np.float32)
        values = self._weights.vector(name).reshape(experts, -1)
        return np.where(order < 0, np.float32(0), values[:, order])

    def _norm(
        self,
        path: str,
        norm: RMSNorm | LayerNorm | HeadNorm | None,
        heads: NDArray[np.int64] | None = None,
        pairs: NDArray[np.int64] | None = None,
    ) -> Normed | None:
        """A norm; of queries or keys, `heads` are the places of all channels and `pairs` the order of a head's."""
        if norm is None:
            return None
        d_head, stored = self.outline.attention.d_head, self.outline.d_head
        apart = isinstance(norm, HeadNorm)
        order = in_heads(1, norm.d, padded(norm.d, ROWS))
        if heads is not None:
            order = heads if apart or norm.d != d_head else in_heads(1, d_head, stored, pairs)

        def made(name: str) -> Any:
            values = self._weights.vector(f"{path}.{name}").reshape(-1)
            values = values + np.float32(1) if isinstance(norm, RMSNorm) and norm.plus_one else values
            return np.where(order < 0, np.float32(0), values[order]).astype(np.float32)

        size, shifted = 4 * len(order), isinstance(norm, LayerNorm) and norm.bias
        return Normed(
            norm.eps,
            LAYER if isinstance(norm, LayerNorm) or (isinstance(norm, HeadNorm) and norm.centred) else RMS,
            norm.d,
            stored if heads is not None and (apart or norm.d != d_head) else 0,
            self._arena.fill(size, lambda: made("weight")),
            self._arena.fill(size, lambda: made("bias")) if shifted else None,
        )


def _pairs(position: Any, d_head: int) -> NDArray[np.int64] | None:
    """A head's channels with pairs half a head apart, where the card pairs neighbours; None where it does not.

    Queries and keys in another order have the same products.
    """
    if not isinstance(position, RoPE) or not position.interleaved:
        return None
    turned = np.arange(position.d_rotary)
    return np.concatenate([turned[::2], turned[1::2], np.arange(position.d_rotary, d_head)])
