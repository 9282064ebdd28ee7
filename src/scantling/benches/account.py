"""What a load must move and compute by the part tree, and how long the machine needs for that at least."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from scantling.benches.plan import Contender, Load
from scantling.numbers.cache import blocks_needed, cache_bytes, paged_bytes
from scantling.numbers.flops import flops
from scantling.numbers.reading import weights_read
from scantling.parts.attention import Attention
from scantling.parts.part import Workload
from scantling.parts.transformer import Transformer

if TYPE_CHECKING:
    from scantling.study.calibrate import Calibration

BLOCK = 16
"""Positions of a block of a paged cache, as the batching engine takes them where nobody says otherwise."""
LIKE_LLAMA_CPP = ("llama.cpp", "llama-server", "openvino")
"""Peers that choose their arithmetic by the weights, and keep float16 in the cache."""


@dataclass(frozen=True)
class Account:
    """One phase of one load: a step of all rows, or the pass over their prompts.

    Attributes:
        nbytes: weights once, and the keys and values that are read or written.
        flops: matrix products, attention over the pairs that are seen.
    """

    nbytes: int
    flops: int

    def seconds(self, machine: Calibration, arithmetic: str) -> float | None:
        """No pass takes less, at the rates that the machine reached; None where that arithmetic was not measured."""
        rate = machine.products.get(arithmetic)
        return None if rate is None else max(self.nbytes / machine.read.best, self.flops / rate.best)


def arithmetic_of(contender: Contender) -> str:
    """What its matrix products multiply in, of `numbers.hardware.ARITHMETIC`.

    llama.cpp rounds activations to 8 bits beside blocks, openvino where that is faster; beside other weights both
    multiply as the weights are.
    """
    plain = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(contender.dtype)
    if contender.engine == "packed-int8" or (contender.engine in LIKE_LLAMA_CPP and plain is None):
        return "int8"
    return plain if plain and contender.engine != "packed" else "fp32"


def step(model: Transformer, who: Contender, load: Load, read_bytes: int | None) -> Account | None:
    """A step in the middle of the text; None of an encoder, which takes none.

    Args:
        read_bytes: of weights, where they are not in one dtype.
    """
    if model.decoder is None:
        return None
    source, past = (load.prompt, 1) if model.two_stacks else (None, load.prompt)
    w = Workload(load.batch, 1, past + load.tokens // 2, source)
    weights = weights_read(model, who.dtype, load.batch, load.prompt) if read_bytes is None else read_bytes
    return Account(weights + _kept(model, who, load, w), flops(model, w).forward_visible)


def prefill(model: Transformer, who: Contender, load: Load, read_bytes: int | None) -> Account:
    """The pass over the prompts; of an encoder-decoder over the sources, with the target's first token."""
    if model.two_stacks:
        w = Workload(load.batch, 1, 0, load.prompt, last_only=True)
    else:
        w = Workload(load.batch, load.prompt, 0, last_only=model.decoder is not None)
    weights = read_bytes
    if weights is None:
        weights = weights_read(model, who.dtype, load.batch * load.prompt)
    return Account(weights + _kept(model, who, load, w), flops(model, w).forward_visible)


def allocated(model: Transformer, who: Contender, load: Load) -> int | None:
    """Bytes of the cache for the whole load; None where it is not ours, or there is none."""
    if who.is_peer or model.decoder is None:
        return None
    positions = load.prompt + load.tokens + 1
    if who.engine.startswith("packed"):
        from scantling.native.tiles import ROWS, padded

        d_head = next(part.d_head for _, part, _ in model.walk() if isinstance(part, Attention))
        kept = cache_bytes(model, Workload(load.batch, padded(positions, ROWS)), "float32")
        return kept // d_head * padded(d_head, ROWS)
    if load.kind == "paged":
        # A target begins with one token that is not of the prompt.
        texts, source = (load.tokens + 2, load.prompt) if model.two_stacks else (positions, 0)
        blocks, of_sources = (blocks_needed([length] * load.batch, BLOCK) for length in (texts, source))
        return paged_bytes(model, blocks, BLOCK, who.dtype, load.numbers, of_sources)
    w = Workload(load.batch, load.tokens + 1, 0, load.prompt) if model.two_stacks else Workload(load.batch, positions)
    return cache_bytes(model, w, who.dtype, load.kind, load.numbers)


def _kept(model: Transformer, who: Contender, load: Load, w: Workload) -> int:
    """Keys and values up to the end of `w`."""
    if model.decoder is None:
        return 0
    kind = "ring" if load.kind == "ring" else "full"
    return cache_bytes(model, w, _width(who), kind, load.numbers)


def _width(who: Contender) -> str:
    """Of keys and values: float16 in llama.cpp, and taken for that in openvino; float32 in the compiled pass."""
    if who.engine in LIKE_LLAMA_CPP:
        return "float16"
    return who.dtype if who.engine in ("torch", "compile", "transformers") else "float32"
