"""Multi-head attention: the only place where tokens exchange information."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from scantling.parts.leaf import Linear
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
    dropout: float = 0.0
    role = "attention"

    def children(self) -> Mapping[str, Part]:
        d, q_width, kv_width = self.d_model, self.n_heads * self.d_head, self.n_kv_heads * self.d_head
        return {
            "q": Linear(d, q_width, "q" in self.biases),
            "k": Linear(d, kv_width, "k" in self.biases),
            "v": Linear(d, kv_width, "v" in self.biases),
            "o": Linear(q_width, d, "o" in self.biases),
        }

    def state(self, w: Workload) -> Mapping[str, Shape]:
        kept = (w.batch, self.n_kv_heads, w.keys, self.d_head)
        return {"keys": kept, "values": kept}

    def steps(self, w: Workload) -> Iterator[Step]:
        b, t, s, d = w.batch, w.tokens, w.keys, self.d_head
        queries, new, kept = (b, self.n_heads, t, d), (b, self.n_kv_heads, t, d), (b, self.n_kv_heads, s, d)
        yield from self.steps_of("q", w, "W_Q", "What each token asks.")
        yield from self.steps_of("k", w, "W_K", "What each token answers to.")
        yield from self.steps_of("v", w, "W_V", "What each token hands over.")
        for name, shape in (("q", queries), ("k", new), ("v", new)):
            yield Step(f":{name}_heads", f"split {name} into heads", shape, formula="(B,T,H*D) -> (B,H,T,D)")
        if self.position.turned:
            for name, shape in (("q", queries), ("k", new)):
                note = "Turns pairs of channels by the position: no parameters."
                yield Step(f":{name}_rotated", f"RoPE on {name}", shape, formula="x cos + rot(x) sin", note=note)
        if not w.training:
            yield Step(":keys", "keys in the cache", kept, formula="S = P + T", note="Kept for later tokens.")
            yield Step(":values", "values in the cache", kept, formula="S = P + T", note="Kept for later tokens.")
        yield from self._mix_steps(w)
        yield Step(":merged", "merge heads", (b, t, self.n_heads * d), formula="(B,H,T,D) -> (B,T,H*D)")
        yield from self.steps_of("o", w, "W_O", "Writes what was read back to the stream's width.")

    def _mix_steps(self, w: Workload) -> Iterator[Step]:
        b, h, t, s, d = w.batch, self.n_heads, w.tokens, w.keys, self.d_head
        half, half_visible = 2 * b * h * t * s * d, 2 * b * h * self.visibility.pairs(t, w.past) * d
        if (group := self.n_heads // self.n_kv_heads) > 1:
            note = f"Each KV head serves {group} query heads; fused kernels index instead of copying."
            for name in ("k", "v"):
                yield Step(
                    f":{name}_shared",
                    f"repeat {name} {group}x",
                    (b, h, s, d),
                    formula=f"head i <- i // {group}",
                    note=note,
                )
        if w.kernel == "reference":
            note = "How well each query fits each key."
            yield Step(":scores", "scores", (b, h, t, s), 0, half, half_visible, formula="q k^T * scale", note=note)
            yield Step(
                ":weights", "softmax", (b, h, t, s), formula="softmax over visible keys", note="Each row adds up to 1."
            )
            yield Step(":mixed", "mix values", (b, h, t, d), 0, half, half_visible, formula="weights v")
        else:
            note = "Scores, softmax and mix in one kernel: the T x S matrix is never stored."
            formula = "softmax(q k^T * scale) v"
            yield Step(
                ":mixed", "attention (fused)", (b, h, t, d), 0, 2 * half, 2 * half_visible, formula=formula, note=note
            )

    def forward(self, net: Any, x: Any, ctx: Any) -> Any:
        b, t, _ = x.shape
        q, k, v = net.q(x), net.k(x), net.v(x)
        q = ctx.mark(net, "q_heads", q.view(b, t, self.n_heads, self.d_head).transpose(1, 2))
        k = ctx.mark(net, "k_heads", k.view(b, t, self.n_kv_heads, self.d_head).transpose(1, 2))
        v = ctx.mark(net, "v_heads", v.view(b, t, self.n_kv_heads, self.d_head).transpose(1, 2))
        if self.position.turned:
            q = ctx.mark(net, "q_rotated", ctx.rotate(q, self.position))
            k = ctx.mark(net, "k_rotated", ctx.rotate(k, self.position))
        k, v = ctx.remember(net, "keys", k), ctx.remember(net, "values", v)
        mixed = ctx.attend(net, q, k, v, self)
        merged = ctx.mark(net, "merged", mixed.transpose(1, 2).reshape(b, t, self.n_heads * self.d_head))
        return net.o(merged)
