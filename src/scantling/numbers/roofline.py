"""The roofline: no pass is faster than its FLOPs at the dense peak, nor than its bytes at the memory's bandwidth.

Williams, Waterman, Patterson: Roofline (CACM 52/4, 2009). Activations and launches are not counted: these are bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from scantling.numbers.cache import cache_bytes, cache_read
from scantling.numbers.flops import flops
from scantling.numbers.hardware import Device, arithmetic
from scantling.numbers.memory import memory
from scantling.numbers.phases import decode_step
from scantling.numbers.reading import weights_read
from scantling.parts.part import Workload
from scantling.parts.transformer import Transformer
from scantling.units import BLOCKS


@dataclass(frozen=True)
class Bound:
    """One pass: a decode step of every row, or a prefill.

    Attributes:
        tokens: that the pass produces (decode) or reads (prefill, forward), all rows.
        flops: attention over the pairs that are seen.
        weight_bytes: read once per pass.
        cache_bytes: what a decode step sees and must read; what a prefill must write for later tokens to see.
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
    """The passes of generation on one device; an encoder has one pass, over whole texts.

    Attributes:
        ridge: FLOPs per byte from which arithmetic binds.
        passes: by name. ``decode``: a step of every row at the full context. ``prefill``: the context of every row, or
            the source of an encoder-decoder with the target's first token; logits of the last position only.
            ``forward``: an encoder's.
        resident_bytes: weights and cache.
        fits: whether the device's memory holds them; None where its size is not known.
    """

    ridge: float
    passes: Mapping[str, Bound]
    resident_bytes: int
    fits: bool | None

    @property
    def decode(self) -> Bound:
        """A decode step of every row."""
        return self.passes["decode"]

    @property
    def prefill(self) -> Bound:
        """The pass over the prompts."""
        return self.passes["prefill"]


@dataclass(frozen=True)
class Formats:
    """What is stored how.

    Attributes:
        weights: a dtype, in which products are computed too, or a format of blocks beside bfloat16.
        cache: of keys and values, a dtype or a format of blocks.
    """

    weights: str = "bfloat16"
    cache: str = "bfloat16"

    @property
    def arithmetic(self) -> str:
        """What products multiply in, by the names of data sheets."""
        return arithmetic("bfloat16" if self.weights in BLOCKS else self.weights)


def roofline(model: Transformer, device: Device, w: Workload, formats: Formats = Formats()) -> Roofline:
    """Bounds of `w.batch` rows of `w.tokens` positions, and of an encoder-decoder a source of `w.sources`.

    Raises:
        ScantlingInputError: a device without that peak or without a bandwidth.
    """
    peak, bandwidth = device.peak(formats.arithmetic), device.bandwidth
    held = memory(model, w, formats.weights, formats.cache)

    def bound(asked: Workload, tokens: int, moved: tuple[int, int]) -> Bound:
        work = flops(model, asked).forward_visible
        return Bound(tokens, work, *moved, work / peak, sum(moved) / bandwidth)

    passes = {}
    if model.decoder is not None:
        passes["decode"] = bound(decode_step(w), w.batch, step_reads(model, w, formats))
    first = replace(w, tokens=1) if model.two_stacks else w
    read = w.batch * (w.sources if model.two_stacks else w.tokens)
    once = weights_read(model, formats.weights, read), cache_bytes(model, first, formats.cache, "ring")
    name = "forward" if model.decoder is None else "prefill"
    passes[name] = bound(replace(first, last_only=model.decoder is not None), read, once)
    return Roofline(
        ridge=peak / bandwidth,
        passes=passes,
        resident_bytes=held.weights + held.kv,
        fits=None if device.memory_bytes is None else held.weights + held.kv <= device.memory_bytes,
    )


def step_reads(model: Transformer, w: Workload, formats: Formats) -> tuple[int, int]:
    """Bytes that a decode step of every row must read at the end of `w`: weights once, and what it sees of the cache.

    Of an encoder, whose texts are read in one pass, the weights.
    """
    source = w.sources if model.two_stacks else None
    return weights_read(model, formats.weights, w.batch, source), cache_read(model, decode_step(w), formats.cache)
