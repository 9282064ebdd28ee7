"""Cross-attention: the decoder's queries read the encoder's output (Vaswani et al., arXiv:1706.03762, 3.2.3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from scantling.parts.dims import Dim, Shape, elements
from scantling.parts.leaf import Linear
from scantling.parts.mixing import Mixing, merged_step
from scantling.parts.part import Part, Step, Workload
from scantling.parts.saved import Value, flowing


@dataclass(frozen=True)
class CrossAttention(Part):
    """softmax(q k^T * scale) v with queries from x (B, T, d), keys and values from the source (B, S, d).

    Keys and values are made once, in the pass that brings the source; every real position of the source is seen.

    Attributes:
        scale: factor on the scores.
        biases: which of q, k, v, o have one.
        softcap: c in c * tanh(scores / c), or None.
        dropout: probability of dropping an attention weight in training.
    """

    d_model: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    scale: float
    biases: frozenset[str] = frozenset()
    softcap: float | None = None
    dropout: float = 0.0
    role = "cross_attention"
    of_source = True

    def children(self) -> Mapping[str, Part]:
        d, q_width, kv_width = self.d_model, self.n_heads * self.d_head, self.n_kv_heads * self.d_head
        return {
            "q": Linear(d, q_width, "q" in self.biases),
            "k": Linear(d, kv_width, "k" in self.biases),
            "v": Linear(d, kv_width, "v" in self.biases),
            "o": Linear(q_width, d, "o" in self.biases),
        }

    def state(self, w: Workload) -> Mapping[str, Shape]:
        kept = (w.batch, self.n_kv_heads, w.sources, self.d_head)
        return {"keys": kept, "values": kept}

    def steps(self, w: Workload) -> Iterator[Step]:
        B, T, S, D, d = w.B, w.T, w.T_src, Dim("d_head", self.d_head), Dim("d_model", self.d_model)
        H, H_kv = Dim("H", self.n_heads), Dim("H_kv", self.n_kv_heads)
        kept = (B, H_kv, S, D)
        q = yield from self.steps_of("q", w, "W_Q", "What each token asks of the source.", {"d_in": d, "d_out": H * D})
        k, v = Value("keys of the source", elements(kept)), Value("values of the source", elements(kept))
        note, formula = "The same numbers, seen head by head.", "(B, T, H*d_head) -> (B, H, T, d_head)"
        op, axes = "split q into heads", (B, H, T, D)
        yield Step(":q_heads", op, axes, formula=formula, note=note, dtype=q.dtype, stored=False, out=q)
        if w.past == 0:
            source, sizes = replace(w, lead=(B, S), x=w.beside), {"d_in": d, "d_out": H_kv * D}
            k = yield from self.steps_of("k", source, "W_K", "What each source token answers to.", sizes)
            v = yield from self.steps_of("v", source, "W_V", "What each source token hands over.", sizes)
            for name, out in (("k", k), ("v", v)):
                formula = "(B, T_src, H_kv*d_head) -> (B, H_kv, T_src, d_head)"
                op = f"split {name} into heads"
                dtype = out.dtype
                yield Step(f":{name}_heads", op, kept, formula=formula, note=note, dtype=dtype, stored=False, out=out)
        if not w.training:
            note = "Of the source: made once, kept for every later token."
            yield Step(":keys", "keys in the cache", kept, formula="of the source", note=note)
            yield Step(":values", "values in the cache", kept, formula="of the source", note=note)
        soft, drop = bool(self.softcap), bool(self.dropout)
        mixing = Mixing(self.n_heads, self.n_kv_heads, self.d_head, self.d_head, softcap=soft, dropout=drop)
        mixed = yield from flowing(mixing.steps(w, q, k, v), None)
        yield merged_step((B, T, H * D), D, mixed)
        note = "Writes what was read back to the stream's width."
        yield from self.steps_of("o", w.on(mixed), "W_O", note, {"d_in": H * D, "d_out": d})

    def forward(self, net: Any, x: Any, ctx: Any) -> Any:
        b, t, _ = x.shape
        q = ctx.mark(net, "q_heads", net.q(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2))
        k, v = ctx.memory_of(net, lambda memory: self._keys_and_values(net, memory, ctx))
        mixed = ctx.attend_source(net, q, k, v, self)
        merged = ctx.mark(net, "merged", mixed.transpose(1, 2).reshape(b, t, self.n_heads * self.d_head))
        return net.o(merged)

    def _keys_and_values(self, net: Any, memory: Any, ctx: Any) -> dict[str, Any]:
        b, s, _ = memory.shape
        made = {"k": net.k(memory), "v": net.v(memory)}
        heads = {name: y.view(b, s, self.n_kv_heads, self.d_head).transpose(1, 2) for name, y in made.items()}
        return {
            "keys": ctx.mark(net, "k_heads", heads["k"]),
            "values": ctx.mark(net, "v_heads", heads["v"]),
        }
