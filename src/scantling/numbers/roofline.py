"""The roofline: no pass is faster than its FLOPs at the dense peak, nor than its bytes at the memory's bandwidth.

Williams, Waterman, Patterson: Roofline (CACM 52/4, 2009). Activations and launches are not counted: these are bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scantling.errors import ScantlingInputError
from scantling.numbers.flops import flops
from scantling.numbers.hardware import Device, arithmetic
from scantling.numbers.memory import cache_bytes, memory, read_per_token, weight_bytes
from scantling.parts.moe import MoE
from scantling.parts.part import Workload
from scantling.parts.transformer import Transformer
from scantling.units import DTYPE_BYTES


@dataclass(frozen=True)
class Bound:
    """One pass: a decode step of every row, or a prefill.

    Attributes:
        tokens: that the pass produces (decode) or reads (prefill), all rows.
        flops: attention over the pairs that are seen.
        weight_bytes: read once per pass.
        cache_bytes: read by a decode step, written by a prefill.
        compute_seconds, memory_seconds: at the dense peak, at the bandwidth.
    """

    tokens: int
    flops: int
    weight_bytes: int
    cache_bytes: int
    compute_seconds: float
    memory_seconds: float

    @property
    def bytes(self) -> int:
        """All bytes that must move."""
        return self.weight_bytes + self.cache_bytes

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes

    @property
    def seconds(self) -> float:
        """No pass takes less."""
        return max(self.compute_seconds, self.memory_seconds)

    @property
    def tokens_per_second(self) -> float:
        """No machine makes more."""
        return self.tokens / self.seconds

    @property
    def binds(self) -> str:
        """The resource that sets the bound: compute or memory."""
        return "compute" if self.compute_seconds > self.memory_seconds else "memory"


@dataclass(frozen=True)
class Roofline:
    """Both passes of generation on one device.

    Attributes:
        ridge: FLOPs per byte from which arithmetic binds.
        decode: a step of every row at the full context.
        prefill: the context of every row, logits of the last position only.
        resident_bytes: weights and cache.
        fits: whether the device's memory holds them; None where its size is not known.
    """

    ridge: float
    decode: Bound
    prefill: Bound
    resident_bytes: int
    fits: bool | None


def roofline(model: Transformer, device: Device, batch: int, context: int, dtype: str, cache_dtype: str) -> Roofline:
    """Bounds of `batch` rows of `context` positions with weights in `dtype`, computed in the same arithmetic.

    Raises:
        ScantlingInputError: not a decoder, or a device without that peak or without a bandwidth.
    """
    generating(model)
    peak, bandwidth = device.peak(arithmetic(dtype)), device.bandwidth
    step = Workload(batch, 1, context - 1)
    whole = Workload(batch, context, 0, last_only=True)
    held = memory(model, whole, dtype, cache_dtype)

    def bound(w: Workload, tokens: int, weights: int) -> Bound:
        work = flops(model, w).forward_visible
        moved = weights + held.kv
        return Bound(tokens, work, weights, held.kv, work / peak, moved / bandwidth)

    return Roofline(
        ridge=peak / bandwidth,
        decode=bound(step, batch, weights_read(model, dtype, batch)),
        prefill=bound(whole, batch * context, weights_read(model, dtype, batch * context)),
        resident_bytes=held.weights + held.kv,
        fits=None if device.memory_bytes is None else held.weights + held.kv <= device.memory_bytes,
    )


def generating(model: Transformer) -> Transformer:
    """The model itself, if it is a decoder alone.

    Raises:
        ScantlingInputError: it has an encoder.
    """
    if model.decoder is None or model.two_stacks:
        raise ScantlingInputError("the roofline is that of a decoder's generation; this model has an encoder")
    return model


def step_bytes(model: Transformer, batch: int, context: int, dtype: str, cache_dtype: str) -> int:
    """What a decode step of every row reads at the full context: weights once, and the cache."""
    held = memory(model, Workload(batch, context), dtype, cache_dtype)
    return weights_read(model, dtype, batch) + held.kv


def weights_read(model: Transformer, dtype: str, tokens: int, source: int | None = None) -> int:
    """Bytes of the weights that `tokens` at once enter; of a mixture the mean over tokens that choose at random.

    Args:
        source: of an encoder-decoder's step, the tokens that were read before; None counts the encoder too.
    """
    if model.two_stacks and source is None:
        return weight_bytes(model, dtype)
    alone = read_per_token(model, 0, dtype, source) - cache_bytes(model, Workload(source=source), dtype)
    more = sum(_further_experts(part, tokens) for _, part, _ in model.walk() if isinstance(part, MoE))
    return alone + round(more * DTYPE_BYTES[dtype])


def _further_experts(part: MoE, tokens: int) -> float:
    """Parameters of the experts beyond the first token's: each of E stays idle with (1 - k/E)^tokens."""
    total, chosen = part.router.n_experts, part.router.top_k
    distinct = total * -math.expm1(tokens * math.log1p(-chosen / total)) if chosen < total else total
    return part.experts.params / total * max(0.0, distinct - chosen)
