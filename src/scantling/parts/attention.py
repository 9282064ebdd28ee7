"""Multi-head attention: the only place where tokens exchange information."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from scantling.parts.leaf import HeadNorm, LayerNorm, Linear, Norm, RMSNorm
from scantling.parts.mixing import Mixing, merged_step
from scantling.parts.part import Part, Shape, Step, Workload
from scantling.parts.position import NoPosition, Position
from scantling.parts.saved import Value, flowing
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
        read = {
            "q": (yield from self.steps_of("q", w, "W_Q", "What each token asks.")),
            "k": (yield from self.steps_of("k", w, "W_K", "What each token answers to.")),
            "v": (yield from self.steps_of("v", w, "W_V", "What each token hands over.")),
        }
        if self.clip:
            yield from self._clip_steps(w, read, self.clip)
        yield from self._norm_steps(w, read, over_width=True)
        for name, shape in (("q", queries), ("k", new), ("v", new)):
            note = "The same numbers, seen head by head."
            letter = "H" if name == "q" else "H_kv"
            formula = f"(B,T,{letter}*D) -> (B,{letter},T,D)"
            op, dtype = f"split {name} into heads", read[name].dtype
            yield Step(f":{name}_heads", op, shape, formula=formula, note=note, dtype=dtype, out=read[name])
        yield from self._norm_steps(w, read, over_width=False)
        if self.position.turned:
            for name, shape in (("q", queries), ("k", new)):
                note = "Turns pairs of channels by the position: no parameters."
                saved, dtype = w.keep(*self.position.turning(w, read[name])), read[name].dtype
                read[name] = Value(f"turned {name}", math.prod(shape), dtype)
                op, formula = f"RoPE on {name}", "x cos + rot(x) sin"
                out = read[name]
                yield Step(f":{name}_rotated", op, shape, formula=formula, note=note, dtype=dtype, saved=saved, out=out)
        if self.visibility.causal and not w.training:
            yield Step(":keys", "keys in the cache", kept, formula="S = P + T", note="Kept for later tokens.")
            yield Step(":values", "values in the cache", kept, formula="S = P + T", note="Kept for later tokens.")
        if self.sinks:
            note = "A score per head that takes weight and gives no value."
            yield Step(":sinks", "attention sinks", (self.n_heads,), self.n_heads, formula="s_h", note=note)
        mixed = yield from flowing(self._mixing.steps(w, read["q"], read["k"], read["v"]), None)
        yield merged_step((b, t, self.n_heads * d), mixed)
        yield from self.steps_of("o", w.on(mixed), "W_O", "Writes what was read back to the stream's width.")

    def _clip_steps(self, w: Workload, read: dict[str, Value], clip: float) -> Iterator[Step]:
        for name, heads in (("q", self.n_heads), ("k", self.n_kv_heads), ("v", self.n_kv_heads)):
            shape = (w.batch, w.tokens, heads * self.d_head)
            saved, dtype, op = w.keep(read[name]), read[name].dtype, f"clip {name}"
            read[name] = Value(f"clipped {name}", math.prod(shape), dtype)
            yield Step(f":{name}_clipped", op, shape, formula=f"clamp to {clip:g}", dtype=dtype, saved=saved)

    @property
    def _mixing(self) -> Mixing:
        return Mixing(
            self.n_heads,
            self.n_kv_heads,
            self.d_head,
            self.d_head,
            self.visibility,
            self.position,
            bool(self.softcap),
            self.sinks,
            bool(self.dropout),
        )

    @property
    def _norm_over_width(self) -> bool:
        return (
            isinstance(self.q_norm, RMSNorm | LayerNorm) and self.q_norm.d == self.n_heads * self.d_head != self.d_head
        )

    def _norm_steps(self, w: Workload, read: dict[str, Value], over_width: bool) -> Iterator[Step]:
        if self.q_norm is None or self._norm_over_width != over_width:
            return
        for name, heads in (("q", self.n_heads), ("k", self.n_kv_heads)):
            lead = None if over_width else (w.batch, heads, w.tokens)
            inner, note = replace(w.on(read[name]), lead=lead), f"Keeps the size of {name} in bounds."
            read[name] = yield from self.steps_of(f"{name}_norm", inner, note=note)

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
