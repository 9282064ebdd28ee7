"""Multi-head attention: the only place where tokens exchange information."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from scantling.parts.dims import Dim, Shape
from scantling.parts.leaf import HeadNorm, LayerNorm, Linear, Norm, RMSNorm
from scantling.parts.part import FREE, Cost, Factor, Part, Step, Workload
from scantling.parts.position import NoPosition, Position
from scantling.visibility import Visibility


@dataclass(frozen=True)
class Attention(Part):
    """softmax(q k^T * scale) v over heads; query head i reads KV head floor(i * n_kv_heads / n_heads).

    Multi-head (Vaswani et al., arXiv:1706.03762), multi-query (arXiv:1911.02150) and grouped-query (arXiv:2305.13245)
    attention differ only in `n_kv_heads`.

    Attributes:
        scale: factor on the scores.
        biases: which of q, k, v, o have one.
        q_norm, k_norm: norms of queries and keys, before positions.
        softcap: c in c * tanh(scores / c) (Gemma 2, arXiv:2408.00118), or None.
        sinks: a learned score per head that takes weight and gives no value (gpt-oss).
        clip: q, k and v are clamped to [-clip, clip] (MPT), or None.
        dropout: probability of dropping an attention weight in training.
    """

    d_model: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    scale: float
    visibility: Visibility = field(default_factory=Visibility)
    position: Position = field(default_factory=NoPosition)
    biases: frozenset[str] = frozenset()
    q_norm: Norm | HeadNorm | None = None
    k_norm: Norm | HeadNorm | None = None
    softcap: float | None = None
    sinks: bool = False
    clip: float | None = None
    dropout: float = 0.0
    role = "attention"

    def children(self) -> Mapping[str, Part]:
        d, q_width, kv_width = self.d_model, self.n_heads * self.d_head, self.n_kv_heads * self.d_head
        norms = {"q_norm": self.q_norm, "k_norm": self.k_norm}
        return {
            "q": Linear(d, q_width, "q" in self.biases),
            "k": Linear(d, kv_width, "k" in self.biases),
            "v": Linear(d, kv_width, "v" in self.biases),
            **{name: norm for name, norm in norms.items() if norm},
            "o": Linear(q_width, d, "o" in self.biases),
        }

    def weights(self) -> Mapping[str, Shape]:
        return {"sinks": (self.n_heads,)} if self.sinks else {}

    @property
    def initial(self) -> Mapping[str, float]:
        return {"sinks": 0.0}

    def state(self, w: Workload) -> Mapping[str, Shape]:
        if not self.visibility.causal:
            # Every later token would change what the earlier ones are, so nothing is worth keeping.
            return {}
        kept = (w.batch, self.n_kv_heads, w.keys, self.d_head)
        return {"keys": kept, "values": kept}

    def steps(self, w: Workload) -> Iterator[Step]:
        B, T, S, D = w.B, w.T, w.S, Dim("d_head", self.d_head)
        H, H_kv, d = Dim("H", self.n_heads), Dim("H_kv", self.n_kv_heads), Dim("d_model", self.d_model)
        yield from self.steps_of("q", w, "W_Q", "What each token asks.", {"d_in": d, "d_out": H * D})
        yield from self.steps_of("k", w, "W_K", "What each token answers to.", {"d_in": d, "d_out": H_kv * D})
        yield from self.steps_of("v", w, "W_V", "What each token hands over.", {"d_in": d, "d_out": H_kv * D})
        if self.clip:
            for name, heads in (("q", H), ("k", H_kv), ("v", H_kv)):
                yield Step(f":{name}_clipped", f"clip {name}", (B, T, heads * D), formula=f"clamp to {self.clip:g}")
        yield from self._norm_steps(w, over_width=True)
        for name, heads in (("q", H), ("k", H_kv), ("v", H_kv)):
            note = "The same numbers, seen head by head."
            formula = f"(B, T, {heads.symbol}*d_head) -> (B, {heads.symbol}, T, d_head)"
            yield Step(f":{name}_heads", f"split {name} into heads", (B, heads, T, D), formula=formula, note=note)
        yield from self._norm_steps(w, over_width=False)
        if self.position.turned:
            for name, heads in (("q", H), ("k", H_kv)):
                note, formula = "Turns pairs of channels by the position: no parameters.", "x cos + rot(x) sin"
                yield Step(f":{name}_rotated", f"RoPE on {name}", (B, heads, T, D), formula=formula, note=note)
        if self.visibility.causal and not w.training:
            kept = (B, H_kv, S, D)
            yield Step(":keys", "keys in the cache", kept, formula="S = P + T", note="Kept for later tokens.")
            yield Step(":values", "values in the cache", kept, formula="S = P + T", note="Kept for later tokens.")
        if self.sinks:
            note = "A score per head that takes weight and gives no value."
            factors = (Factor("s", (H,), FREE, weight=True),)
            yield Step(":sinks", "attention sinks", (H,), self.n_heads, formula="s_h", note=note, factors=factors)
        yield from mix_steps(w, S, pairs_of(w, self.visibility), H, H_kv, D, D)
        note, formula = "The heads' results side by side.", "(B, H, T, d_head) -> (B, T, H*d_head)"
        yield Step(":merged", "merge heads", (B, T, H * D), formula=formula, note=note)
        note = "Writes what was read back to the stream's width."
        yield from self.steps_of("o", w, "W_O", note, {"d_in": H * D, "d_out": d})

    @property
    def _norm_over_width(self) -> bool:
        return (
            isinstance(self.q_norm, RMSNorm | LayerNorm) and self.q_norm.d == self.n_heads * self.d_head != self.d_head
        )

    def _norm_steps(self, w: Workload, over_width: bool) -> Iterator[Step]:
        if self.q_norm is None or self._norm_over_width != over_width:
            return
        D = Dim("d_head", self.d_head)
        for name, heads in (("q", Dim("H", self.n_heads)), ("k", Dim("H_kv", self.n_kv_heads))):
            lead = None if over_width else (w.B, heads, w.T)
            note, sizes = f"Keeps the size of {name} in bounds.", {"H": heads, "d": heads * D if over_width else D}
            yield from self.steps_of(f"{name}_norm", replace(w, lead=lead), note=note, sizes=sizes)

    def forward(self, net: Any, x: Any, ctx: Any) -> Any:
        b, t, _ = x.shape
        q, k, v = self._projected(net, x, ctx)
        q = ctx.mark(net, "q_heads", q.view(b, t, self.n_heads, self.d_head).transpose(1, 2))
        k = ctx.mark(net, "k_heads", k.view(b, t, self.n_kv_heads, self.d_head).transpose(1, 2))
        v = ctx.mark(net, "v_heads", v.view(b, t, self.n_kv_heads, self.d_head).transpose(1, 2))
        if self.q_norm and not self._norm_over_width:
            q, k = net.q_norm(q), net.k_norm(k)
        if self.position.turned:
            q = ctx.mark(net, "q_rotated", ctx.rotate(q, self.position))
            k = ctx.mark(net, "k_rotated", ctx.rotate(k, self.position))
        if self.visibility.causal:
            k, v = ctx.remember(net, "keys", k), ctx.remember(net, "values", v)
        sinks = ctx.mark(net, "sinks", net.sinks) if self.sinks else None
        mixed = ctx.attend(net, q, k, v, self, sinks)
        merged = ctx.mark(net, "merged", mixed.transpose(1, 2).reshape(b, t, self.n_heads * self.d_head))
        return net.o(merged)

    def _projected(self, net: Any, x: Any, ctx: Any) -> tuple[Any, Any, Any]:
        q, k, v = net.q(x), net.k(x), net.v(x)
        if self.clip:
            q, k, v = (
                ctx.mark(net, f"{name}_clipped", y.clamp(-self.clip, self.clip))
                for name, y in (("q", q), ("k", k), ("v", v))
            )
        if self.q_norm and self._norm_over_width:
            q, k = net.q_norm(q), net.k_norm(k)
        return q, k, v


def pairs_of(w: Workload, visibility: Visibility) -> Cost:
    """Pairs of query and key in all rows together: the square, its causal part, and those that are seen."""
    square = w.batch * w.tokens * w.keys
    causal = w.batch * Visibility().pairs(w.tokens, w.past) if visibility.causal else square
    rows = w.prefix_lengths or (0,) * w.batch
    return Cost(square, causal, sum(visibility.pairs(w.tokens, w.past, prefix) for prefix in rows))


def mix_steps(w: Workload, S: Dim, pairs: Cost, H: Dim, H_kv: Dim, D: Dim, D_v: Dim) -> Iterator[Step]:
    """Rows from queries (B, H, T, D) and keys (B, H_kv, S, D) with values (B, H_kv, S, D_v) to (B, H, T, D_v).

    Args:
        S: positions that are read from.
        pairs: of query and key, in each convention.
    """
    B, T, each = w.B, w.T, pairs.scaled(2 * H.size)
    by_score, by_value = each.scaled(D.size), each.scaled(D_v.size)
    if (group := H.size // H_kv.size) > 1:
        stored = w.kernel == "reference"
        note = f"Each KV head serves {group} query heads" + ("." if stored else ": an index, nothing is copied.")
        for name, width in (("k", D), ("v", D_v)):
            formula, op = f"head i <- i // {group}", f"repeat {name} {group}x"
            yield Step(f":{name}_shared", op, (B, H, S, width), formula=formula, note=note, stored=stored)
    q, k, v = Factor("q", (B, H, T, D)), Factor("k", (B, H, S, D)), Factor("v", (B, H, S, D_v))
    weights = Factor("weights", (B, H, T, S))
    if w.kernel == "reference":
        note, formula = "How well each query fits each key.", "q k^T * scale"
        yield Step(":scores", "scores", (B, H, T, S), 0, by_score, formula=formula, note=note, factors=(q, k))
        note = "Each row adds up to 1."
        yield Step(":weights", "softmax", (B, H, T, S), formula="softmax over visible keys", note=note)
        note, read = "What each query takes home.", (weights, v)
        yield Step(":mixed", "mix values", (B, H, T, D_v), 0, by_value, formula="weights v", note=note, factors=read)
    else:
        note = "Scores, softmax and mix in one kernel: the T x S matrix is never stored."
        cost = Cost(*(a + b for a, b in zip(by_score, by_value, strict=True)))
        inside = weights._replace(cost=by_value, stored=False)
        q, k, v = q._replace(cost=by_score), k._replace(cost=by_score), v._replace(cost=by_value)
        factors, formula = (q, k, v, inside), "softmax(q k^T * scale) v"
        yield Step(":mixed", "attention (fused)", (B, H, T, D_v), 0, cost, formula=formula, note=note, factors=factors)
