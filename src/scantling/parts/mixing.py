"""From queries, keys and values to what each head takes home: the rows, and what each kernel keeps of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from scantling.parts.leaf import WIDE
from scantling.parts.part import Shape, Step, Workload
from scantling.parts.position import NoPosition, Position
from scantling.parts.saved import Value, dropped, region
from scantling.visibility import Visibility

ROWS = 256
"""Queries per block where a mask, a shift of the scores, a cap, sinks or dropout are asked of the fused kernel."""


@dataclass(frozen=True)
class Piece:
    """Some queries and the keys that they can see: a block of the fused kernel.

    Attributes:
        whole: it reads all keys.
    """

    rows: int
    keys: int
    whole: bool


@dataclass(frozen=True)
class Mixing:
    """softmax(q k^T * scale + shift) v for heads that may share keys and values.

    Attributes:
        d_head: width of queries and keys.
        d_value: width of values.
        visibility: who reads whom; None where every key is read, as those of a source.
        position: what may shift the scores.
        softcap, sinks, dropout: whether there are any.
    """

    n_heads: int
    n_kv_heads: int
    d_head: int
    d_value: int
    visibility: Visibility | None = None
    position: Position = field(default_factory=NoPosition)
    softcap: bool = False
    sinks: bool = False
    dropout: bool = False

    def keys(self, w: Workload) -> int:
        """S, positions that are read from."""
        return w.sources if self.visibility is None else w.keys

    def steps(self, w: Workload, q: Value, k: Value, v: Value) -> Iterator[Step]:
        """Rows from q (B, H, T, d_head), k (B, H_kv, S, d_head) and v (B, H_kv, S, d_value) to the mixed values."""
        rows = self._reference(w, q, k, v) if w.kernel == "reference" else self._fused(w, q, k, v)
        return region(rows, (q, k, v)) if w.training and w.recompute == "selective" else rows

    def _shared(self, w: Workload, k: Value, v: Value, stored: bool) -> Iterator[Step]:
        if (group := self.n_heads // self.n_kv_heads) > 1:
            note = f"Each KV head serves {group} query heads" + ("." if stored else ": an index, nothing is copied.")
            for name, width in (("k", self.d_head), ("v", self.d_value)):
                shape, formula = (w.batch, self.n_heads, self.keys(w), width), f"head i <- i // {group}"
                op, dtype = f"repeat {name} {group}x", (k if name == "k" else v).dtype
                yield Step(f":{name}_shared", op, shape, formula=formula, note=note, dtype=dtype, stored=stored)

    def _copies(self, w: Workload, k: Value, v: Value) -> tuple[Value, Value]:
        """Keys and values as a plain product reads them: one head for each of the queries'."""
        if self.n_heads == self.n_kv_heads:
            return k, v
        numel = w.batch * self.n_heads * self.keys(w)
        keys = Value("repeated keys", numel * self.d_head, k.dtype)
        return keys, Value("repeated values", numel * self.d_value, v.dtype)

    def _flops(self, w: Workload) -> tuple[int, int]:
        """Products of one channel: over the whole square, and over the pairs that are seen."""
        keys = self.keys(w)
        seen = w.batch * w.tokens * keys if self.visibility is None else visible_pairs(w, self.visibility)
        return 2 * w.batch * self.n_heads * w.tokens * keys, 2 * self.n_heads * seen

    def _reference(self, w: Workload, q: Value, k: Value, v: Value) -> Iterator[Step]:
        yield from self._shared(w, k, v, stored=True)
        k, v = self._copies(w, k, v)
        shape = (w.batch, self.n_heads, w.tokens, self.keys(w))
        pairs, visible = self._flops(w)
        scores, weights, mixed = self._plain(w, Piece(w.tokens, self.keys(w), True), q, k, v)
        flops, formula = pairs * self.d_head, "q k^T * scale"
        yield Step(
            ":scores",
            "scores",
            shape,
            flops=flops,
            flops_visible=visible * self.d_head,
            formula=formula,
            note="How well each query fits each key.",
            dtype=w.autocast,
            saved=w.keep(*scores),
            flops_before_saving=flops if self.softcap else 0,
        )
        note, formula, saved = "Each row adds up to 1.", "softmax over visible keys", w.keep(*weights)
        yield Step(":weights", "softmax", shape, formula=formula, note=note, dtype=v.dtype, saved=saved)
        cost, shape = (pairs * self.d_value, visible * self.d_value), (*shape[:-1], self.d_value)
        note, op, saved = "What each query takes home.", "mix values", w.keep(*mixed)
        yield Step(":mixed", op, shape, 0, *cost, formula="weights v", note=note, dtype=w.autocast, saved=saved)

    def _fused(self, w: Workload, q: Value, k: Value, v: Value) -> Iterator[Step]:
        yield from self._shared(w, k, v, stored=False)
        pairs, visible = self._flops(w)
        width = self.d_head + self.d_value
        out = Value("mixed values", w.batch * self.n_heads * w.tokens * self.d_value, w.autocast)
        saved, before = self._in_torch(w, (q, k, v), out) if self.native else self._in_blocks(w, q, k, v)
        yield Step(
            ":mixed",
            "attention (fused)",
            (w.batch, self.n_heads, w.tokens, self.d_value),
            flops=pairs * width,
            flops_visible=visible * width,
            formula="softmax(q k^T * scale) v",
            note="Scores, softmax and mix in one kernel: the T x S matrix is never stored.",
            dtype=out.dtype,
            saved=w.keep(*saved),
            flops_before_saving=before,
            out=out,
        )

    @property
    def native(self) -> bool:
        """Whether torch has one kernel for it on CPU: no cap, no sinks, no dropout, no shift that is trained."""
        shift = self.position.shift(Workload(), 1)
        plain = not (self.softcap or self.sinks or self.dropout or (shift and shift.trained))
        return plain and self.d_head == self.d_value

    def _hides(self, w: Workload) -> bool:
        """Whether any key is hidden from any query."""
        return self._odd(w) or (self.visibility is not None and self.visibility.causal and w.tokens > 1)

    def _odd(self, w: Workload) -> bool:
        seen = self.visibility
        return w.packed or (seen is not None and (seen.narrows(w.keys) or bool(seen.prefix and w.prefix_lengths)))

    def _masked(self, w: Workload) -> bool:
        """Whether the fused kernel is given a mask, and not only told of the causal triangle."""
        told = w.past == 0 and self.native and self.position.shift(w, 1) is None
        return self._odd(w) or (self._hides(w) and not told)

    def _rows_of_mask(self, w: Workload) -> int:
        prefixed = self.visibility and self.visibility.prefix and w.prefix_lengths
        return w.batch if w.packed or prefixed else 1

    def pieces(self, w: Workload) -> list[Piece]:
        """The blocks of queries of the fused kernel."""
        keys, masked = self.keys(w), self._masked(w)
        if self.native and not masked and self.position.shift(w, 1) is None:
            return [Piece(w.tokens, keys, True)]
        found = []
        for start in range(0, w.tokens, ROWS):
            end = min(start + ROWS, w.tokens)
            first, last = 0, keys
            if masked and self.visibility and end - start < w.tokens:
                first, last = self._span(w, self.visibility, start, end)
            found.append(Piece(end - start, last - first, (first, last) == (0, keys)))
        return found

    def _span(self, w: Workload, seen: Visibility, start: int, end: int) -> tuple[int, int]:
        """The keys that the queries [start, end) can see at all."""
        if w.packed and seen.anchored:
            # Each document begins elsewhere, so there are no edges that all share.
            return 0, w.past + end if seen.causal else w.keys
        prefix = w.keys if w.prefix_lengths and seen.prefix else 0
        return seen.span(w.past + start, w.past + end - 1, w.keys, prefix)

    def _in_torch(self, w: Workload, read: tuple[Value, Value, Value], out: Value) -> tuple[list[Value], int]:
        """Queries, keys and values once; of each call its mask in numbers, its output and the log of its sums."""
        saved: list[Value] = []
        pieces, (pairs, _) = self.pieces(w), self._flops(w)
        for piece in pieces:
            heads = w.batch * self.n_heads * piece.rows
            kv_heads = w.batch * self.n_kv_heads * piece.keys
            sizes = (heads * self.d_head, kv_heads * self.d_head, kv_heads * self.d_value)
            saved += [w.factor(x, size) for x, size in zip(read, sizes, strict=True)]
            shift = self.position.shift(w, piece.rows)
            if self._masked(w):
                numel = self._rows_of_mask(w) * piece.rows * piece.keys * (self.n_heads if shift else 1)
                saved.append(Value("mask", numel, w.autocast))
            elif shift:
                saved.append(Value("shift of the scores", shift.numel, w.autocast))
            block = Value("mixed values of a block", heads * self.d_value, w.autocast)
            saved.append(out if len(pieces) == 1 else block)
            saved.append(Value("log of each row's sum", heads, None if w.dtype == "float64" else WIDE))
        return saved, pairs * (self.d_head + self.d_value)

    def _in_blocks(self, w: Workload, q: Value, k: Value, v: Value) -> tuple[list[Value], int]:
        """Plain products, block by block; what a block reads of queries, keys and values is copied if not all of it."""
        k, v = self._copies(w, k, v)
        saved: list[Value] = []
        pieces = self.pieces(w)
        pairs, _ = self._flops(w)
        for piece in pieces:
            rows, width = w.batch * self.n_heads, piece.keys
            part = Value("queries of a block", rows * piece.rows * self.d_head, q.dtype)
            part = q if len(pieces) == 1 else part
            own_k = k if piece.whole else Value("keys of a block", rows * width * self.d_head, k.dtype)
            own_v = v if piece.whole else Value("values of a block", rows * width * self.d_value, v.dtype)
            saved += chain(*self._plain(w, piece, part, own_k, own_v))
        # Nothing is kept after the last block's second product.
        last = pairs * self.d_value * pieces[-1].rows // w.tokens
        return saved, pairs * (self.d_head + self.d_value) - last

    def _plain(self, w: Workload, piece: Piece, q: Value, k: Value, v: Value) -> tuple[list[Value], ...]:
        """What scores, softmax and mix keep of one block of queries."""
        heads = w.batch * self.n_heads
        numel = heads * piece.rows * piece.keys
        scores = [w.factor(q, heads * piece.rows * self.d_head), w.factor(k, heads * piece.keys * self.d_head)]
        if self.softcap:
            scores.append(Value("tanh of the scores", numel, w.autocast))
        if shift := self.position.shift(w, piece.rows):
            scores += shift.saved
        wide = Value("weights in float32", numel + (heads * piece.rows if self.sinks else 0), WIDE)
        weights, mixed = [wide], [w.cast(wide, numel, v.dtype)]
        if self._hides(w):
            weights.append(Value("mask", self._rows_of_mask(w) * piece.rows * piece.keys, "bool"))
        if self.dropout:
            mixed = [dropped(v, numel), Value("weights after dropout", numel, v.dtype)]
        return scores, weights, [*mixed, w.factor(v, heads * piece.keys * self.d_value)]


def merged_step(shape: Shape, mixed: Value) -> Step:
    """The heads' results side by side."""
    note, formula = "The heads' results side by side.", "(B,H,T,D) -> (B,T,H*D)"
    return Step(":merged", "merge heads", shape, formula=formula, note=note, dtype=mixed.dtype, out=mixed)


def visible_pairs(w: Workload, visibility: Visibility) -> int:
    """Pairs of query and key that are seen, in all rows together."""
    if not w.prefix_lengths:
        return w.batch * visibility.pairs(w.tokens, w.past)
    return sum(visibility.pairs(w.tokens, w.past, prefix) for prefix in w.prefix_lengths)
