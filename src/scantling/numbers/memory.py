"""Memory of inference: weights, cache, logits, and the score matrix that a fused kernel avoids, in bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from scantling.parts.cross import CrossAttention
from scantling.parts.heads import Head
from scantling.parts.leaf import Embedding
from scantling.parts.part import Workload
from scantling.parts.transformer import Transformer
from scantling.units import DTYPE_BYTES


@dataclass(frozen=True)
class Memory:
    """Bytes by line.

    Attributes:
        weights: every parameter in its dtype.
        kv_per_token: of one more position of one row, all layers.
        kv: keys and values of B rows of P + T positions.
        logits: (B, T, V) in float32, if all are kept; chunked cross-entropy and decoding do not.
        scores: (B, H, T, S) of one layer, the largest, if a kernel stores them; a fused kernel does not.
    """

    weights: int
    kv_per_token: int
    kv: int
    logits: int
    scores: int

    @property
    def total(self) -> int:
        """Weights, cache and logits; activations are not included."""
        return self.weights + self.kv + self.logits


def memory(model: Transformer, w: Workload, dtype: str, cache_dtype: str) -> Memory:
    """Bytes for `w` with weights in `dtype` and the cache in `cache_dtype`."""
    reference = [*model.steps(replace(w, kernel="reference"))]
    scores = max((s.numel for s in reference if s.path.endswith(":scores")), default=0)
    logits = max((step.numel for step in model.steps(w) if step.path.startswith("head")), default=0)
    stored = model.params + sum(math.prod(shape) for shape in model.named_buffers.values())
    # What an encoder-decoder keeps of its source does not grow with the target.
    one, two = (_state(model, Workload(tokens=tokens, source=1)) for tokens in (1, 2))
    return Memory(
        weights=stored * DTYPE_BYTES[dtype],
        kv_per_token=(two - one) * DTYPE_BYTES[cache_dtype],
        kv=_state(model, w) * DTYPE_BYTES[cache_dtype],
        logits=logits * DTYPE_BYTES["float32"],
        scores=scores * DTYPE_BYTES[dtype],
    )


def read_per_token(model: Transformer, past: int, dtype: str, source: int | None = None) -> int:
    """Bytes that one decode step must read: the active weights that enter a product or a norm, and the cache.

    A table that is only looked up counts one row.
    """
    looked_up = [part for _, part, _ in model.walk() if isinstance(part, Embedding)]
    read = model.active_params + sum(part.d_model for part in looked_up)
    tied = isinstance(model.head, Head) and model.head.tied
    read -= sum(part.params for part in looked_up if not (part is model.table and tied))
    if model.two_stacks and model.encoder is not None:
        # The source was read before: its stack, and the keys and values made of it.
        inner = (part for _, part, _ in model.encoder.walk() if isinstance(part, Embedding))
        read -= model.encoder.params - sum(part.params - part.d_model for part in inner)
        read -= sum(
            child.params
            for _, part, _ in model.walk()
            if isinstance(part, CrossAttention)
            for name, child in part.parts()
            if name in ("k", "v")
        )
    return (read + _state(model, Workload(past=past, source=source))) * DTYPE_BYTES[dtype]


def _state(model: Transformer, w: Workload) -> int:
    return sum(math.prod(shape) for shape in model.named_state(w).values())
