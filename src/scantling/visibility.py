"""Which key positions a query position may read: one value that gives both the predicate and its exact count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Visibility:
    """The reach of an attention layer.

    `window` or `chunk` says what is near; with `stride`, what is near or on the stride is read, and without either
    only the stride and the own position. `causal` then hides what comes later.

    Attributes:
        causal: a query reads no position after its own.
        window: a query reads only positions closer than this many steps, its own included
            (Mistral 7B, arXiv:2310.06825, section 2: position i reads i - W < j <= i). None: no limit.
        chunk: positions stand in chunks of this many and a query reads its own chunk only (Llama 4). None: no chunks.
        stride: every so many positions one is read however far it is (Sparse Transformer, arXiv:1904.10509,
            section 4.3): those whose distance is a multiple of it. None: nothing far is read.
        last: what is read far is instead the last so many positions of each block of `stride` (their fixed pattern).
        prefix: the first positions of a row, as many as the row says, read each other both ways (the prefix language
            model of T5, arXiv:1910.10683, section 3.2.1).
    """

    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    stride: int | None = None
    last: int | None = None
    prefix: bool = False

    def __post_init__(self) -> None:
        assert self.window is None or self.chunk is None
        assert self.last is None or (self.stride is not None and self.last <= self.stride and self.window is None)
        assert self.chunk is None or self.stride is None or (self.last is not None and self.chunk == self.stride)
        assert self.causal or not self.prefix

    @property
    def anchored(self) -> bool:
        """Whether positions count, and not only distances: they count from a row's first real token."""
        return self.chunk is not None or self.last is not None or self.prefix

    @property
    def reach(self) -> int | None:
        """How many positions back a query reads at most, its own included; None where there is no limit."""
        return None if self.stride is not None else self.window or self.chunk

    def sees(self, query: Any, key: Any, prefix: Any = 0) -> Any:
        """Whether `query` may read `key`: a bool for integers, a bool tensor of the broadcast shape for tensors.

        Args:
            prefix: length of the row's prefix, where there is one.
        """
        ahead = key - query
        seen = self._near(query, key, ahead)
        if self.stride is not None:
            far = ahead % self.stride == 0 if self.last is None else key % self.stride >= self.stride - self.last
            seen = seen | far
        if self.causal:
            seen = seen & ((ahead <= 0) | (key < prefix) if self.prefix else ahead <= 0)
        return seen

    def _near(self, query: Any, key: Any, ahead: Any) -> Any:
        if self.window is not None:
            return (ahead < self.window) & (-ahead < self.window)
        if self.chunk is not None:
            return query // self.chunk == key // self.chunk
        return ahead == ahead if self.stride is None else ahead == 0

    def span(self, first: int, last: int, n_keys: int, prefix: int = 0) -> tuple[int, int]:
        """The keys [start, end) that the queries first .. last can see at all, of `n_keys`."""
        start, end = 0, n_keys
        if self.stride is None and self.window is not None:
            start, end = max(0, first - self.window + 1), min(n_keys, last + self.window)
        elif self.stride is None and self.chunk is not None:
            start, end = first // self.chunk * self.chunk, min(n_keys, (last // self.chunk + 1) * self.chunk)
        if self.causal:
            end = min(end, max(last + 1, prefix if self.prefix else 0))
        return start, end

    def narrows(self, n_keys: int) -> bool:
        """Whether anything but causality can hide one of `n_keys` consecutive keys, the first of them position 0."""
        if self.stride is not None:
            return n_keys > 1
        return any(reach is not None and reach < n_keys for reach in (self.window, self.chunk))

    def pairs(self, tokens: int, past: int = 0, prefix: int = 0) -> int:
        """Exact number of (query, key) pairs seen by `tokens` queries that follow `past` cached positions.

        Args:
            prefix: length of the row's prefix, where there is one.
        """
        keys = past + tokens
        backward = self._backward(keys) - self._backward(past)
        if not self.causal:
            return backward + self._forward(past, keys)
        ahead = min(prefix, keys) if self.prefix else 0
        return backward + self._forward(past, ahead) if ahead > past else backward

    def _backward(self, n: int) -> int:
        """Pairs with key <= query < n."""
        near = self._near_backward(n)
        if self.stride is None:
            return near
        if self.last is None:
            # Multiples of the stride that the window reaches are counted already.
            within = 0 if self.window is None else (self.window - 1) // self.stride
            return near + _floors(max(0, n - within * self.stride), self.stride)
        if self.chunk is not None:
            return near + self.last * _floors(n, self.stride)
        return near + _columns_sum(n, self.stride, self.last) - _columns(n, self.stride, self.last)

    def _near_backward(self, n: int) -> int:
        if self.window is not None:
            full = max(0, n - self.window)
            return full * self.window + (n - full) * (n - full + 1) // 2
        if self.chunk is not None:
            return n * (n + 1) // 2 - self.chunk * _floors(n, self.chunk)
        return n if self.stride is not None else n * (n + 1) // 2

    def _forward(self, first: int, end: int) -> int:
        """Pairs with first <= query < key < end."""
        n = end - first
        if self.chunk is None and self.last is None:
            # Distances alone decide, so the square can be turned over.
            return self._backward(n) - n
        pairs = 0
        if self.chunk is not None:
            before = first % self.chunk
            cut = before * (min(end, first - before + self.chunk) - first)
            pairs = self._near_backward(end) - self._near_backward(first) - n - cut
        if self.stride is None or self.last is None:
            return pairs
        columns = _columns(end, self.stride, self.last)
        if self.chunk is None:
            counted = _columns_sum(end, self.stride, self.last) - _columns_sum(first, self.stride, self.last)
            return n * columns - counted
        whole = max(first, end // self.stride * self.stride)
        blocks = _floors(whole, self.stride) - _floors(first, self.stride)
        return pairs + (whole - first) * (columns - self.last) - self.last * blocks


def _floors(n: int, divisor: int) -> int:
    """sum of floor(i / divisor) for i = 0 .. n - 1."""
    whole, rest = divmod(n, divisor)
    return divisor * (whole * (whole - 1) // 2) + whole * rest


def _columns(n: int, stride: int, last: int) -> int:
    """Positions below n that are among the last of their block."""
    return n // stride * last + max(0, n % stride - (stride - last))


def _columns_sum(n: int, stride: int, last: int) -> int:
    """sum of _columns(i) for i = 1 .. n."""
    part = max(0, n % stride - (stride - last))
    rest = n // stride * (last * (last - 1) // 2) + part * (part + 1) // 2
    return last * _floors(n + 1, stride) + rest
