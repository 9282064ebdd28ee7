"""RMSNorm in the order of the Llama code: the vector is rounded before the gain multiplies it."""

from __future__ import annotations

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
