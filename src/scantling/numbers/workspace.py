"""What a pass of inference holds for itself: activations that are gone when it ends. A model of it, not a count."""

from __future__ import annotations

from dataclasses import replace

from scantling.parts.part import Workload
from scantling.parts.saved import Value
from scantling.parts.transformer import Transformer
from scantling.units import DTYPE_BYTES


def working_space(model: Transformer, w: Workload, dtype: str) -> int:
    """Bytes of activations that a pass of inference holds at its highest, cache and weights not among them.

    A part's outputs live until it returns; what autograd would keep inside a row is held while the row runs.
    """
    w = replace(w, dtype=dtype, unrolled=False)
    moments = _moments(model, w) if w.past == 0 else {}
    cached, seen, highest, last = model.named_state(w), set[Value](), 0, 0
    scopes: list[tuple[str, int]] = [("", 0)]
    for step in model.steps(w):
        container = step.path.partition(":")[0] if ":" in step.path else step.path.rpartition(".")[0]
        result = 0
        while not _inside(container, scopes[-1][0]):
            scopes.pop()
            result = last
        # What a part returned before is replaced by what the next returns.
        scopes[-1] = (scopes[-1][0], max(scopes[-1][1], result))
        if scopes[-1][0] != container:
            scopes.append((container, 0))
        fresh = step.stored and step.out not in seen and step.path not in cached
        seen.add(step.out)
        last = step.numel * DTYPE_BYTES[step.dtype or dtype] if fresh else 0
        scopes[-1] = (container, scopes[-1][1] + last)
        highest = max(highest, sum(size for _, size in scopes) + moments.get(step.path, 0))
    return highest


def _inside(container: str, scope: str) -> bool:
    return not scope or container == scope or container.startswith(f"{scope}.")


def _moments(model: Transformer, w: Workload) -> dict[str, int]:
    rows = [*model.steps(replace(w, training=True, last_only=False))]
    outputs = {step.out for step in rows}
    return {
        step.path: sum(v.nbytes(w.dtype) for v in step.saved if v not in outputs and v.key is None) for step in rows
    }
