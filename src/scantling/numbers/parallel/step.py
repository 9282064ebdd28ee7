"""One training step of a layout: what the fullest rank holds, what every link carries, and how long it takes."""

from __future__ import annotations

import math
from dataclasses import replace

from scantling.numbers.flops import flops
from scantling.numbers.parallel.assumptions import PASSES, RESERVED
from scantling.numbers.parallel.communication import Traffic
from scantling.numbers.parallel.job import Estimate, Job, Times
from scantling.numbers.parallel.layouts import Layout, Mesh
from scantling.numbers.parallel.memory import Memory, per_rank, under_way
from scantling.numbers.parallel.passes import SIZE, Exchange, Pass, block_pass, ways
from scantling.numbers.parallel.ranks import Rank, kinds, ranks, weights
from scantling.numbers.parallel.replicas import Room, waited
from scantling.numbers.parallel.rows import Rows, rows_of
from scantling.numbers.parallel.shards import COLUMN, Held, held
from scantling.numbers.parallel.work import ACTIVATIONS, Place, Work, kept, places, work
from scantling.parts.heads import Head
from scantling.parts.part import Step, Workload
from scantling.parts.saved import Value
from scantling.parts.stack import Stack
from scantling.parts.transformer import Transformer
from scantling.units import DTYPE_BYTES


class Simulator:
    """Estimates of layouts of one job; what layouts share is computed once."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.kinds = kinds(job.model)
        self.weights = weights(job.model, self.kinds)
        self._shell = _without_blocks(job.model)
        judged = isinstance(job.model.head, Head)
        self._outside = places(self._shell) | {"loss": Place(COLUMN, judged, judged)}
        self._rows: dict[tuple[int, int], Rows] = {}
        self._passes: dict[tuple[int, Layout], Pass] = {}
        self._ends: dict[Layout, tuple[Pass, Pass]] = {}
        self._ranks: dict[tuple[int, int], list[Rank]] = {}
        self._whole_passes: dict[tuple[Rank, Layout], Pass] = {}
        self._held: dict[tuple[Rank, int, int], Held] = {}

    def model_flops(self, convention: str) -> int:
        """Forward and backward of a step: ``full`` square or ``causal`` pairs; nothing that is computed again."""
        one = flops(self.job.model, Workload(1, self.job.tokens))
        return self.job.sequences * (one.training if convention == "full" else one.training_visible)

    def estimate(self, layout: Layout) -> Estimate:
        """Memory and time of a legal layout."""
        micro_batches = self.job.sequences // (layout.mesh.data * layout.micro_batch)
        inner = _inner(layout)
        each = [(rank, self._rank_pass(rank, inner)) for rank in self._ranks_of(layout)]
        slow, one = max(each, key=lambda pair: pair[1].seconds)
        others = sum(rank.how_many * passed.seconds for rank, passed in each) - one.seconds
        held_most = self._fullest(layout)
        times = Times(
            compute=micro_batches * (one.work.forward + one.work.backward + self._summing(held_most)),
            recompute=micro_batches * one.again,
            tensor=micro_batches * one.tensor,
            context=micro_batches * one.context,
            experts=micro_batches * one.experts,
            pipeline=self._sends(layout, micro_batches)[0],
            data=self._replicas(layout, slow, one, micro_batches)[0],
            bubble=others / layout.virtual,
            optimizer=self._update(layout, held_most),
        )
        memory = max((self._memory(rank, layout, inner, micro_batches) for rank, _ in each), key=lambda m: m.total)
        return Estimate(layout, micro_batches, memory, times)

    def traffic(self, layout: Layout) -> tuple[Traffic, ...]:
        """What the slowest rank exchanges in a step."""
        micro_batches = self.job.sequences // (layout.mesh.data * layout.micro_batch)
        each = [(rank, self._rank_pass(rank, _inner(layout))) for rank in self._ranks_of(layout)]
        slow, one = max(each, key=lambda pair: pair[1].seconds)
        inside = _merged(tuple(replace(t, times=micro_batches * t.times) for t in one.traffic))
        sends = self._sends(layout, micro_batches)[1]
        return (*inside, *sends, *self._replicas(layout, slow, one, micro_batches)[1])

    def _fullest(self, layout: Layout) -> Held:
        return max((self._held_by(rank, layout) for rank in self._ranks_of(layout)), key=lambda h: h.total)

    def _replicas(self, layout: Layout, rank: Rank, one: Pass, micro_batches: int) -> tuple[float, tuple[Traffic, ...]]:
        """Seconds that wait for replicas, and their traffic."""
        job, hides = self.job, "data" in self.job.overlap
        pieces = layout.virtual if layout.virtual > 1 else rank.n_blocks
        room = Room(hides * one.work.forward, hides * one.work.backward, pieces)
        return waited(layout, self._fullest(layout), job.fabric, job.precision, room, micro_batches)

    def _ranks_of(self, layout: Layout) -> list[Rank]:
        key = (layout.mesh.pipeline, layout.virtual)
        if key not in self._ranks:
            self._ranks[key] = ranks(self.kinds.order, layout)
        return self._ranks[key]

    def _held_by(self, rank: Rank, layout: Layout) -> Held:
        key = (rank, layout.mesh.tensor, layout.mesh.expert)
        if key not in self._held:
            self._held[key] = self.weights.of(rank, layout.mesh.tensor, layout.mesh.expert)
        return self._held[key]

    def _rank_pass(self, rank: Rank, inner: Layout) -> Pass:
        """One micro-batch on a pipeline rank."""
        key = (rank, inner)
        if key not in self._whole_passes:
            total = Pass()
            for kind, n in rank.blocks:
                total += self._block_pass(kind, inner).times(n)
            opening, closing = self._outer_passes(inner)
            total += opening if rank.opens else Pass()
            self._whole_passes[key] = total + (closing if rank.closes else Pass())
        return self._whole_passes[key]

    def _block_pass(self, kind: int, inner: Layout) -> Pass:
        key = (kind, inner)
        if key not in self._passes:
            links = Exchange(self.job.fabric, inner, "tensor" in self.job.overlap)
            self._passes[key] = block_pass(self._rows_of(kind, inner.micro_batch), self.job.speed, links)
        return self._passes[key]

    def _rows_of(self, kind: int, micro_batch: int) -> Rows:
        if (kind, micro_batch) not in self._rows:
            stack, block = self.kinds.blocks[kind]
            self._rows[kind, micro_batch] = rows_of(block, self._workload(micro_batch, stack))
        return self._rows[kind, micro_batch]

    def _workload(self, micro_batch: int, stack: str) -> Workload:
        w = Workload(
            micro_batch,
            self.job.tokens,
            training=True,
            kernel=self.job.kernel,
            dtype=ACTIVATIONS,
            accelerator=True,
        )
        if stack == "encoder":
            return replace(w, tokens=w.sources)
        beside = Value("the encoder's output", w.batch * w.sources * self.job.model.d_model, key="memory")
        return replace(w, beside=beside) if self.job.model.two_stacks else w

    def _outer_passes(self, inner: Layout) -> tuple[Pass, Pass]:
        """What stands before the blocks and after them; it is never computed again."""
        key = replace(inner, recompute="none", mesh=replace(inner.mesh, expert=1))
        if key not in self._ends:
            w = self._workload(inner.micro_batch, "decoder")
            rows = [replace(step, path="loss") if step.path == ":loss" else step for step in self._shell.steps(w)]
            after = [step for step in rows if _closes(step)]
            before = [step for step in rows if not _closes(step)]
            links = Exchange(self.job.fabric, inner, False)
            stream = w.batch * w.tokens * self._shell.d_model * SIZE // inner.mesh.context
            seconds, traffic = links.reductions(stream, 1)
            split, fast = ways(inner), self.job.speed
            at_start, at_end = (kept(steps, self._outside, split) for steps in (before, after))
            first = work(before, self._outside, split, fast)
            opening = Pass(first, tensor=2 * seconds, saved=at_start, traffic=traffic)
            scored = max((step.numel for step in after if step.flops), default=0)
            scores = scored / split.inside * DTYPE_BYTES["float32"]
            self._ends[key] = (
                opening,
                Pass(
                    work(after, self._outside, split, fast) + self._judging(scores),
                    tensor=2 * seconds,
                    saved=at_end,
                    working=scores,
                    traffic=traffic,
                ),
            )
        return self._ends[key]

    def _judging(self, size: float) -> Work:
        """The loss: logits in float32, once more than the head's own, forward and backward."""
        seconds = PASSES * size / self.job.speed.memory
        return Work(others=seconds, backward_others=seconds)

    def _sends(self, layout: Layout, micro_batches: int) -> tuple[float, tuple[Traffic, ...]]:
        """Activations to the next rank and their gradients back, for each chunk, each tensor rank its share."""
        mesh, job = layout.mesh, self.job
        if mesh.pipeline == 1:
            return 0.0, ()
        size = layout.micro_batch * job.tokens * job.model.d_model * SIZE // (mesh.context * mesh.tensor)
        stride = mesh.tensor * mesh.replicas
        times = 2 * layout.virtual * micro_batches
        one = job.fabric.seconds("send", 2, stride, size)
        # Overlapped, only the first micro-batch's way through the ranks is waited for.
        waits = 2 * (mesh.pipeline - 1) if "pipeline" in job.overlap else times + 2 * (mesh.pipeline - 1)
        return waits * one, (Traffic("pipeline", "send", 2, job.fabric.inside(2, stride), size, times),)

    def _summing(self, held: Held) -> float:
        """Seconds of adding a micro-batch's gradients to the sum."""
        return 2 * self.job.precision.gradients * held.total / self.job.speed.memory

    def _update(self, layout: Layout, held: Held) -> float:
        """Seconds of the optimizer: the state read and written, gradients read, weights written."""
        size = self.job.precision
        moved = 2 * size.state + size.gradients + size.weights
        return per_rank(held, layout.sharing, layout.zero >= 1, moved) / self.job.speed.memory

    def _memory(self, rank: Rank, layout: Layout, inner: Layout, micro_batches: int) -> Memory:
        size, has = self.job.precision, self._held_by(rank, layout)
        whole = self._rank_pass(rank, inner)
        loss = self._outer_passes(inner)[1].saved if rank.closes else 0.0
        flights = under_way(rank.first_of, layout.mesh.pipeline, layout.virtual, micro_batches)
        return Memory(
            weights=per_rank(has, layout.sharing, layout.zero == 3, size.weights),
            gradients=per_rank(has, layout.sharing, layout.zero >= 2, size.gradients),
            optimizer=per_rank(has, layout.sharing, layout.zero >= 1, size.state),
            activations=math.ceil(flights * (whole.saved - loss)),
            work=math.ceil(loss + whole.working + sum(whole.shared.values())) + self._whole(rank, layout, has),
            reserved=RESERVED,
        )

    def _whole(self, rank: Rank, layout: Layout, has: Held) -> int:
        """Bytes of shared weights and gradients that are whole at a time: a chunk's, or those of the largest block.

        Of weights there are two: one that is used and the next.
        """
        mesh, size = layout.mesh, self.job.precision
        if layout.zero < 2 or layout.sharing[0] == 1:
            return 0
        pieces = (held(list(p), mesh.tensor, mesh.expert).total for p, _ in self.weights.pieces(rank))
        unit = -(-has.total // layout.virtual) if layout.virtual > 1 else max(pieces)
        return unit * (size.gradients + (2 * size.weights if layout.zero == 3 else 0))


def _without_blocks(model: Transformer) -> Transformer:
    """The same model with empty stacks."""

    def empty(stack: Stack | None) -> Stack | None:
        return None if stack is None else replace(stack, blocks=())

    return replace(model, encoder=empty(model.encoder), decoder=empty(model.decoder))


def _inner(layout: Layout) -> Layout:
    """What of a layout decides a pass through a block."""
    mesh = Mesh(1, layout.mesh.tensor, 1, layout.mesh.context, layout.mesh.expert)
    return replace(layout, mesh=mesh, zero=0, shards=None, virtual=1)


def _closes(step: Step) -> bool:
    """Whether a row stands after the blocks."""
    return step.path.startswith(("head", "loss")) or step.path.endswith(".final_norm")


def _merged(traffic: tuple[Traffic, ...]) -> tuple[Traffic, ...]:
    """Equal exchanges together."""
    sums: dict[Traffic, int] = {}
    for each in traffic:
        key = replace(each, times=0)
        sums[key] = sums.get(key, 0) + each.times
    return tuple(replace(key, times=times) for key, times in sums.items())
