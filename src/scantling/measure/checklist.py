"""The reader's checklist: what a model is, as one short pass through its modules shows it, beside its card."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from scantling.cards.schema import MultiHead
from scantling.measure.asked import Asked, run
from scantling.measure.figure import Cell, Figure
from scantling.measure.parameters import by_module
from scantling.model import Model
from scantling.numbers.count import count
from scantling.parts.part import Workload

TOKENS = 5
"""Of the pass: no usual width."""
POSITIONS = {"rope": "turned", "learned": "a table of positions", "relative": "a table of distances"}


@dataclass
class Seen:
    """What a pass showed.

    Attributes:
        shapes: of capture points by their name, the first time each came.
        inputs: shapes of what leaves read, by the last two names of their path, the first time each came.
        order: what ran in the first block of the last stack.
        blocks: that ran, by stack.
    """

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    inputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    blocks: dict[str, int] = field(default_factory=dict)
    stream: int = 0


def checklist(lm: Model, asked: Asked) -> Figure:
    """Width, heads, layers, expansion, split, position, attention variant, residual order."""
    seen = seen_in(lm)
    built, said = dict(_measured(lm, seen)), dict(_stated(lm))
    table = tuple((name, built[name], said[name], built[name] == said[name]) for name in said)
    rows: tuple[tuple[Cell, ...], ...] = table
    notes = ("measured: shapes, modules and their order in a pass of 5 tokens",)
    return Figure("checklist", "What it is", ("fact", "measured", "card", "equal"), rows, notes)


def seen_in(lm: Model) -> Seen:
    """Watch one pass."""
    seen, first = Seen(), f"{[*lm.parts.stacks][-1]}.blocks.0"

    def record(path: str, value: Tensor) -> Tensor:
        name, _, point = path.partition(":")
        seen.shapes.setdefault(point, tuple(value.shape))
        if name == first and point.startswith("after_"):
            seen.order.append("add")
        return value

    def watch(path: str, given: tuple[Any, ...], out: Any) -> None:
        seen.inputs.setdefault(".".join(path.split(".")[-2:]), tuple(given[0].shape) if given else ())
        stack, _, rest = path.partition(".blocks.")
        if rest.isdigit():
            seen.blocks[stack] = seen.blocks.get(stack, 0) + 1
            seen.stream = given[0].shape[-1]

    def enter(path: str) -> None:
        if path.rpartition(".")[0] == first:
            seen.order.append("norm" if path.endswith("norm") else path.rpartition(".")[2])

    hooks = []
    for path, module in lm.net.named_modules():
        if path and not isinstance(module, nn.ModuleList):
            hooks.append(module.register_forward_pre_hook(lambda _, __, path=path: enter(path)))
            hooks.append(module.register_forward_hook(lambda _, given, out, path=path: watch(path, given, out)))
    try:
        run(lm, torch.zeros(1, TOKENS, dtype=torch.int64, device=lm.device), recorder=record)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _measured(lm: Model, seen: Seen) -> Iterator[tuple[str, Cell]]:
    built = by_module(lm.net)
    q, k = seen.shapes.get("q_heads"), seen.shapes.get("k_heads")
    yield "width", seen.stream
    yield "layers", " + ".join(str(n) for n in seen.blocks.values())
    yield "heads", q[1] if q else None
    yield "KV heads", k[1] if k else None
    yield "head size", q[-1] if q else None
    latent = q is None or k is None or "attn.kv_down" in seen.inputs
    yield "attention variant", "latent" if latent else _variant(q[1], k[1])  # type: ignore[index]
    wide = next(seen.inputs[name] for name in ("mlp.down", "experts.down") if name in seen.inputs)
    yield "expansion", wide[-1] / seen.stream
    yield "MLP's share of the parameters", _share(built)
    yield "position", _position(lm, seen)
    yield "residual order", " ".join(seen.order)


def _stated(lm: Model) -> Iterator[tuple[str, Cell]]:
    card = lm.card
    stack = [*lm.parts.stacks][-1]
    inner: Any = card.attention
    multi = isinstance(inner, MultiHead)
    mlp: Any = next(part for path, part, _ in lm.parts.walk() if path.endswith(("mlp.down", "experts.down")))
    yield "width", card.d_model
    yield "layers", " + ".join(str(len(s.blocks)) for s in lm.parts.stacks.values())
    yield "heads", inner.n_heads
    yield "KV heads", inner.n_kv_heads if multi else inner.n_heads
    yield "head size", inner.d_head if multi else inner.d_nope + inner.d_rope
    yield "attention variant", _variant(inner.n_heads, inner.n_kv_heads) if multi else "latent"
    yield "expansion", mlp.d_in / card.d_model
    yield "MLP's share of the parameters", _share(count(lm.parts).by_part)
    kind = "learned" if getattr(card.position, "table", False) else str(card.position.__struct_config__.tag)
    yield "position", POSITIONS.get(kind, "no parameters")
    yield "residual order", " ".join(_order(lm, f"{stack}.blocks.0"))


def _variant(heads: int, kv_heads: int) -> str:
    return "multi-head" if heads == kv_heads else "multi-query" if kv_heads == 1 else "grouped-query"


def _share(by_part: dict[str, int]) -> float:
    return sum(by_part.get(name, 0) for name in ("mlp", "experts", "router")) / sum(by_part.values())


def _position(lm: Model, seen: Seen) -> str:
    if "q_rotated" in seen.shapes:
        return "turned"
    if "position.table" not in seen.inputs:
        return "no parameters"
    return "a table of positions" if seen.inputs["position.table"][-1] == TOKENS else "a table of distances"


def _order(lm: Model, block: str) -> Iterator[str]:
    """The rows of the account in the first block of a stack, each sublayer once."""
    source = TOKENS if lm.parts.two_stacks else None
    last = ""
    for step in lm.parts.steps(Workload(1, TOKENS, source=source)):
        path = step.path.partition(":")[0]
        if path == block:
            yield "add"
            last = ""
        elif path.startswith(f"{block}."):
            name = path.removeprefix(f"{block}.").split(".")[0]
            if name != last:
                yield "norm" if name.endswith("norm") else name
            last = name
