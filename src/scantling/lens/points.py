"""Capture points: everything inside a pass that has a name, and the patterns that choose among the names.

``PATH`` is what the part at that path of the tree gives, ``PATH:in`` what it is given, and ``PATH:POINT`` a step
inside it, as `scantling trace` lists them: ``decoder.blocks.3`` is the stream after block 3, ``decoder.blocks.3:in``
before it,
``decoder.blocks.3.attn:weights`` its attention maps, ``decoder.blocks.3.attn:mixed`` its heads' outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from scantling.errors import ScantlingInputError, nearest
from scantling.parts.attention import Attention
from scantling.parts.block import Block, ParallelBlock
from scantling.parts.cross import CrossAttention
from scantling.parts.latent import LatentAttention
from scantling.parts.moe import Router
from scantling.parts.part import Workload
from scantling.parts.stack import Stack
from scantling.parts.transformer import Transformer

if TYPE_CHECKING:
    from scantling.model import Model

AnyAttention = Attention | CrossAttention | LatentAttention
OUTCOMES = (":probabilities", ":loss")
"""Rows of the trace that are made of the logits, after the pass."""


@lru_cache(maxsize=8)
def known(parts: Transformer) -> tuple[str, ...]:
    """Every capture point of a model, in the order of execution as far as it is one."""
    w = Workload(tokens=2, source=2 if parts.two_stacks else None, unrolled=True, kernel="reference")
    inside = [step.path for step in parts.steps(w) if ":" in step.path and step.path not in OUTCOMES]
    found: dict[str, None] = {}
    for path, part, _ in parts.walk():
        if path and not isinstance(part, Router):
            found |= {f"{path}:in": None, path: None}
    return tuple(found | dict.fromkeys(inside))


def chosen(parts: Transformer, wanted: Iterable[str]) -> tuple[str, ...]:
    """The points that names or patterns with ``*`` mean.

    Raises:
        ScantlingInputError: a name that no point has, or a pattern that fits none.
    """
    names = known(parts)
    found: dict[str, None] = {}
    for name in [wanted] if isinstance(wanted, str) else wanted:
        fitting = [point for point in names if fnmatchcase(point, name)] if "*" in name else [name]
        if not fitting or fitting[0] not in names:
            example = f"{list(parts.stacks)[-1]}.blocks.0.attn:weights"
            raise ScantlingInputError(
                f"no capture point {name!r}{nearest(name, names)}; points are paths of parts such as {example!r}"
            )
        found |= dict.fromkeys(fitting)
    return tuple(found)


@dataclass(frozen=True)
class Place:
    """A part of a block.

    Attributes:
        path: in the tree, such as ``decoder.blocks.3.attn``.
        layer: of its stack, from 0.
        name: in its block: ``attn``, ``cross`` or ``mlp``.
    """

    path: str
    layer: int
    name: str
    part: Any


def stack_of(lm: Model, name: str | None = None) -> tuple[str, Stack]:
    """The stack of that name; by default the one that the head reads.

    Raises:
        ScantlingInputError: the model has no such stack.
    """
    stacks = lm.parts.stacks
    name = list(stacks)[-1] if name is None else name
    if name not in stacks:
        raise ScantlingInputError(f"no stack {name!r}; {lm.card.name} has {' and '.join(stacks)}")
    return name, stacks[name]


def places(lm: Model, stack: str | None = None, names: Sequence[str] = ("attn", "cross", "mlp")) -> Iterator[Place]:
    """The sublayers of a stack with those names, from the bottom up."""
    where, found = stack_of(lm, stack)
    for i, block in enumerate(found.blocks):
        assert isinstance(block, Block | ParallelBlock)
        for sub in block.sublayers:
            if sub.name in names:
                yield Place(f"{where}.blocks.{i}.{sub.name}", i, sub.name, sub.part)


def layer_number(lm: Model, layer: int, stack: str | None = None) -> int:
    """A layer that exists; negative ones count from the top.

    Raises:
        ScantlingInputError: there is none of that number.
    """
    where, found = stack_of(lm, stack)
    count = len(found.blocks)
    if not -count <= layer < count:
        raise ScantlingInputError(f"layer {layer}: the {where} of {lm.card.name} has layers 0 to {count - 1}")
    return layer % count


def heads_at(lm: Model, path: str) -> int:
    """How many heads the attention at `path` has.

    Raises:
        ScantlingInputError: there is no attention there.
    """
    attentions = {p: part.n_heads for p, part, _ in lm.parts.walk() if isinstance(part, AnyAttention)}
    if path not in attentions:
        raise ScantlingInputError(f"no attention at {path!r}{nearest(path, attentions)}")
    return attentions[path]
