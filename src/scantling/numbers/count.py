"""Exact parameters, and the shortcut beside them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from scantling.parts.part import Part, cycles
from scantling.parts.transformer import Transformer


@dataclass(frozen=True)
class Count:
    """The parameters of a model.

    Attributes:
        total: every parameter once, tied matrices once.
        active: those that one token uses; fewer than the total only with experts.
        embedding: of the token table, which does no arithmetic.
        by_part: by heading: embedding, position, attention, mlp, experts, router, norm, head.
        per_layer: (first layer, period, times, parameters by heading) of each run of repeating blocks.
        shortcut: 12 L d^2 + V d, the second term twice where the head is not tied.
        reasons: terms that the shortcut leaves out or gets wrong, with their size; they add up to total - shortcut.
    """

    total: int
    active: int
    embedding: int
    by_part: dict[str, int]
    per_layer: tuple[tuple[int, int, int, dict[str, int]], ...]
    shortcut: int
    reasons: dict[str, int]


def count(model: Transformer) -> Count:
    """Count a model's parameters."""
    by_part = _by_role(model)
    blocks = model.decoder.blocks
    runs = []
    for start, period, times in cycles(blocks):
        for i in range(start, start + period):
            runs.append((i, period, times, _by_role(blocks[i])))
    shortcut, reasons = _shortcut(model, by_part)
    return Count(
        model.params, model.active_params, by_part.get("embedding", 0), by_part, tuple(runs), shortcut, reasons
    )


def _by_role(part: Part) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for _, piece, role in part.walk():
        sums[role] += sum(math.prod(shape) for shape in piece.weights().values())
    return {role: n for role, n in sums.items() if n}


def _shortcut(model: Transformer, by_part: dict[str, int]) -> tuple[int, dict[str, int]]:
    d, layers, vocab = model.d_model, len(model.decoder.blocks), model.head.vocab_size
    tables = 1 if model.head.tied else 2
    reasons = {
        "attention is not 4 d^2 (grouped KV heads, head width, biases)": by_part.get("attention", 0)
        - 4 * layers * d * d,
        "MLP is not 8 d^2 (d_ff, biases, experts)": sum(by_part.get(r, 0) for r in ("mlp", "experts", "router"))
        - 8 * layers * d * d,
        "norms": by_part.get("norm", 0),
        "learned positions": by_part.get("position", 0),
        "token table and head are not V d each (padding, bias, width)": by_part.get("embedding", 0)
        + by_part.get("head", 0)
        - tables * vocab * d,
    }
    return 12 * layers * d * d + tables * vocab * d, {why: n for why, n in reasons.items() if n}


def ratios(model: Transformer, counted: Count) -> dict[str, float]:
    """What practitioners check: d/L, and the MLP's share of the blocks and the final norm."""
    d, layers = model.d_model, len(model.decoder.blocks)
    stack = sum(n for role, n in counted.by_part.items() if role not in ("embedding", "position", "head"))
    mlp = sum(counted.by_part.get(role, 0) for role in ("mlp", "experts", "router"))
    found = {"d_model / n_layers": d / layers} if layers else {}
    if stack:
        found["MLP share of the blocks"] = mlp / stack
    return found
