"""The residual stream as a sum: the embedding and what every sublayer wrote, exact through every placement of norms.

A norm is linear once its size is known: x / s * w with the s of the true stream (and a mean taken off, which is linear,
too). So each term passes a norm on its own, and the terms still add up to what the norm gave. This holds for a pre-norm
stack with its final norm, for norms on what is added (sandwich), and for post-norm stacks and BLOOM's option, where
every norm stands in the stream itself. Shifts of norms and of output matrices are terms of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from scantling.errors import ScantlingInputError
from scantling.lens.hooks import ALL_REAL, Captured, Edit, capture
from scantling.lens.points import stack_of
from scantling.parts.block import Block, ParallelBlock, Sublayer
from scantling.parts.leaf import LayerNorm, Norm, RMSNorm
from scantling.parts.position import Learned, Sinusoidal
from scantling.passes import Given

if TYPE_CHECKING:
    from scantling.model import Model


@dataclass(frozen=True)
class Term:
    """One summand of the stream.

    Attributes:
        name: the path of the part that wrote it, with ``[head]`` for one head; ``shifts`` for shifts of norms.
        layer: of its stack; None for what comes before the blocks and for `shifts`.
        kind: ``embed``, ``position``, ``types``, ``attn``, ``cross``, ``mlp`` or ``shift``.
        head: of an attention, where heads are told apart; else None.
    """

    name: str
    layer: int | None
    kind: str
    head: int | None = None


@dataclass(frozen=True)
class Decomposition:
    """The stream at some positions, as a sum.

    Attributes:
        terms: what each row of `values` is.
        values: (N, B, P, d) in float64: N terms at P positions.
        stream: (B, P, d), what they add up to, as the model computed it.
        normed: whether both stand after the final norm, in front of the head, or before it.
    """

    terms: tuple[Term, ...]
    values: Tensor
    stream: Tensor
    normed: bool

    @property
    def error(self) -> float:
        """The largest difference between the sum and the stream, in units of the stream's largest number."""
        stream = wide(self.stream)
        return float((self.values.sum(0) - stream).abs().max() / stream.abs().max())


def decompose(
    lm: Model,
    ids: Any,
    given: Given = ALL_REAL,
    *,
    stack: str | None = None,
    positions: Sequence[int] | None = None,
    by_head: bool = False,
    normed: bool = True,
    edits: Sequence[Edit] = (),
) -> Decomposition:
    """Split the residual stream on top of a stack into what wrote it.

    Args:
        ids: (B, T); of an encoder-decoder the source, with the target in `given`.
        stack: by default the one that the head reads.
        positions: of the tokens, negative ones from the end; None for all.
        by_head: each head of an attention is a term: its output times its columns of the output matrix.
        normed: after the final norm, where the stack has one.

    Raises:
        ScantlingInputError: no such stack or position, an output matrix that is wrapped (LoRA), or a stack that widens
            its vectors after norms of another width.
    """
    where, part = stack_of(lm, stack)
    seen = capture(lm, ids, _points(lm, where, by_head), given, edits)
    walk = _Walk(lm, where, seen, positions, by_head)
    with torch.no_grad():
        stream = walk.run(normed)
    terms, values = zip(*walk.terms, strict=True)
    return Decomposition(terms, torch.stack(values), stream, normed and part.final_norm is not None)


def _points(lm: Model, where: str, by_head: bool) -> list[str]:
    _, stack = stack_of(lm, where)
    found = [f"{where}:in", where]
    found += [f"{where}.types"] * (stack.types is not None)
    found += [f"{where}.position:added"] * isinstance(stack.position, Learned | Sinusoidal)
    found += [f"{where}.{name}" for name in ("embed_norm", "widen") if getattr(stack, name) is not None]
    for i, block in enumerate(stack.blocks):
        assert isinstance(block, Block | ParallelBlock)
        at = f"{where}.blocks.{i}"
        found += [f"{at}:in", at]
        for sub in block.sublayers:
            found += [f"{at}.{name}" for place in ("in", "res", "out") if (name := sub.norm_name(place))]
            found += [f"{at}.{sub.name}"]
            found += [f"{at}.{sub.name}:merged"] * (by_head and hasattr(sub.part, "n_heads"))
            found += [f"{at}:after_{sub.name}"] * isinstance(block, Block)
    return found


def wide(x: Tensor) -> Tensor:
    """x in float64, on the CPU where its own device has none (mps)."""
    return x.cpu().double() if x.device.type == "mps" else x.double()


def checked_positions(count: int, positions: Sequence[int] | None) -> list[int]:
    """Positions of `count` tokens, from the start; all of them for None.

    Raises:
        ScantlingInputError: there is none of that number.
    """
    for position in positions or ():
        if not -count <= position < count:
            raise ScantlingInputError(f"position {position}: there are {count} tokens, 0 to {count - 1}")
    return list(range(count)) if positions is None else [position % count for position in positions]


SHIFTS = Term("shifts", None, "shift")


class _Walk:
    """The terms on their way up a stack."""

    def __init__(self, lm: Model, where: str, seen: Captured, positions: Sequence[int] | None, by_head: bool) -> None:
        self.lm, self.where, self.seen, self.by_head = lm, where, seen, by_head
        self.modules: dict[str, Any] = dict(getattr(lm.net, "_orig_mod", lm.net).named_modules())
        self.at = checked_positions(seen[f"{where}:in"].shape[1], positions)
        self.terms: list[tuple[Term, Tensor]] = []

    def value(self, point: str) -> Tensor:
        """What passed a point, at the wanted positions, in float64."""
        return wide(self.seen[point][:, self.at])

    def add(self, term: Term, value: Tensor) -> None:
        """One more summand; shifts are gathered in one."""
        for i, (other, before) in enumerate(self.terms):
            if other == term == SHIFTS:
                self.terms[i] = (other, before + value)
                return
        self.terms.append((term, value))

    def run(self, normed: bool) -> Tensor:
        """Take the terms to the top; returns the stream there."""
        _, stack = stack_of(self.lm, self.where)
        top = self._enter(f"{self.where}:in")
        for i, block in enumerate(stack.blocks):
            assert isinstance(block, Block | ParallelBlock)
            at = f"{self.where}.blocks.{i}"
            if isinstance(block, Block):
                self._block(at, i, block)
            else:
                self._parallel(at, i, block)
            top = at
        if normed and stack.final_norm is not None:
            self._norm(f"{self.where}.final_norm", stack.final_norm, self.value(top))
            top = self.where
        return self.seen[top][:, self.at]

    def _enter(self, below: str) -> str:
        """What stands in the stream before the first block; returns its point."""
        _, stack = stack_of(self.lm, self.where)
        own = self.lm.parts.target_embed is not None and self.where == "decoder"
        self.add(Term("target_embed" if own else "embed", None, "embed"), self.value(below))
        added = {"types": f"{self.where}.types", "position": f"{self.where}.position:added"}
        for kind, point in added.items():
            if point in self.seen.values:
                self.add(Term(f"{self.where}.{kind}", None, kind), self.value(point) - self.value(below))
                below = point
        if stack.embed_norm is not None:
            self._norm(f"{self.where}.embed_norm", stack.embed_norm, self.value(below))
            below = f"{self.where}.embed_norm"
        if stack.widen is not None:
            widen = self._linear(f"{self.where}.widen")
            self.terms = [(term, value @ wide(widen.weight).T) for term, value in self.terms]
            self._shift(widen.bias)
            below = f"{self.where}.widen"
        return below

    def _block(self, at: str, layer: int, block: Block) -> None:
        below = f"{at}:in"
        for sub in block.sublayers:
            if block.from_norm and (name := sub.norm_name("in")) is not None:
                self._norm(f"{at}.{name}", dict(sub.norms)["in"], self.value(below))
            self._write(at, layer, sub)
            below = f"{at}:after_{sub.name}"
            if (name := sub.norm_name("out")) is not None:
                self._norm(f"{at}.{name}", dict(sub.norms)["out"], self.value(below))
                below = f"{at}.{name}"

    def _parallel(self, at: str, layer: int, block: ParallelBlock) -> None:
        for sub in block.sublayers:
            self._write(at, layer, sub)

    def _write(self, at: str, layer: int, sub: Sublayer) -> None:
        """What a sublayer adds, through the norm that stands before the addition."""
        path = f"{at}.{sub.name}"
        written = list(self._written(path, Term(path, layer, sub.name), sub))
        if (name := sub.norm_name("res")) is not None:
            norm = dict(sub.norms)["res"]
            written = self._through(f"{at}.{name}", norm, self.value(path), written)
            if isinstance(norm, LayerNorm) and norm.bias:
                self._shift(self.modules[f"{at}.{name}"].bias)
        for term, value in written:
            self.add(term, value)

    def _written(self, path: str, term: Term, sub: Sublayer) -> Iterator[tuple[Term, Tensor]]:
        n_heads = getattr(sub.part, "n_heads", None)
        if not self.by_head or n_heads is None:
            yield term, self.value(path)
            return
        out, merged = self._linear(f"{path}.o"), self.value(f"{path}:merged")
        width = merged.shape[-1] // n_heads
        for head in range(n_heads):
            columns = slice(head * width, (head + 1) * width)
            value = merged[..., columns] @ wide(out.weight[:, columns]).T
            yield replace(term, name=f"{path}[{head}]", head=head), value
        if out.bias is not None:
            yield Term(f"{path}.o.bias", term.layer, "shift"), wide(out.bias).expand_as(self.value(path))

    def _linear(self, path: str) -> nn.Linear:
        found = self.modules[path]
        if type(found) is not nn.Linear:
            raise ScantlingInputError(f"{path!r} is wrapped in {type(found).__name__}: merge it into its weight first")
        return found

    def _shift(self, bias: Tensor | None) -> None:
        if bias is not None:
            self.add(SHIFTS, wide(bias).expand_as(self.terms[0][1]))

    def _norm(self, path: str, part: Norm, stream: Tensor) -> None:
        self.terms = self._through(path, part, stream, self.terms)
        if isinstance(part, LayerNorm) and part.bias:
            self._shift(self.modules[path].bias)

    def _through(
        self, path: str, part: Norm, stream: Tensor, terms: Sequence[tuple[Term, Tensor]]
    ) -> list[tuple[Term, Tensor]]:
        """Each term through the norm that `stream` went through, its shift left out."""
        gain = wide(self.modules[path].weight)
        centred = isinstance(part, LayerNorm)
        if isinstance(part, RMSNorm) and part.plus_one:
            gain = 1 + gain
        whole = stream - stream.mean(-1, keepdim=True) if centred else stream
        size = (whole.square().mean(-1, keepdim=True) + part.eps).rsqrt()
        return [
            (term, (value - value.mean(-1, keepdim=True) if centred else value) * size * gain) for term, value in terms
        ]
