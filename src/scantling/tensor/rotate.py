"""Angles of positions: the rotation of RoPE and the waves of the 2017 paper."""

from __future__ import annotations

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
    """Cosines and sines times `factor`, laid out for `rotate`, each (1 or B, 1, T, 2F) in float32."""
    half = angles(positions, frequencies)
    full = half.repeat_interleave(2, -1) if interleaved else torch.cat((half, half), -1)
    cos, sin = full.cos()[:, None], full.sin()[:, None]
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Turn the first channels of every head; the rest passes through.

    Args:
        x: (B, H, T, D).
        cos, sin: (1 or B, 1, T, D_rotary), D_rotary <= D.
    """
    width = cos.shape[-1]
    head, rest = (x, None) if width == x.shape[-1] else (x[..., :width], x[..., width:])
    if interleaved:
        even, odd = head[..., ::2], head[..., 1::2]
        turned = torch.stack((-odd, even), -1).flatten(-2)
    else:
        first, second = head.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    out = head * cos + turned * sin
    return out if rest is None else torch.cat((out, rest), -1)


def waves(positions: Tensor, frequencies: Sequence[float], width: int) -> Tensor:
    """Sinusoidal vectors (1 or B, T, width): sines in even channels, cosines in odd ones, the last dropped if odd."""
    half = angles(positions, frequencies)
    return torch.stack((half.sin(), half.cos()), -1).flatten(-2)[..., :width]
