"""Shards: which dimension of each weight is divided among tensor and expert ranks, and what a rank holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from scantling.parts.attention import Attention
from scantling.parts.cross import CrossAttention
from scantling.parts.heads import Head
from scantling.parts.latent import LatentAttention
from scantling.parts.leaf import Embedding, GroupedLinear, HeadNorm, LayerNorm, Linear, RMSNorm
from scantling.parts.mlp import MLP, GatedMLP
from scantling.parts.part import Part, Shape, join
from scantling.parts.relative import RelativeBias
from scantling.parts.transformer import Transformer

COLUMN, ROW, COPIED = "column", "row", "copied"
"""How a child is divided among tensor ranks: by its outputs, by its inputs, not at all."""


@dataclass(frozen=True)
class Cut:
    """One weight and how it is divided.

    Attributes:
        name: in the state dict.
        shape: of the whole.
        dim: divided among tensor ranks; None where each has all of it.
        units: equal pieces of that dimension that stay whole (heads, channels, rows of a table).
        experts: whether the first dimension is divided among expert ranks.
    """

    name: str
    shape: Shape
    dim: int | None = None
    units: int = 1
    experts: bool = False

    @property
    def numel(self) -> int:
        """Elements of the whole."""
        return math.prod(self.shape)

    def owned(self, tensor: int, expert: int, rank: int, expert_rank: int = 0) -> int:
        """Elements on a rank; the ranks of a group with fewer units than ranks hold equal copies."""
        n = self.numel
        if self.dim is not None:
            n = n // self.units * share(self.units, tensor, rank)
        return n // self.shape[0] * share(self.shape[0], expert, expert_rank) if self.experts else n

    def copies(self, tensor: int) -> int:
        """How many tensor ranks hold the same piece."""
        return tensor if self.dim is None else max(1, tensor // self.units)


def share(units: int, ranks: int, rank: int) -> int:
    """Units of a rank: equal ones rounded up, the last ranks fewer or none; one each where there are more ranks."""
    if units < ranks and ranks % units == 0:
        return 1
    each = -(-units // ranks)
    return max(0, min(each, units - rank * each))


def divided(part: Part) -> Mapping[str, tuple[str, int]]:
    """Of a part's children those that tensor ranks divide: how, and in how many units (Megatron, arXiv:1909.08053)."""
    if isinstance(part, Attention | CrossAttention):
        h, kv = part.n_heads, part.n_kv_heads
        split = {"q": (COLUMN, h), "k": (COLUMN, kv), "v": (COLUMN, kv), "o": (ROW, h)}
        if isinstance(part, Attention):
            split |= {f"{n}_norm": (COLUMN, heads) for n, heads in (("q", h), ("k", kv)) if _by_head(part, n, heads)}
        return split
    if isinstance(part, LatentAttention):
        return {name: (ROW if name == "o" else COLUMN, part.n_heads) for name in ("q", "q_up", "kv_up", "o")}
    if isinstance(part, MLP | GatedMLP):
        return {name: (ROW if name == "down" else COLUMN, part.d_ff) for name in ("gate", "up", "down")}
    if isinstance(part, Head):
        return {"matrix": (COLUMN, part.rows)}
    if isinstance(part, Transformer):
        tables = {"embed": part.embed, "target_embed": part.target_embed}
        return {name: (COLUMN, table.rows) for name, table in tables.items() if table is not None}
    return {"table": (ROW, part.n_heads)} if isinstance(part, RelativeBias) else {}


def _by_head(part: Attention, name: str, heads: int) -> bool:
    """Whether a norm of queries or keys has a gain for each head."""
    norm = part.q_norm if name == "q" else part.k_norm
    if isinstance(norm, RMSNorm | LayerNorm):
        return norm.d == heads * part.d_head != part.d_head
    return norm is not None


def cuts(part: Part, path: str = "", how: str = COPIED, units: int = 1) -> Iterator[Cut]:
    """Every weight of a tree with its cut; `how` and `units` are the root's own."""
    for name, shape in part.weights().items():
        dim, own = _dim(part, name, how), units
        if dim is None and isinstance(part, Attention) and name == "sinks":
            dim, own = 0, part.n_heads
        if dim is None and isinstance(part, Head) and name == "bias":
            dim, own = 0, part.rows
        yield Cut(join(path, name), shape, dim, own, isinstance(part, GroupedLinear))
    inner = divided(part)
    for name, child in part.parts():
        yield from cuts(child, join(path, name), *inner.get(name, (COPIED, 1)))


def _dim(part: Part, name: str, how: str) -> int | None:
    if how == COPIED:
        return None
    first = 1 if isinstance(part, GroupedLinear) else 0
    if isinstance(part, Linear | GroupedLinear):
        if how == COLUMN:
            return first
        return first + 1 if name == "weight" else None
    if isinstance(part, Embedding):
        return 0 if how == COLUMN else 1
    return 0 if isinstance(part, HeadNorm | RMSNorm | LayerNorm) else None


@dataclass(frozen=True)
class Held:
    """Parameters on one rank.

    Attributes:
        dense: that every replica has.
        experts: that only the replicas of an expert rank have.
    """

    dense: int = 0
    experts: int = 0

    def __add__(self, other: Held) -> Held:
        return Held(self.dense + other.dense, self.experts + other.experts)

    @property
    def total(self) -> int:
        """Both."""
        return self.dense + self.experts


def held(pieces: list[Cut], tensor: int, expert: int, rank: int = 0) -> Held:
    """What a tensor rank holds of these weights; rank 0 holds the most."""
    dense = sum(c.owned(tensor, expert, rank) for c in pieces if not c.experts)
    return Held(dense, sum(c.owned(tensor, expert, rank) for c in pieces if c.experts))
