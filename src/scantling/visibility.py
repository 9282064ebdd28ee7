"""Which key positions a query position may read: one value that gives both the predicate and its exact count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Visibility:
    """The reach of an attention layer.

    Attributes:
        causal: a query reads no position after its own.
        window: a query reads only positions closer than this many steps, its own included
            (Mistral 7B, arXiv:2310.06825, section 2: position i reads i - W < j <= i). None: no limit.
    """

    causal: bool = True
    window: int | None = None

    def sees(self, query: Any, key: Any) -> Any:
        """Whether `query` may read `key`: a bool for integers, a bool tensor of the broadcast shape for tensors."""
        seen = key <= query if self.causal else (key == key) & (query == query)
        if self.window is not None:
            seen = seen & (query - key < self.window) & (key - query < self.window)
        return seen

    def span(self, first: int, last: int, n_keys: int) -> tuple[int, int]:
        """The keys [start, end) that the queries first .. last can see at all, of `n_keys`."""
        start = 0 if self.window is None else max(0, first - self.window + 1)
        end = last + 1 if self.causal else n_keys if self.window is None else min(n_keys, last + self.window)
        return start, end

    def narrows(self, n_keys: int) -> bool:
        """Whether the window hides anything among `n_keys` consecutive keys."""
        return self.window is not None and self.window < n_keys

    def pairs(self, tokens: int, past: int = 0) -> int:
        """Exact number of (query, key) pairs seen by `tokens` queries that follow `past` cached positions."""
        keys = past + tokens
        backward = _capped_sum(past + 1, keys, self.window)
        if self.causal:
            return backward
        forward = _capped_sum(1, tokens, self.window) - tokens
        return backward + forward


def _capped_sum(first: int, last: int, cap: int | None) -> int:
    """sum of min(n, cap) for n = first .. last."""
    if cap is None or last <= cap:
        return (first + last) * (last - first + 1) // 2
    if first > cap:
        return cap * (last - first + 1)
    return (first + cap) * (cap - first + 1) // 2 + cap * (last - cap)
