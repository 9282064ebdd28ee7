"""What a measurement will need, predicted before anything is built."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from scantling.errors import ScantlingInputError
from scantling.measure.asked import KERNELS, Asked
from scantling.numbers.memory import held
from scantling.numbers.training import Recipe, training_memory
from scantling.numbers.workspace import working_space
from scantling.parts.heads import Head
from scantling.parts.part import Workload
from scantling.parts.transformer import Transformer
from scantling.units import DTYPE_BYTES, bytes_text


def bytes_needed(model: Transformer, asked: Asked, dtype: str, figures: Iterable[str]) -> int:
    """Bytes of the most demanding of these figures, weights included."""
    weights = held(model) * DTYPE_BYTES[dtype]
    longest, one = (
        Workload(asked.batch, tokens, source=tokens if model.two_stacks else None, dtype=dtype)
        for tokens in (max(asked.lengths), asked.length)
    )
    work = {
        "time": working_space(model, longest, dtype),
        "memory": max(working_space(model, replace(longest, kernel=name, last_only=True), dtype) for name in KERNELS),
        "gradients": _training(model, replace(one, training=True)),
        "shape": weights + working_space(model, one, dtype),
        "entropy": working_space(model, replace(one, kernel="reference"), dtype),
    }
    usual = working_space(model, one, dtype)
    return max((weights + work.get(name, usual) for name in figures), default=0)


def _training(model: Transformer, w: Workload) -> int:
    """Beside the weights: the copy that is updated, its gradients, Adam's two moments, what the backward keeps."""
    if not isinstance(model.head, Head):
        return 0
    precision = "fp32" if w.dtype == "float32" else "bf16"
    found = training_memory(model, w, Recipe(precision, "adamw"))
    return found.weights + sum(found.gradients.values()) + sum(found.optimizer.values()) + found.activations


def check(name: str, needed: int, free: int | None) -> None:
    """Refuse before anything is allocated.

    Raises:
        ScantlingInputError: it does not fit.
    """
    if free is not None and needed > free:
        raise ScantlingInputError(
            f"measuring {name} needs about {needed:,} bytes ({bytes_text(needed)}) and {free:,} ({bytes_text(free)}) "
            "are free: --only checklist,parameters needs none; shorter rows or a smaller card need less"
        )
