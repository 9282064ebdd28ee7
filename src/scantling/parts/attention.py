"""Multi-head attention: the only place where tokens exchange information."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from scantling.parts.leaf import HeadNorm, LayerNorm, Linear, Norm, RMSNorm
from scantling.parts.part import Part, Shape, Step, Workload
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
        b, t, s, d = w.batch, w.tokens, w.keys, self.d_head
        queries, new, kept = (b, self.n_heads, t, d), (b, self.n_kv_heads, t, d), (b, self.n_kv_heads, s, d)
        yield from self.steps_of("q", w, "W_Q", "What each token asks.")
        yield from self.steps_of("k", w, "W_K", "What each token answers to.")
        yield from self.steps_of("v", w, "W_V", "What each token hands over.")
        if self.clip:
            for name, heads in (("q", self.n_heads), ("k", self.n_kv_heads), ("v", self.n_kv_heads)):
                yield Step(f":{name}_clipped", f"clip {name}", (b, t, heads * d), formula=f"clamp to {self.clip:g}")
        yield from self._norm_steps(w, over_width=True)
        for name, shape in (("q", queries), ("k", new), ("v", new)):
            note = "The same numbers, seen head by head."
            letter = "H" if name == "q" else "H_kv"
            formula = f"(B,T,{letter}*D) -> (B,{letter},T,D)"
            yield Step(f":{name}_heads", f"split {name} into heads", shape, formula=formula, note=note)
        yield from self._norm_steps(w, over_width=False)
        if self.position.turned:
            for name, shape in (("q", queries), ("k", new)):
                note = "Turns pairs of channels by the position: no parameters."
                yield Step(f":{name}_rotated", f"RoPE on {name}", shape, formula="x cos + rot(x) sin", note=note)
        if self.visibility.causal and not w.training:
            yield Step(":keys", "keys in the cache", kept, formula="S = P + T", note="Kept for later tokens.")
            yield Step(":values", "values in the cache", kept, formula="S = P + T", note="Kept for later tokens.")
        if self.sinks:
            note = "A score per head that takes weight and gives no value."
            yield Step(":sinks", "attention sinks", (self.n_heads,), self.n_heads, formula="s_h", note=note)
        pairs = visible_pairs(w, self.visibility)
        yield from mix_steps(w, w.keys, pairs, self.n_heads, self.n_kv_heads, self.d_head, self.d_head)
        note = "The heads' results side by side."
        yield Step(":merged", "merge heads", (b, t, self.n_heads * d), formula="(B,H,T,D) -> (B,T,H*D)", note=note)
        yield from self.steps_of("o", w, "W_O", "Writes what was read back to the stream's width.")

    @property
    def _norm_over_width(self) -> bool:
        return (
            isinstance(self.q_norm, RMSNorm | LayerNorm) and self.q_norm.d == self.n_heads * self.d_head != self.d_head
        )

    def _norm_steps(self, w: Workload, over_width: bool) -> Iterator[Step]:
        if self.q_norm is None or self._norm_over_width != over_width:
            return
        for name, heads in (("q", self.n_heads), ("k", self.n_kv_heads)):
            lead = None if over_width else (w.batch, heads, w.tokens)
            yield from self.steps_of(f"{name}_norm", replace(w, lead=lead), note=f"Keeps the size of {name} in bounds.")

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


def visible_pairs(w: Workload, visibility: Visibility) -> int:
    """Pairs of query and key that are seen, in all rows together."""
    if not w.prefix_lengths:
        return w.batch * visibility.pairs(w.tokens, w.past)
    return sum(visibility.pairs(w.tokens, w.past, prefix) for prefix in w.prefix_lengths)


def mix_steps(
    w: Workload, keys: int, seen: int, n_heads: int, n_kv_heads: int, d_head: int, d_value: int
) -> Iterator[Step]:
    """Rows from queries and keys of `d_head` channels and values of `d_value` to the mixed values.

    Args:
        keys: S, positions that are read from.
        seen: how many of the B x T x S pairs are.
    """
    b, h, t, s = w.batch, n_heads, w.tokens, keys
    pairs, visible = 2 * b * h * t * s, 2 * h * seen
    if (group := n_heads // n_kv_heads) > 1:
        stored = w.kernel == "reference"
        note = f"Each KV head serves {group} query heads" + ("." if stored else ": an index, nothing is copied.")
        for name, width in (("k", d_head), ("v", d_value)):
            shape, formula = (b, h, s, width), f"head i <- i // {group}"
            op = f"repeat {name} {group}x"
            yield Step(f":{name}_shared", op, shape, formula=formula, note=note, stored=stored)
    if w.kernel == "reference":
        cost, formula = (pairs * d_head, visible * d_head), "q k^T * scale"
        yield Step(
            ":scores", "scores", (b, h, t, s), 0, *cost, formula=formula, note="How well each query fits each key."
        )
        note = "Each row adds up to 1."
        yield Step(":weights", "softmax", (b, h, t, s), formula="softmax over visible keys", note=note)
        cost = (pairs * d_value, visible * d_value)
        note = "What each query takes home."
        yield Step(":mixed", "mix values", (b, h, t, d_value), 0, *cost, formula="weights v", note=note)
    else:
        note = "Scores, softmax and mix in one kernel: the T x S matrix is never stored."
        cost, formula = (pairs * (d_head + d_value), visible * (d_head + d_value)), "softmax(q k^T * scale) v"
        yield Step(":mixed", "attention (fused)", (b, h, t, d_value), 0, *cost, formula=formula, note=note)
