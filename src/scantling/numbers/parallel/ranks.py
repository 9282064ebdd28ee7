"""The pipeline ranks of a model: which blocks each has, what stands before the first and after the last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from scantling.numbers.parallel.layouts import Layout, stages
from scantling.numbers.parallel.shards import Cut, Held, cuts, held
from scantling.parts.heads import Head
from scantling.parts.part import Part
from scantling.parts.transformer import Transformer


@dataclass(frozen=True)
class Rank:
    """Pipeline ranks that have the same to do.

    Attributes:
        first_of: the number of the first of them; it keeps most passes at once.
        how_many: of them.
        blocks: how often each kind of block, by its number among the kinds.
        opens: it has the tables and what stands before the blocks.
        closes: it has what stands after the blocks.
    """

    first_of: int
    how_many: int
    blocks: tuple[tuple[int, int], ...]
    opens: bool
    closes: bool

    @property
    def n_blocks(self) -> int:
        """Blocks of one of them."""
        return sum(n for _, n in self.blocks)


@dataclass(frozen=True)
class Kinds:
    """The different blocks of a model.

    Attributes:
        blocks: one of each kind, with the stack that it stands in.
        order: the kind of every block, from the bottom of the first stack to the top of the last.
    """

    blocks: tuple[tuple[str, Part], ...]
    order: tuple[int, ...]


def kinds(model: Transformer) -> Kinds:
    """Sort a model's blocks by kind."""
    numbers: dict[tuple[str, Part], int] = {}
    order = [
        numbers.setdefault((name, block), len(numbers))
        for name, stack in model.stacks.items()
        for block in stack.blocks
    ]
    return Kinds(tuple(numbers), tuple(order))


def ranks(order: tuple[int, ...], layout: Layout) -> list[Rank]:
    """The ranks of a pipeline, equal ones together."""
    pipeline = layout.mesh.pipeline
    groups: dict[tuple[tuple[tuple[int, int], ...], bool, bool], list[int]] = {}
    for number, chunks in enumerate(stages(len(order), pipeline, layout.virtual)):
        counted = Counter(order[i] for chunk in chunks for i in chunk)
        key = (tuple(sorted(counted.items())), number == 0, number == pipeline - 1)
        groups.setdefault(key, []).append(number)
    return [
        Rank(numbers[0], len(numbers), blocks, opens, closes) for (blocks, opens, closes), numbers in groups.items()
    ]


@dataclass(frozen=True)
class Weights:
    """Every weight of a model by where it stands.

    Attributes:
        opening: tables, positions, what stands before the blocks; everything outside them where there are two stacks.
        closing: the norm after the blocks and the head.
        table: the token table, which a tied head on another rank has too.
        blocks: of each kind of block.
    """

    opening: tuple[Cut, ...]
    closing: tuple[Cut, ...]
    table: tuple[Cut, ...]
    blocks: tuple[tuple[Cut, ...], ...]

    def of(self, rank: Rank, tensor: int, expert: int, tensor_rank: int = 0) -> Held:
        """What a tensor rank of a pipeline rank holds."""
        total = Held()
        for pieces, n in self.pieces(rank):
            one = held(list(pieces), tensor, expert, tensor_rank)
            total += Held(n * one.dense, n * one.experts)
        return total

    def pieces(self, rank: Rank) -> Iterator[tuple[tuple[Cut, ...], int]]:
        """Groups of weights on a rank, each with how often."""
        if rank.opens:
            yield self.opening, 1
        if rank.closes:
            yield self.closing, 1
            if not rank.opens:
                yield self.table, 1
        yield from ((self.blocks[kind], n) for kind, n in rank.blocks)


def weights(model: Transformer, known: Kinds) -> Weights:
    """Sort a model's weights by where they stand."""
    closing_of = tuple(f"{name}.final_norm." for name in model.stacks) if not model.two_stacks else ()
    outside = [cut for cut in cuts(model) if ".blocks." not in cut.name]
    closing = tuple(c for c in outside if c.name.startswith(("head.", *closing_of)))
    tied = isinstance(model.head, Head) and model.head.tied
    of_table = f"{'target_embed' if model.target_embed else 'embed'}.weight"
    table = tuple(c for c in outside if c.name == of_table) if tied else ()
    blocks = tuple(tuple(cuts(block)) for _, block in known.blocks)
    return Weights(tuple(c for c in outside if c not in closing), closing, table, blocks)
