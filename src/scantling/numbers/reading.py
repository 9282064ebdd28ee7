"""What a pass must read: the weights that it enters, and of the cache the positions that it sees."""

from __future__ import annotations

import math
from collections.abc import Iterator

from scantling.numbers.cache import cache_read
from scantling.numbers.memory import shape_bytes, weight_bytes
from scantling.parts.cross import CrossAttention
from scantling.parts.heads import Head
from scantling.parts.leaf import Embedding
from scantling.parts.moe import MoE
from scantling.parts.part import Part, Workload, join
from scantling.parts.transformer import Transformer


def read_per_token(model: Transformer, past: int, dtype: str, source: int | None = None) -> int:
    """Bytes that one decode step must read: the weights that enter a product or a norm, and what it sees."""
    return _entered(model, dtype, 1) + cache_read(model, Workload(past=past, source=source), dtype)


def weights_read(model: Transformer, kind: str, tokens: int, source: int | None = None) -> int:
    """Bytes of the weights that `tokens` at once enter; of a mixture the mean over tokens that choose at random.

    A table that is only looked up counts one row.

    Args:
        kind: a dtype or a format of blocks.
        source: of an encoder-decoder's step, the tokens that were read before; None counts the encoder too.
    """
    if model.two_stacks and source is None:
        return weight_bytes(model, kind)
    return _entered(model, kind, tokens)


def _entered(model: Transformer, kind: str, tokens: int) -> int:
    tied, read = isinstance(model.head, Head) and model.head.tied, 0
    for _, part, role in _walk(model):
        shapes = part.weights().values()
        if isinstance(part, Embedding):
            read += shape_bytes((1, part.d_model), role, kind)
            if not (part is model.table and tied):
                continue
        read += sum(shape_bytes(shape, role, kind) for shape in shapes)
        if isinstance(part, MoE):
            read -= _idle(part, kind, tokens)
    return read


def _walk(model: Transformer) -> Iterator[tuple[str, Part, str]]:
    """All parts but those that a source has passed before: its stack, and the keys and values made of it."""
    done = ["encoder"] if model.two_stacks else []
    done += [join(path, name) for path, part, _ in model.walk() if isinstance(part, CrossAttention) for name in "kv"]
    return (found for found in model.walk() if not any(f"{found[0]}.".startswith(f"{path}.") for path in done))


def _idle(part: MoE, kind: str, tokens: int) -> int:
    """Bytes of the experts that none of so many tokens enters: each of E is passed over with (1 - k/E)^tokens."""
    total, chosen = part.router.n_experts, part.router.top_k
    share = math.exp(tokens * math.log1p(-chosen / total)) if chosen < total else 0.0
    shapes = (shape for _, inner, _ in part.experts.walk() for shape in inner.weights().values())
    return round(share * sum(shape_bytes(shape, "experts", kind) for shape in shapes))
