"""Multi-head latent attention: keys and values made from a narrow latent, which is all that the cache keeps."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from scantling.parts.dims import ONE, Dim, Dims, Shape, elements, shape_of
from scantling.parts.leaf import Linear, RMSNorm
from scantling.parts.mixing import Mixing, merged_step
from scantling.parts.part import Part, Step, Workload
from scantling.parts.position import NoPosition, Position
from scantling.parts.saved import Value, flowing
from scantling.visibility import Visibility


@dataclass(frozen=True)
class LatentAttention(Part):
    """softmax(q k^T * scale) v with k and v read from a latent of `kv_rank` (DeepSeek V2, arXiv:2405.04434, eq. 9-19).

    A head's query and key are `d_nope` channels without position and `d_rope` turned ones; the turned key is one for
    all heads. The latent is cached after its norm and expanded in every pass, so a decoded token pays for the keys and
    values of all positions before it.

    Attributes:
        kv_rank: width of the latent of keys and values.
        q_rank: width of the latent of queries; None where they are made from the stream.
        d_value: width of a head's value.
        eps: of the norms on both latents.
        scale: factor on the scores.
        dropout: probability of dropping an attention weight in training.
    """

    d_model: int
    n_heads: int
    kv_rank: int
    d_nope: int
    d_rope: int
    d_value: int
    eps: float
    scale: float
    q_rank: int | None = None
    visibility: Visibility = field(default_factory=Visibility)
    position: Position = field(default_factory=NoPosition)
    dropout: float = 0.0
    softcap: ClassVar[None] = None
    role = "attention"

    @property
    def d_head(self) -> int:
        """Width of a head's query and key."""
        return self.d_nope + self.d_rope

    def children(self) -> Mapping[str, Part]:
        d, h, rank = self.d_model, self.n_heads, self.kv_rank
        return {
            **self._query_parts(),
            "kv_down": Linear(d, rank + self.d_rope),
            "kv_norm": RMSNorm(rank, self.eps),
            "kv_up": Linear(rank, h * (self.d_nope + self.d_value)),
            "o": Linear(h * self.d_value, d),
        }

    def _query_parts(self) -> dict[str, Part]:
        d, width = self.d_model, self.n_heads * self.d_head
        if self.q_rank is None:
            return {"q": Linear(d, width)}
        return {
            "q_down": Linear(d, self.q_rank),
            "q_norm": RMSNorm(self.q_rank, self.eps),
            "q_up": Linear(self.q_rank, width),
        }

    def state(self, w: Workload) -> Mapping[str, Shape]:
        return {name: shape_of(dims) for name, dims in self._kept(w).items()}

    def _kept(self, w: Workload) -> dict[str, Dims]:
        axes = (w.B, ONE, w.S)
        return {"latent": (*axes, Dim("kv_rank", self.kv_rank)), "rope_key": (*axes, Dim("d_rope", self.d_rope))}

    def steps(self, w: Workload) -> Iterator[Step]:
        B, T, S, H, D = w.B, w.T, w.S, Dim("H", self.n_heads), Dim("d_head", self.d_head)
        D_v, d_rope = Dim("d_value", self.d_value), Dim("d_rope", self.d_rope)
        d, rank = Dim("d_model", self.d_model), Dim("kv_rank", self.kv_rank)
        q = yield from self._query_steps(w, d, H * D)
        note = "A narrow latent, and one key for the position."
        down = yield from self.steps_of("kv_down", w, "W_DKV, W_KR", note, {"d_in": d, "d_out": rank + d_rope})
        note = "Keeps the size of the latent in bounds."
        latent = yield from self.steps_of("kv_norm", w.on(down), note=note, sizes={"d": rank})
        note, formula = "The same numbers, seen head by head.", "(B, T, H*d_head) -> (B, H, T, d_head)"
        op, axes = "split q into heads", (B, H, T, D)
        yield Step(":q_heads", op, axes, formula=formula, note=note, dtype=q.dtype, stored=False, out=q)
        if self.position.turned:
            q = yield from self._turned_steps(w, (B, H, T, D), (B, ONE, T, d_rope), (q, down))
        if not w.training:
            note = "Kept for later tokens instead of keys and values."
            for name, kept in self._kept(w).items():
                yield Step(f":{name}", f"{name.replace('_', ' ')} in the cache", kept, formula="S = P + T", note=note)
        note, inner = "Keys and values of every position, from the latents.", replace(w.on(latent), lead=(B, S))
        sizes = {"d_in": rank, "d_out": H * (Dim("d_nope", self.d_nope) + D_v)}
        up = yield from self.steps_of("kv_up", inner, "W_UK, W_UV", note, sizes)
        keys, values = (B, H, S, D), (B, H, S, D_v)
        k = Value("keys by head", elements(keys), up.dtype)
        v = Value("values by head", elements(values), up.dtype)
        note = "Each head's own channels, and the shared ones that carry the position."
        yield Step(":k_heads", k.name, keys, formula="[k_nope_h, k_rope]", note=note, dtype=k.dtype)
        note = "What each position hands over, head by head."
        yield Step(":v_heads", v.name, values, formula="v_h", note=note, dtype=v.dtype)
        mixed = yield from flowing(self._mixing.steps(w, q, k, v), None)
        yield merged_step((B, T, H * D_v), D_v, mixed)
        note = "Writes what was read back to the stream's width."
        yield from self.steps_of("o", w.on(mixed), "W_O", note, {"d_in": H * D_v, "d_out": d})

    @property
    def _mixing(self) -> Mixing:
        heads, drop = self.n_heads, bool(self.dropout)
        return Mixing(heads, heads, self.d_head, self.d_value, self.visibility, self.position, dropout=drop)

    def _turned_steps(
        self, w: Workload, queries: Dims, key: Dims, read: tuple[Value, Value]
    ) -> Generator[Step, None, Value]:
        """Rows that turn `read`, queries and the shared key; returns the turned queries."""
        note = f"Turns pairs of the last {self.d_rope} channels by the position: no parameters."
        saved, formula = w.keep(*self.position.turning(w, read[0])), "[q_nope, q_rope cos + rot(q_rope) sin]"
        q, dtype = Value("turned q", elements(queries), read[0].dtype), read[0].dtype
        yield Step(":q_rotated", "RoPE on q", queries, formula=formula, note=note, dtype=dtype, saved=saved, out=q)
        note, op, formula = "One turned key, which all heads share.", "RoPE on the shared key", "x cos + rot(x) sin"
        yield Step(":k_rotated", op, key, formula=formula, note=note, dtype=read[1].dtype, saved=saved)
        return q

    def _query_steps(self, w: Workload, d: Dim, width: Dim) -> Generator[Step, None, Value]:
        if self.q_rank is None:
            return (yield from self.steps_of("q", w, "W_Q", "What each token asks.", {"d_in": d, "d_out": width}))
        rank, note = Dim("q_rank", self.q_rank), "A narrow latent of what each token asks."
        down = yield from self.steps_of("q_down", w, "W_DQ", note, {"d_in": d, "d_out": rank})
        note = "Keeps the size of the latent in bounds."
        latent = yield from self.steps_of("q_norm", w.on(down), note=note, sizes={"d": rank})
        note, sizes = "What each token asks, from its latent.", {"d_in": rank, "d_out": width}
        return (yield from self.steps_of("q_up", w.on(latent), "W_UQ", note, sizes))

    def forward(self, net: Any, x: Any, ctx: Any) -> Any:
        b, t, _ = x.shape
        q = net.q(x) if self.q_rank is None else net.q_up(net.q_norm(net.q_down(x)))
        latent, key = net.kv_down(x).split([self.kv_rank, self.d_rope], -1)
        latent, key = net.kv_norm(latent)[:, None], key[:, None]
        q = ctx.mark(net, "q_heads", q.view(b, t, self.n_heads, self.d_head).transpose(1, 2))
        if self.position.turned:
            own, turned = q.split([self.d_nope, self.d_rope], -1)
            q = ctx.mark(net, "q_rotated", ctx.join(own, ctx.rotate(turned, self.position)))
            key = ctx.mark(net, "k_rotated", ctx.rotate(key, self.position))
        latent, key = ctx.remember(net, "latent", latent), ctx.remember(net, "rope_key", key)
        k, v = self._expanded(net, latent[:, 0], key, ctx)
        mixed = ctx.attend(net, q, k, v, self)
        merged = ctx.mark(net, "merged", mixed.transpose(1, 2).reshape(b, t, self.n_heads * self.d_value))
        return net.o(merged)

    def _expanded(self, net: Any, latent: Any, key: Any, ctx: Any) -> tuple[Any, Any]:
        """Keys and values (B, H, S, D) of latents (B, S, kv_rank) and shared keys (B, 1, S, d_rope)."""
        b, s, _ = latent.shape
        wide = net.kv_up(latent).view(b, s, self.n_heads, self.d_nope + self.d_value).transpose(1, 2)
        own, v = wide.split([self.d_nope, self.d_value], -1)
        k = ctx.mark(net, "k_heads", ctx.join(own, key.expand(b, self.n_heads, s, self.d_rope)))
        # A view would keep the keys' channels with the values for the backward.
        return k, ctx.mark(net, "v_heads", ctx.apart(v))
