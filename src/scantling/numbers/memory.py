"""Memory of inference in bytes: weights, cache, logits, working space, and the scores that a fused kernel avoids."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from scantling.errors import ScantlingInputError
from scantling.numbers.cache import cache_bytes
from scantling.numbers.workspace import working_space
from scantling.parts.dims import Shape
from scantling.parts.part import Workload
from scantling.parts.transformer import Transformer
from scantling.units import BLOCKS, DTYPE_BYTES, stored_bytes


@dataclass(frozen=True)
class Memory:
    """Bytes by line.

    Attributes:
        weights: every parameter in its dtype.
        kv_per_token: of one more position of one row, all layers.
        kv: keys and values of B rows of P + T positions.
        logits: (B, T, V) in float32, if all are kept; chunked cross-entropy and decoding do not.
        scores: (B, H, T, S) of one layer, the largest, if a kernel stores them; a fused kernel does not.
        working: activations of this pass at their highest; where there is a cache, the head reads the last position.
    """

    weights: int
    kv_per_token: int
    kv: int
    logits: int
    scores: int
    working: int

    @property
    def total(self) -> int:
        """Weights, cache and logits; activations are not included."""
        return self.weights + self.kv + self.logits

    @property
    def peak(self) -> int:
        """Weights, cache and working space: what is held at once while a prompt is read, or a text."""
        return self.weights + self.kv + self.working


def memory(
    model: Transformer,
    w: Workload,
    dtype: str,
    cache_dtype: str,
    page: int = 1,
    kind: str = "full",
    numbers: str = "plain",
) -> Memory:
    """Bytes for `w` with weights in `dtype` and the cache in `cache_dtype`, each a dtype or a format of blocks.

    Args:
        page: positions of a row are allotted in pages of so many (Kwon et al., arXiv:2309.06180, section 4.1).
        kind: of the cache, one of `cache.KINDS`.
        numbers: in the cache, one of `cache.NUMBERS`.

    Raises:
        ScantlingInputError: a vector of the cache is no whole number of blocks, or rings in pages.
    """
    if kind == "ring" and page > 1:
        raise ScantlingInputError(f"pages of {page} positions are of a full cache: a ring is allotted whole")
    runs_in = computing(dtype)
    # What an encoder-decoder keeps of its source does not grow with the target.
    longer = (Workload(tokens=w.keys + more, source=1) for more in (0, 1))
    before, after = (cache_bytes(model, asked, cache_dtype, kind, numbers) for asked in longer)
    return Memory(
        weights=weight_bytes(model, dtype),
        kv_per_token=after - before,
        kv=cache_bytes(model, _paged(w, page), cache_dtype, kind, numbers),
        logits=logits_of(model, w) * DTYPE_BYTES["float32"],
        scores=largest_scores(model, w) * DTYPE_BYTES[runs_in],
        working=working_space(model, replace(w, last_only=model.decoder is not None), runs_in),
    )


def computing(kind: str) -> str:
    """The dtype of activations beside weights of that kind: bfloat16 where the weights' own computes nothing."""
    return kind if kind in ("float64", "float32", "float16", "bfloat16") else "bfloat16"


_WIDE_ROLES = ("norm", "router", "position", "types")
"""What stays float32 beside quantised matrices, as llama.cpp keeps it."""


def weight_bytes(model: Transformer, kind: str) -> int:
    """Bytes of all weights and buffers in a dtype or a format of blocks.

    Beside blocks, vectors, routers, learned positions and types stay float32, and a matrix whose rows are no whole
    number of blocks float16, as `scantling convert --to gguf` writes them.
    """
    beside = DTYPE_BYTES[kind if kind in DTYPE_BYTES else "float32"]
    buffers = beside * sum(math.prod(shape) for shape in model.named_buffers.values())
    return buffers + sum(
        shape_bytes(shape, role, kind) for _, part, role in model.walk() for shape in part.weights().values()
    )


def shape_bytes(shape: Shape, role: str, kind: str) -> int:
    """Bytes of one weight of a part of that role, by the rules of `weight_bytes`."""
    if kind in DTYPE_BYTES:
        return math.prod(shape) * DTYPE_BYTES[kind]
    if len(shape) < 2 or role in _WIDE_ROLES:
        return math.prod(shape) * DTYPE_BYTES["float32"]
    fits = shape[-1] % BLOCKS[kind][0] == 0
    return stored_bytes(math.prod(shape[:-1]), shape[-1], kind if fits else "float16")


def _paged(w: Workload, page: int) -> Workload:
    """The same with every row's positions rounded up to whole pages."""
    if page < 1:
        raise ScantlingInputError(f"a page of {page} positions; at least 1 is needed")
    keys, source = (-(-n // page) * page for n in (w.keys, w.sources))
    return replace(w, tokens=keys - w.past, source=source)


def held(model: Transformer) -> int:
    """Numbers that a model holds: its parameters and its buffers."""
    return model.params + sum(math.prod(shape) for shape in model.named_buffers.values())


def largest_scores(model: Transformer, w: Workload) -> int:
    """Elements of the scores of the layer that has the most, (B, H, T, S)."""
    reference = model.steps(replace(w, kernel="reference"))
    return max((step.numel for step in reference if step.path.endswith(":scores")), default=0)


def logits_of(model: Transformer, w: Workload) -> int:
    """Elements of what the head gives, of the widest of its rows."""
    return max((step.numel for step in model.steps(w) if step.path.startswith("head")), default=0)
