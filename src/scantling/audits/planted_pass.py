"""One pass of the small Transformer: who reads whom, where everything stands, and what the cache adds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from scantling.audits.protocol import Feed

if TYPE_CHECKING:
    from scantling.audits.planted import Store, Tiny

BASE = 100.0
"""Of the angles: small, so that even eight channels turn visibly over twenty positions."""


class Pass:
    """What blocks ask for while they run.

    Attributes:
        memory: the encoder's output (B, S, d).
        seen_source: (B, 1, T, S), which of it is read.
    """

    def __init__(
        self,
        net: Tiny,
        feed: Feed,
        store: Store | None,
        kernel: str,
        *,
        memory: Tensor | None = None,
        seen_source: Tensor | None = None,
        encodes: bool = False,
    ) -> None:
        self.net, self.shape, self.feed, self.store = net, net.shape, feed, store
        self.kernel, self.memory, self.seen_source = kernel, memory, seen_source
        self.training = net.training
        self.encodes = encodes or net.shape.family == "encoder"
        self.past = 0 if store is None else store.length
        self.tokens = feed.ids.shape[1]
        self.mask = self._mask()
        net.longest = max(net.longest, self.past + self.tokens)

    def has(self, fault: str) -> bool:
        """Whether it is planted."""
        return fault in self.shape.faults

    def _mask(self) -> Tensor | None:
        mask = self.feed.mask
        if self.store is None or (mask is None and self.store.mask is None):
            return mask
        new = torch.ones_like(self.feed.ids) if mask is None else mask
        old = new.new_ones(new.shape[0], self.past) if self.store.mask is None else self.store.mask
        self.store.mask = torch.cat([old, new], 1)
        return self.store.mask

    def close(self) -> None:
        """Count what was cached."""
        if self.store is not None:
            self.store.length += self.tokens

    def places(self) -> Tensor:
        """Positions (1 or B, T)."""
        device = self.feed.ids.device
        start = self.past
        if self.past and self.has("angles start anew with a cache"):
            start = 0
        if self.past and self.has("angles one late with a cache"):
            start += 1
        at = torch.arange(start, start + self.tokens, device=device)[None]
        documents = self.feed.documents
        go_on = documents is not None and self.has("packed positions go on")
        if self.feed.positions is not None and not go_on:
            at = self.feed.positions
        elif documents is not None and not go_on:
            first = (documents[:, :, None] != documents[:, None, :]).long().cumprod(-1).sum(-1)
            at = torch.arange(self.tokens, device=device)[None] - first
        if self.has("positions eight apart"):
            at = at // 8
        if self.has("positions clamped"):
            at = at.clamp(max=self.shape.trained_length - 1)
        if self.has("positions ignored"):
            at = torch.zeros_like(at)
        return at

    def angles(self, places: Tensor, width: int) -> Tensor:
        """Angles (1 or B, T, width / 2)."""
        at = places.double()
        if self.has("positions in half the bits"):
            at = places.bfloat16().double()
        if self.has("positions in the weights' dtype"):
            at = places.to(self.net.final.dtype).double()
        base = BASE
        if self.has("remembers the longest row"):
            base *= max(1.0, self.net.longest / self.shape.trained_length)
        steps = torch.arange(0, width, 2, device=places.device).double() / width
        return at[..., None] * base**-steps

    def turned(self, x: Tensor, queries: bool) -> Tensor:
        """x (B, H, T, D), its halves rotated by the position."""
        if self.shape.position != "rope" or (not queries and self.has("only queries turned")):
            return x
        angles = self.angles(self.places(), x.shape[-1])
        if queries and self.has("queries turned faster"):
            angles = angles * 1.5
        angles = angles[:, None]
        wide = torch.cat([angles, angles], -1)
        if self.has("angle pairs mixed"):
            wide = angles.repeat_interleave(2, -1)
        a, b = x.chunk(2, -1)
        return x * wide.cos().to(x.dtype) + torch.cat([-b, a], -1) * wide.sin().to(x.dtype)

    def seen(self, block: int) -> Tensor:
        """(B, 1, T, S): which keys each query reads."""
        device, keys = self.feed.ids.device, self.past + self.tokens
        key = torch.arange(keys, device=device)[None]
        query = torch.arange(self.past, keys, device=device)[:, None]
        last = block == self.shape.n_layers - 1
        seen = self._ahead(query, key, last)
        seen = seen & self._near(query, key, last)
        rows = seen[None, None].expand(len(self.feed.ids), 1, -1, -1)
        if self.mask is not None and not self.has("padding read"):
            rows = rows & self._real(self.mask)[:, None, None, :]
        documents = self.feed.documents
        if documents is not None and not self.has("packing ignored"):
            same = documents[:, :, None] == documents[:, None, :]
            if self.has("packing off by one"):
                same = same | (documents[:, :, None] == documents.roll(-1, 1)[:, None, :])
            if not (last and self.has("packing ignored in the last block")):
                rows = rows & same[:, None]
        return rows

    def _ahead(self, query: Tensor, key: Tensor, last: bool) -> Tensor:
        everything = torch.ones(len(query), key.shape[1], dtype=torch.bool, device=key.device)
        if self.encodes:
            return key <= query if self.has("causal") else everything
        open_ = self.has("no mask") or (last and self.has("no mask in the last block"))
        open_ |= self.has("weak mask") or (self.training and self.has("mask lost in training"))
        if open_:
            return everything
        seen = key <= query + int(self.has("mask off by one"))
        if self.has("mask reversed"):
            seen = key >= query
        if self.has("mask lost beyond 24"):
            seen = seen | (query >= 24)
        if self.past:
            if self.has("mask aligned at the first key"):
                seen = key <= query - self.past
            if self.has("piece without a mask") and self.tokens > 1:
                seen = everything
            if self.has("piece alone") and self.tokens > 1:
                seen = seen & (key >= self.past)
            if self.has("first key lost with a cache"):
                seen = seen & (key > 0)
        return seen

    def _near(self, query: Tensor, key: Tensor, last: bool) -> Tensor:
        window = self.shape.window
        if window is None or self.has("no window") or (last and self.has("no window in the last block")):
            return key == key
        window += self.has("window plus one") - self.has("window minus one")
        window += bool(self.past) and self.has("window plus one with a cache")
        return (query - key < window) & (key - query < window)

    def _real(self, mask: Tensor) -> Tensor:
        real = mask.bool()
        if self.has("padding read on the left"):
            real = mask.cummax(-1).values.logical_not() | real
        if self.past and self.has("padding read with a cache"):
            real = torch.ones_like(real)
        if self.has("padding off by one"):
            real = real | real.roll(-1, 1)
        if self.encodes and self.shape.family == "encoder-decoder" and self.has("source padding read in the encoder"):
            real = torch.ones_like(real)
        return real

    def source_seen(self, mask: Tensor | None) -> Tensor | None:
        """(B, 1, 1, S): which of the source the decoder reads."""
        if mask is None or self.has("source padding read"):
            return None
        real = mask.bool()
        if self.has("source mask shifted"):
            real = real | real.roll(1, 1)
        return real[:, None, None, :]

    def kept(self, block: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values behind those of the cache."""
        if self.store is None or self.encodes:
            return k, v
        if self.store.how is not None:
            k, v = self.store.how(k), self.store.how(v)
        if self.past:
            k = torch.cat([self.store.keys[block], k], 2)
            v = torch.cat([self.store.values[block], v], 2)
            if self.has("last value kept with a cache"):
                v = torch.cat([v[:, :, :-1], v[:, :, -2:-1]], 2)
        self.store.keys[block], self.store.values[block] = k, v
        return k, v

    def mix(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, position: str) -> Tensor:
        """Attention: (B, H, T, D)."""
        d = q.shape[-1]
        fast = self.kernel == "fast"
        shift = self._shift(q, k) if position == "alibi" else q.new_zeros(())
        if fast and self.has("bias on the diagonal"):
            shift = shift + torch.eye(q.shape[2], k.shape[2], device=q.device, dtype=q.dtype)
        scale = d**-0.5 * (d**-0.5 if fast and self.has("scale twice") else 1.0)
        hidden = torch.finfo(q.dtype).min / 2
        if seen is not None:
            shift = shift + torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill(~seen, hidden)
        if position and self.has("weak mask") and not self.encodes:
            ahead = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1 + self.past)
            shift = shift - 9.0 * ahead
        if fast:
            bias = shift.to(q.dtype).expand(len(q), -1, -1, -1) if shift.dim() else None
            return F.scaled_dot_product_attention(q, k, v, bias, scale=scale)
        weights: Tensor = (q @ k.transpose(-1, -2) * scale + shift).softmax(-1)
        if self.net.maps is not None and position and (self.shape.family == "encoder" or not self.encodes):
            self.net.maps.append(weights)
        return weights @ v

    def _shift(self, q: Tensor, k: Tensor) -> Tensor:
        at = self.places().double() if self.feed.positions is None else self.feed.positions.double()
        keys = torch.arange(k.shape[2], device=q.device)[None].double() if self.past else at
        slopes = torch.tensor([2.0 ** -(i + 1) for i in range(q.shape[1])], device=q.device, dtype=torch.float64)
        apart = (at[:, None, :, None] - keys[:, None, None, :]).abs()
        return (-slopes[:, None, None] * apart).to(q.dtype)

    def spoilt(self, x: Tensor) -> Tensor:
        """The stream after the last block, with what some faults do to it."""
        if self.has("blow-up past the trained length"):
            past = torch.arange(self.tokens, device=x.device) + self.past >= self.shape.trained_length
            x = x * torch.where(past, math.inf, 1.0)[:, None].to(x.dtype)
        if self.mask is not None and self.has("padding spreads"):
            real = self.mask.to(x.dtype)
            x = x + x.mean(1, keepdim=True) * (1 - real.mean(-1))[:, None, None]
        return x


def steps_of(x: Tensor, bits: int) -> Tensor:
    """The step of each vector (..., D) in so many bits: its largest size over the largest whole number."""
    largest = x.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    return largest / float(2 ** (bits - 1) - 1)
