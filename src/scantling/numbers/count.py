"""Exact parameters, and the shortcut beside them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from scantling.parts.heads import Head
from scantling.parts.part import Part, cycles
from scantling.parts.transformer import Transformer


@dataclass(frozen=True)
class Run:
    """Equal blocks that follow each other, or that come back at every `period`-th layer.

    Attributes:
        stack: encoder or decoder.
        first: number of the first such layer, from 0.
        period: from one to the next.
        times: how many there are.
        by_part: the parameters of one, by heading.
    """

    stack: str
    first: int
    period: int
    times: int
    by_part: dict[str, int]


@dataclass(frozen=True)
class Count:
    """The parameters of a model.

    Attributes:
        total: every parameter once, tied matrices once.
        active: those that one token uses; fewer than the total only with experts.
        buffers: numbers stored with the weights that no gradient trains; not in the total.
        embedding: of the token table, which does no arithmetic.
        by_part: by heading: embedding, types, position, attention, cross_attention, mlp, experts, router, norm, head.
        per_layer: the runs of repeating blocks of every stack.
        shortcut: 12 L d^2 + V d, the second term once more for each further table.
        reasons: terms that the shortcut leaves out or gets wrong, with their size; they add up to total - shortcut.
    """

    total: int
    active: int
    buffers: int
    embedding: int
    by_part: dict[str, int]
    per_layer: tuple[Run, ...]
    shortcut: int
    reasons: dict[str, int]


def count(model: Transformer) -> Count:
    """Count a model's parameters."""
    by_part = _by_role(model)
    runs = []
    for name, stack in model.stacks.items():
        for start, period, times in cycles(stack.blocks):
            for i in range(start, start + period):
                runs.append(Run(name, i, period, times, _by_role(stack.blocks[i])))
    shortcut, reasons = _shortcut(model, by_part)
    buffers = sum(math.prod(shape) for shape in model.named_buffers.values())
    embedding = by_part.get("embedding", 0)
    return Count(model.params, model.active_params, buffers, embedding, by_part, tuple(runs), shortcut, reasons)


def _by_role(part: Part) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for _, piece, role in part.walk():
        sums[role] += sum(math.prod(shape) for shape in piece.weights().values())
    return {role: n for role, n in sums.items() if n}


def _shortcut(model: Transformer, by_part: dict[str, int]) -> tuple[int, dict[str, int]]:
    d, layers, head = model.d_model, _layers(model), model.head
    vocab = head.vocab_size if isinstance(head, Head) else model.embed.rows
    tables = 1 + (model.target_embed is not None) + (isinstance(head, Head) and not head.tied)
    reasons = {
        "attention is not 4 d^2 (grouped KV heads, head width, biases)": by_part.get("attention", 0)
        - 4 * layers * d * d,
        "cross-attention": by_part.get("cross_attention", 0),
        "MLP is not 8 d^2 (d_ff, biases, experts)": sum(by_part.get(r, 0) for r in ("mlp", "experts", "router"))
        - 8 * layers * d * d,
        "norms": by_part.get("norm", 0),
        "positions": by_part.get("position", 0),
        "kinds of tokens": by_part.get("types", 0),
        "token table and head are not V d each (padding, bias, width, transform)": by_part.get("embedding", 0)
        + by_part.get("head", 0)
        - tables * vocab * d,
    }
    return 12 * layers * d * d + tables * vocab * d, {why: n for why, n in reasons.items() if n}


def _layers(model: Transformer) -> int:
    return sum(len(stack.blocks) for stack in model.stacks.values())


def ratios(model: Transformer, counted: Count) -> dict[str, float]:
    """What practitioners check: d/L, and the MLP's share of the blocks and the final norm."""
    d, layers = model.d_model, _layers(model)
    outside = ("embedding", "position", "types", "head")
    stack = sum(n for role, n in counted.by_part.items() if role not in outside)
    mlp = sum(counted.by_part.get(role, 0) for role in ("mlp", "experts", "router"))
    found = {"d_model / n_layers": d / layers} if layers else {}
    if stack:
        found["MLP share of the blocks"] = mlp / stack
    return found
