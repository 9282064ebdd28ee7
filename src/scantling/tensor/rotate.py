"""What positions turn into: the rotation of RoPE, the waves of the 2017 paper, the buckets of T5."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def angles(positions: Tensor, frequencies: Sequence[float]) -> Tensor:
    """positions (1 or B, T) times frequencies (F) in float32: (1 or B, T, F)."""
    inverse = torch.tensor(frequencies, dtype=torch.float32, device=positions.device)
    return positions[..., None].float() * inverse


def turns(
    positions: Tensor, frequencies: Sequence[float], interleaved: bool, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Cosines and sines times `factor`, laid out for `rotate`, each (1 or B, 1, T, 2F) in float32.

    The first channel of a pair has its sine negated.
    """
    half = angles(positions, frequencies)
    if interleaved:
        full, back = half.repeat_interleave(2, -1), torch.stack((-half, half), -1).flatten(-2)
    else:
        full, back = torch.cat((half, half), -1), torch.cat((-half, half), -1)
    cos, sin = full.cos()[:, None], back.sin()[:, None]
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Turn the first channels of every head; the rest passes through.

    Args:
        x: (B, H, T, D).
        cos, sin: (1 or B, 1, T, D_rotary), D_rotary <= D, of `turns`.
    """
    width = cos.shape[-1]
    head, rest = (x, None) if width == x.shape[-1] else (x[..., :width], x[..., width:])
    other = torch.stack((head[..., 1::2], head[..., ::2]), -1).flatten(-2) if interleaved else head.roll(width // 2, -1)
    out = (head * cos).add_(other.mul_(sin))
    return out if rest is None else torch.cat((out, rest), -1)


def waves(positions: Tensor, frequencies: Sequence[float], width: int, halves: bool = False) -> Tensor:
    """Sinusoidal vectors (1 or B, T, width): sines in even channels, cosines in odd ones, the last dropped if odd.

    `halves`: all sines come first, then all cosines.
    """
    half = angles(positions, frequencies)
    if halves:
        return torch.cat((half.sin(), half.cos()), -1)[..., :width]
    return torch.stack((half.sin(), half.cos()), -1).flatten(-2)[..., :width]


def buckets(distances: Tensor, n: int, max_distance: int, both_ways: bool) -> Tensor:
    """The bucket of each distance key - query, of `n` (Raffel et al., arXiv:1910.10683, section 2.1).

    Where a layer reads both ways, the upper half of the buckets is for keys after the query; else those share the
    first. Half of the buckets of a side hold one distance each, the others grow with the logarithm of the distance.
    """
    start: Tensor | int = 0
    if both_ways:
        n //= 2
        start = (distances > 0).long() * n
        far = distances.abs()
    else:
        far = (-distances).clamp(min=0)
    single = n // 2
    # In float32: the published models were trained with the edges that it gives.
    growth = (far.clamp(min=1).float() / single).log() / math.log(max_distance / single) * (n - single)
    shared = (single + growth.long()).clamp(max=n - 1)
    return start + torch.where(far < single, far, shared)
