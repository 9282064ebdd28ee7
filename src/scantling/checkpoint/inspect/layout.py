"""Where the two channels of a rotated pair lie: side by side, or half a head apart.

RoPE turns both channels of a pair by one angle, so training treats them alike, and the norms of their rows in the
matrices of queries and keys go together. Rows half a head apart go together where the pairs are halves; where pairs are
neighbours they belong to far frequencies and go against each other. Without training there is no such sign, and
nothing is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from scantling.checkpoint.inspect.gather import Stored
from scantling.checkpoint.inspect.sample import values
from scantling.errors import need

CLEAR = 0.15
"""Mean correlation of the norms of rows half a head apart that speaks for halves or, below 0, for neighbours.

Of random rows it is 0 within 0.03: it is a mean over some 1,500 pairs.
"""
AGREE = 0.75
"""Share of the matrices that must show the same sign."""
_LAYERS, _HEADS, _COLUMNS = 6, 8, 512


@dataclass(frozen=True)
class Layout:
    """What the rows look like.

    Attributes:
        pairs: halves, neighbours, or unknown.
        far: mean correlation between rows half a head apart.
        near: and between neighbours.
        matrices: that were looked at.
    """

    pairs: str
    far: float
    near: float
    matrices: int


def layout_of(matrices: Sequence[tuple[Stored, int]], d_rotary: int, d_head: int) -> Layout | None:
    """The layout that the rows of queries and keys show; None where no matrix can be read.

    Args:
        matrices: matrices of shape (heads d_head, d_model) with their number of heads.
        d_rotary: channels turned, from the first of each head on.

    Raises:
        MissingExtra: numpy, or for GGUF's blocks gguf, is not installed.
    """
    found = [pair for tensor, heads in matrices if (pair := _correlations(tensor, heads, d_rotary, d_head)) is not None]
    if not found or d_rotary < 8:
        return None
    far, near = mean(a for a, _ in found), mean(b for _, b in found)
    agreeing = sum((a > 0) == (far > 0) for a, _ in found) / len(found)
    pairs = "unknown"
    if abs(far) >= CLEAR and near >= CLEAR and agreeing >= AGREE:
        pairs = "halves" if far > 0 else "neighbours"
    return Layout(pairs, far, near, len(found))


def chosen(layers: Sequence[int]) -> list[int]:
    """A few layers from the middle of a stack, where the sign is clearest."""
    inner = layers[len(layers) // 4 : len(layers) - len(layers) // 8] or layers
    step = max(1, len(inner) // _LAYERS)
    return list(inner[::step][:_LAYERS])


def _correlations(tensor: Stored, heads: int, d_rotary: int, d_head: int) -> tuple[float, float] | None:
    np = need("numpy", "look at the rows of queries and keys")
    rows = min(heads, _HEADS) * d_head
    found = values(tensor, 0, rows, _COLUMNS)
    if found is None:
        return None
    with np.errstate(all="ignore"):
        squares = (found.astype(np.float64) ** 2).sum(1)
    if not np.isfinite(squares).all() or (squares == 0).any():
        return None
    norms = np.log(squares).reshape(-1, d_head)[:, :d_rotary]
    norms = norms - norms.mean(1, keepdims=True)
    half = d_rotary // 2
    return _correlation(norms[:, :half], norms[:, half:]), _correlation(norms[:, 0::2], norms[:, 1::2])


def _correlation(one: Any, other: Any) -> float:
    scale = float((one * one).sum() * (other * other).sum()) ** 0.5
    return float((one * other).sum()) / scale if scale else 0.0
