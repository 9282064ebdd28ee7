"""From queries, keys and values to what each head takes home: the rows, and what each kernel keeps of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain

from scantling.parts.dims import Dim, Dims, elements
from scantling.parts.leaf import WIDE
from scantling.parts.part import FREE, Cost, Factor, Step, Workload
from scantling.parts.position import NoPosition, Position
from scantling.parts.saved import Value, region
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

    def _axes(self, w: Workload) -> tuple[Dims, Dims, Dims, Dims]:
        """Of queries, keys, values (each with a head of its own) and scores."""
        B, T, S, H = w.B, w.T, w.T_src if self.visibility is None else w.S, Dim("H", self.n_heads)
        D = Dim("d_head", self.d_head)
        D_v = D if self.d_head == self.d_value else Dim("d_value", self.d_value)
        return (B, H, T, D), (B, H, S, D), (B, H, S, D_v), (B, H, T, S)

    def _shared(self, w: Workload, read: tuple[Value, Value], stored: bool) -> Iterator[Step]:
        if (group := self.n_heads // self.n_kv_heads) > 1:
            note = f"Each KV head serves {group} query heads" + ("." if stored else ": an index, nothing is copied.")
            _, k, v, _ = self._axes(w)
            for name, axes, value in zip("kv", (k, v), read, strict=True):
                op, formula, dtype = f"repeat {name} {group}x", f"head i <- i // {group}", value.dtype
                yield Step(f":{name}_shared", op, axes, formula=formula, note=note, dtype=dtype, stored=stored)

    def _copies(self, w: Workload, k: Value, v: Value) -> tuple[Value, Value]:
        """Keys and values as a plain product reads them: one head for each of the queries'."""
        if self.n_heads == self.n_kv_heads:
            return k, v
        numel = w.batch * self.n_heads * self.keys(w)
        keys = Value("repeated keys", numel * self.d_head, k.dtype)
        return keys, Value("repeated values", numel * self.d_value, v.dtype)

    def pairs(self, w: Workload) -> Cost:
        """Pairs of query and key in all rows together: the square, its causal part, and those that are seen."""
        square = w.batch * w.tokens * self.keys(w)
        if self.visibility is None:
            return Cost.of(square)
        causal = w.batch * Visibility().pairs(w.tokens, w.past) if self.visibility.causal else square
        return Cost(square, causal, visible_pairs(w, self.visibility))

    def _products(self, w: Workload) -> tuple[Cost, Cost]:
        """Of queries with keys, and of weights with values."""
        each = self.pairs(w).scaled(2 * self.n_heads)
        return each.scaled(self.d_head), each.scaled(self.d_value)

    def _reference(self, w: Workload, q: Value, k: Value, v: Value) -> Iterator[Step]:
        yield from self._shared(w, (k, v), stored=True)
        k, v = self._copies(w, k, v)
        queries, keys, values, pairs = self._axes(w)
        by_score, by_value = self._products(w)
        scores, weights, mixed = self._plain(w, Piece(w.tokens, self.keys(w), True), q, k, v)
        yield Step(
            ":scores",
            "scores",
            pairs,
            cost=by_score,
            formula="q k^T * scale",
            note="How well each query fits each key.",
            dtype=w.autocast,
            factors=(Factor("q", queries, formula="dy k * scale"), Factor("k", keys, formula="dy^T q * scale")),
            saved=w.keep(*scores),
            before_saving=by_score if self.softcap else FREE,
        )
        note, formula, saved = "Each row adds up to 1.", "softmax over visible keys", w.keep(*weights)
        yield Step(":weights", "softmax", pairs, formula=formula, note=note, dtype=v.dtype, saved=saved)
        yield Step(
            ":mixed",
            "mix values",
            (*queries[:-1], values[-1]),
            cost=by_value,
            formula="weights v",
            note="What each query takes home.",
            dtype=w.autocast,
            factors=(Factor("weights", pairs, formula="dy v^T"), Factor("v", values, formula="weights^T dy")),
            saved=w.keep(*mixed),
        )

    def _fused(self, w: Workload, q: Value, k: Value, v: Value) -> Iterator[Step]:
        yield from self._shared(w, (k, v), stored=False)
        queries, keys, values, pairs = self._axes(w)
        by_score, by_value = self._products(w)
        axes, H_kv = (*queries[:-1], values[-1]), Dim("H_kv", self.n_kv_heads)
        out = Value("mixed values", elements(axes), w.autocast)
        saved, before = self._kept(w, (q, k, v), out) if w.training else ([], FREE)
        yield Step(
            ":mixed",
            "attention (fused)",
            axes,
            cost=by_score.plus(by_value),
            formula="softmax(q k^T * scale) v",
            note="Scores, softmax and mix in one kernel: the T x S matrix is never stored.",
            dtype=out.dtype,
            factors=(
                Factor("q", queries, by_score, formula="ds k * scale"),
                Factor("k", (keys[0], H_kv, *keys[2:]), by_score, formula="ds^T q * scale"),
                Factor("v", (values[0], H_kv, *values[2:]), by_value, formula="weights^T dy"),
                Factor("weights", pairs, by_value, stored=False, formula="dy v^T"),
            ),
            saved=w.keep(*saved),
            before_saving=before,
            out=out,
        )

    def _kept(self, w: Workload, read: tuple[Value, Value, Value], out: Value) -> tuple[list[Value], Cost]:
        one = self.native or w.accelerator
        return self._in_torch(w, read, out) if one else self._in_blocks(w, *read)

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
        if w.accelerator:
            return False
        told = w.past == 0 and self.native and self.position.shift(w, 1) is None
        return self._odd(w) or (self._hides(w) and not told)

    def _rows_of_mask(self, w: Workload) -> int:
        prefixed = self.visibility and self.visibility.prefix and w.prefix_lengths
        return w.batch if w.packed or prefixed else 1

    def pieces(self, w: Workload) -> list[Piece]:
        """The blocks of queries of the fused kernel."""
        keys, masked = self.keys(w), self._masked(w)
        if w.accelerator:
            return [Piece(w.tokens, keys, True)]
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

    def _in_torch(self, w: Workload, read: tuple[Value, Value, Value], out: Value) -> tuple[list[Value], Cost]:
        """Queries, keys and values once; of each call its mask in numbers, its output and the log of its sums.

        On an accelerator it is one call that knows of windows, slopes and dropout without a table.
        """
        saved: list[Value] = []
        pieces = self.pieces(w)
        for piece in pieces:
            heads = w.batch * self.n_heads * piece.rows
            kv_heads = w.batch * self.n_kv_heads * piece.keys
            sizes = (heads * self.d_head, kv_heads * self.d_head, kv_heads * self.d_value)
            saved += [w.factor(x, size) for x, size in zip(read, sizes, strict=True)]
            shift = self.position.shift(w, piece.rows)
            if self._masked(w):
                numel = self._rows_of_mask(w) * piece.rows * piece.keys * (self.n_heads if shift else 1)
                saved.append(Value("mask", numel, w.autocast))
            elif shift and (shift.trained or not w.accelerator):
                saved.append(Value("shift of the scores", shift.numel, w.autocast))
            block = Value("mixed values of a block", heads * self.d_value, w.autocast)
            saved.append(out if len(pieces) == 1 else block)
            saved.append(Value("log of each row's sum", heads, None if w.dtype == "float64" else WIDE))
        by_score, by_value = self._products(w)
        return saved, by_score.plus(by_value)

    def _in_blocks(self, w: Workload, q: Value, k: Value, v: Value) -> tuple[list[Value], Cost]:
        """Plain products, block by block; what a block reads of queries, keys and values is copied if not all of it."""
        k, v = self._copies(w, k, v)
        saved: list[Value] = []
        pieces = self.pieces(w)
        for piece in pieces:
            rows, width = w.batch * self.n_heads, piece.keys
            part = Value("queries of a block", rows * piece.rows * self.d_head, q.dtype)
            part = q if len(pieces) == 1 else part
            own_k = k if piece.whole else Value("keys of a block", rows * width * self.d_head, k.dtype)
            own_v = v if piece.whole else Value("values of a block", rows * width * self.d_value, v.dtype)
            saved += chain(*self._plain(w, piece, part, own_k, own_v))
        # Nothing is kept after the last block's second product.
        by_score, by_value = self._products(w)
        rows = pieces[-1].rows
        _, last = self._products(replace(w, tokens=rows, past=w.keys - rows, source=w.sources, training=False))
        return saved, by_score.plus(by_value).plus(last.scaled(-1))

    def _plain(self, w: Workload, piece: Piece, q: Value, k: Value, v: Value) -> tuple[list[Value], ...]:
        """What scores, softmax and mix keep of one block of queries."""
        heads = w.batch * self.n_heads
        numel = heads * piece.rows * piece.keys
        scores = [w.factor(q, heads * piece.rows * self.d_head), w.factor(k, heads * piece.keys * self.d_head)]
        if self.softcap:
            scores.append(Value("tanh of the scores", numel, w.autocast))
        if shift := self.position.shift(w, piece.rows):
            scores += shift.saved
        if w.accelerator:
            soft = Value("weights", numel, v.dtype)
            after = [w.dropped(soft, numel), Value("weights after dropout", numel, v.dtype)] if self.dropout else [soft]
            return scores, [soft], [*after, v]
        wide = Value("weights in float32", numel + (heads * piece.rows if self.sinks else 0), WIDE)
        weights, mixed = [wide], [w.cast(wide, numel, v.dtype)]
        if self._hides(w):
            weights.append(Value("mask", self._rows_of_mask(w) * piece.rows * piece.keys, "bool"))
        if self.dropout:
            mixed = [w.dropped(v, numel), Value("weights after dropout", numel, v.dtype)]
        return scores, weights, [*mixed, w.factor(v, heads * piece.keys * self.d_value)]


def merged_step(axes: Dims, D: Dim, mixed: Value) -> Step:
    """The heads' results side by side, D being the width of each."""
    note, formula = "The heads' results side by side.", f"(B, H, T, {D.symbol}) -> (B, T, H*{D.symbol})"
    return Step(":merged", "merge heads", axes, formula=formula, note=note, dtype=mixed.dtype, out=mixed)


def visible_pairs(w: Workload, visibility: Visibility) -> int:
    """Pairs of query and key that are seen, in all rows together."""
    if not w.prefix_lengths:
        return w.batch * visibility.pairs(w.tokens, w.past)
    return sum(visibility.pairs(w.tokens, w.past, prefix) for prefix in w.prefix_lengths)
