"""RMSNorm in the order of the Llama code, where the vector is rounded before the gain multiplies it, and in torch's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RoundedRMSNorm(nn.RMSNorm):
    """Torch's RMSNorm multiplies by the gain in float32 and rounds the product; this one rounds first.

    In float32 the two are one.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype.itemsize > 2:
            return super().forward(x)
        return F.rms_norm(x, self.normalized_shape, None, self.eps) * self.weight


class WideRMSNorm(nn.RMSNorm):
    """Torch's RMSNorm, also for vectors that are narrower than the gain, as autocast makes them: rounded at the end."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype:
            return super().forward(x)
        wide = torch.promote_types(x.dtype, self.weight.dtype)
        return F.rms_norm(x.to(wide), self.normalized_shape, self.weight.to(wide), self.eps).to(x.dtype)
