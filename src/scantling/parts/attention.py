"""Multi-head attention: the only place where tokens exchange information."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from scantling.parts.dims import Dim, Shape, elements
from scantling.parts.leaf import HeadNorm, LayerNorm, Linear, Norm, RMSNorm
from scantling.parts.mixing import Mixing, merged_step
from scantling.parts.part import FREE, Factor, Part, Step, Workload
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
        B, T, S, D = w.B, w.T, w.S, Dim("d_head", self.d_head)
        H, H_kv, d = Dim("H", self.n_heads), Dim("H_kv", self.n_kv_heads), Dim("d_model", self.d_model)
        wide, narrow = {"d_in": d, "d_out": H * D}, {"d_in": d, "d_out": H_kv * D}
        read = {
            "q": (yield from self.steps_of("q", w, "W_Q", "What each token asks.", wide)),
            "k": (yield from self.steps_of("k", w, "W_K", "What each token answers to.", narrow)),
            "v": (yield from self.steps_of("v", w, "W_V", "What each token hands over.", narrow)),
        }
        if self.clip:
            yield from self._clip_steps(w, read, self.clip)
        yield from self._norm_steps(w, read, over_width=True)
        for name, heads in (("q", H), ("k", H_kv), ("v", H_kv)):
            note = "The same numbers, seen head by head."
            formula = f"(B, T, {heads.symbol}*d_head) -> (B, {heads.symbol}, T, d_head)"
            op, axes, out = f"split {name} into heads", (B, heads, T, D), read[name]
            yield Step(f":{name}_heads", op, axes, formula=formula, note=note, dtype=out.dtype, stored=False, out=out)
        yield from self._norm_steps(w, read, over_width=False)
        if self.position.turned:
            for name, heads in (("q", H), ("k", H_kv)):
                note, axes = "Turns pairs of channels by the position: no parameters.", (B, heads, T, D)
                saved, dtype = w.keep(*self.position.turning(w, read[name])), read[name].dtype
                read[name] = Value(f"turned {name}", elements(axes), dtype)
                op, formula = f"RoPE on {name}", "x cos + rot(x) sin"
                out = read[name]
                yield Step(f":{name}_rotated", op, axes, formula=formula, note=note, dtype=dtype, saved=saved, out=out)
        if self.visibility.causal and not w.training:
            kept = (B, H_kv, S, D)
            yield Step(":keys", "keys in the cache", kept, formula="S = P + T", note="Kept for later tokens.")
            yield Step(":values", "values in the cache", kept, formula="S = P + T", note="Kept for later tokens.")
        if self.sinks:
            note = "A score per head that takes weight and gives no value."
            factors = (Factor("s", (H,), FREE, weight=True, formula="through the softmax"),)
            yield Step(":sinks", "attention sinks", (H,), self.n_heads, formula="s_h", note=note, factors=factors)
        mixed = yield from flowing(self._mixing.steps(w, read["q"], read["k"], read["v"]), None)
        yield merged_step((B, T, H * D), D, mixed)
        note = "Writes what was read back to the stream's width."
        yield from self.steps_of("o", w.on(mixed), "W_O", note, {"d_in": H * D, "d_out": d})

    def _clip_steps(self, w: Workload, read: dict[str, Value], clip: float) -> Iterator[Step]:
        for name, heads in (("q", Dim("H", self.n_heads)), ("k", self._kv), ("v", self._kv)):
            axes = (w.B, w.T, heads * Dim("d_head", self.d_head))
            saved, dtype, op = w.keep(read[name]), read[name].dtype, f"clip {name}"
            read[name] = Value(f"clipped {name}", elements(axes), dtype)
            yield Step(f":{name}_clipped", op, axes, formula=f"clamp to {clip:g}", dtype=dtype, saved=saved)

    @property
    def _kv(self) -> Dim:
        return Dim("H_kv", self.n_kv_heads)

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
        D = Dim("d_head", self.d_head)
        for name, heads in (("q", Dim("H", self.n_heads)), ("k", self._kv)):
            lead = None if over_width else (w.B, heads, w.T)
            inner, note = replace(w.on(read[name]), lead=lead), f"Keeps the size of {name} in bounds."
            sizes = {"H": heads, "d": heads * D if over_width else D}
            read[name] = yield from self.steps_of(f"{name}_norm", inner, note=note, sizes=sizes)

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
