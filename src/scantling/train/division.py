"""The net of one rank: its shards of the weights, how they become whole again, and what their gradients lack.

Weights are FSDP2's and tensor parallelism's DTensors; everything that goes value by value (optimizer, clipping, mean
of the weights, checkpoints) works on this rank's values as plain tensors in the same storage. A shard is cut first
among tensor ranks, along the dimension that `tensor_ranks.dimensions` names, then among data ranks, along dimension 0
in pieces of ceil(n / ranks) as torch.chunk cuts.

A checkpoint is whole: its tensors are gathered one at a time into rank 0's host memory, which writes the very files
that one process writes, and every rank cuts its own piece out of them when it goes on. So what N ranks saved M ranks
read, and one format, its manifest and its safety serve all. torch.distributed.checkpoint would keep shards apart, but
its ``.metadata`` is a pickle and its safetensors writer knows no optimizer. The price is host memory of rank 0 for all
weights and the optimizer state (with AdamW in float32 twelve bytes a parameter), of the other ranks for one whole
tensor at a time, and of every rank for all weights once, when it begins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scantling.cards.training import Training
from scantling.errors import ScantlingInputError
from scantling.model import Model
from scantling.parts.part import Shape
from scantling.train import tensor_ranks
from scantling.train.optim import block_of, norms_by_block
from scantling.train.ranks import Ranks

WHOLE = {
    "muon": "muon needs whole matrices and cannot update them",
    "adamw-8bit": "the blocks of 8-bit moments are not divided",
}
"""Optimizers that do not go value by value, and why they do not train shards."""


@dataclass(frozen=True)
class Cut:
    """Where one weight is cut.

    Attributes:
        shape: of the whole.
        dim: divided among tensor ranks, or None.
    """

    shape: Shape
    dim: int | None


def place(cut: Cut, ranks: Ranks, rank: int) -> tuple[slice, ...]:
    """Where a rank's piece stands in the whole; ranks that share no matrix have the same one."""
    places = [slice(0, size) for size in cut.shape]
    if cut.dim is not None:
        places[cut.dim] = _chunk(places[cut.dim], ranks.tensor, rank % ranks.tensor)
    if not ranks.replicated:
        places[0] = _chunk(places[0], ranks.data, rank // ranks.tensor)
    return tuple(places)


class Division:
    """What one rank has of the weights of a net.

    Args:
        trained: the weights that are updated, by their names in the state dict, while they are whole.

    Attributes:
        weights: this rank's values of them, to be updated; alone, the weights themselves.
    """

    def __init__(self, lm: Model, trained: Mapping[str, Tensor], ranks: Ranks) -> None:
        self.ranks, self._net, self._device = ranks, lm.net, lm.device
        self._sharded = ranks.data > 1 and not ranks.replicated
        dims = tensor_ranks.dimensions(lm.parts, ranks.tensor)
        self._cuts = {name: Cut(tuple(weight.shape), dims.get(name)) for name, weight in lm.net.named_parameters()}
        self._partial = tensor_ranks.partial(lm.parts, ranks.tensor)
        self.weights: dict[str, Tensor] = dict(trained)
        self._sources: dict[str, Any] = {}
        self._mesh: Any = None
        if self._sharded or ranks.tensor > 1:
            self._mesh = _mesh(lm.device, ranks)
            _divide(lm, ranks, self._mesh, self._sharded)
            self._sources = {name: weight for name, weight in lm.net.named_parameters() if name in trained}
            self.weights = {name: nn.Parameter(_local(weight.detach())) for name, weight in self._sources.items()}

    @property
    def divided(self) -> bool:
        """Whether this rank has shards."""
        return bool(self._sources)

    def collect(self) -> None:
        """Take the gradients of one micro-batch over from the net."""
        for name, source in self._sources.items():
            if source.grad is None:
                continue
            weight, found = self.weights[name], _local(source.grad)
            weight.grad = found if weight.grad is None else weight.grad.add_(found)
            source.grad = None

    def settle(self, gradients: Mapping[str, Tensor]) -> None:
        """Add, in place, what other ranks have of this rank's gradients and FSDP does not bring together."""
        ranks = self.ranks
        if ranks.replicated:
            for gradient in gradients.values():
                dist.all_reduce(gradient)
        for name in sorted(self._partial & gradients.keys()):
            dist.all_reduce(gradients[name], group=self._mesh["tensor"].get_group())

    def norms(self, gradients: Mapping[str, Tensor]) -> dict[str, float]:
        """The norm of each block's whole gradient, the same in all ranks."""
        if self.ranks.size == 1:
            return norms_by_block(gradients)
        blocks = list(dict.fromkeys(block_of(name) for name in gradients))
        mine = norms_by_block({name: gradient for name, gradient in gradients.items() if self._counts(name)})
        squares = self.ranks.totals([mine.get(block, 0.0) ** 2 for block in blocks], self._device)
        return {block: square**0.5 for block, square in zip(blocks, squares, strict=True)}

    def _counts(self, name: str) -> bool:
        """Whether this rank's values of a weight are not another rank's, too."""
        cut = self._cuts.get(name)
        same_rows = self.ranks.tensor_rank == 0 or (cut is not None and cut.dim is not None)
        return same_rows and (self._sharded or self.ranks.data_rank == 0)

    def rest(self) -> None:
        """Let go of whole weights that a pass without a backward left behind."""
        if self._sharded:
            self._net.reshard()  # type: ignore[operator]

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors as one process has them, in host memory of rank 0; the other ranks get nothing.

        Args:
            tensors: this rank's, each shaped like the weight in whose name it stands: ``weight`` or ``weight/entry``.
        """
        if self.ranks.size == 1:
            return dict(tensors)
        found = ((name, self._gathered(name, tensor.detach())) for name, tensor in tensors.items())
        return {name: tensor for name, tensor in found if tensor is not None}

    def state(self) -> dict[str, Tensor]:
        """The net's state dict as one process has it; see `whole`."""
        if not self.divided:
            return dict(self._net.state_dict()) if self.ranks.rank == 0 else {}
        self.rest()
        return self.whole({name: _local(value.detach()) for name, value in self._values()})

    def _values(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._net.named_parameters()
        yield from self._net.named_buffers()

    def put(self, state: Mapping[str, Tensor]) -> None:
        """Take whole weights in, of which each rank keeps its own.

        Raises:
            ScantlingInputError: one is missing or of another shape.
        """
        with torch.no_grad():
            for name, value in self._values():
                if name in state:
                    _local(value.detach()).copy_(self.cut(name, state[name]))

    def piece(self, key: str, whole: Tensor) -> Tensor:
        """This rank's piece of what a checkpoint names ``optimizer/weight/entry`` or ``ema/weight``; of others all.

        Raises:
            ScantlingInputError: it has another shape than the weight.
        """
        kind, _, rest = key.partition("/")
        name = rest.rpartition("/")[0] if kind == "optimizer" else rest if kind == "ema" else ""
        # A copy, so that the whole does not stay in memory.
        return self.cut(name, whole).clone() if self.divided else whole

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """This rank's piece of a whole tensor that is shaped like the weight `name`; of others all.

        Raises:
            ScantlingInputError: it has another shape.
        """
        cut = self._cuts.get(name)
        if cut is None or not whole.dim() or not self.divided:
            return whole
        if tuple(whole.shape) != cut.shape:
            raise ScantlingInputError(f"{name!r} has shape {list(whole.shape)} and {list(cut.shape)} is needed")
        return whole[place(cut, self.ranks, self.ranks.rank)]

    def _gathered(self, key: str, tensor: Tensor) -> Tensor | None:
        cut = self._cuts.get(key) or self._cuts.get(key.rpartition("/")[0])
        if cut is None or not tensor.dim() or not self.divided:
            return tensor.cpu() if self.ranks.rank == 0 else None
        places = [place(cut, self.ranks, rank) for rank in range(self.ranks.size)]
        longest = max(_numel(where) for where in places)
        padded = tensor.new_zeros(longest)
        padded[: tensor.numel()] = tensor.flatten()
        if self.ranks.rank:
            dist.gather(padded, None)
            return None
        found = [torch.empty_like(padded) for _ in places]
        dist.gather(padded, found)
        whole = torch.empty(cut.shape, dtype=tensor.dtype)
        for where, piece in zip(places, found, strict=True):
            part = whole[where]
            part.copy_(piece[: part.numel()].view(part.shape))
        return whole


def rows_of_a_pass(training: Training, ranks: Ranks) -> int:
    """Rows of a micro-batch of one rank: `batch`, or less where its rows of an update are fewer or do not divide."""
    rows = training.batch * training.accumulation // ranks.data
    return next(n for n in range(min(training.batch, rows), 0, -1) if rows % n == 0)


def check(lm: Model, training: Training, ranks: Ranks) -> None:
    """Whether a run can be divided like that.

    Raises:
        ScantlingInputError: it cannot; one sentence says what would do.
    """
    if ranks.size == 1:
        return
    tensor_ranks.check(lm.parts, ranks.tensor)
    rows = training.batch * training.accumulation
    if rows % ranks.data:
        raise ScantlingInputError(
            f"an update has {training.batch} x {training.accumulation} = {rows} rows, which {ranks.data} ranks cannot "
            "share: take a multiple (batch, accumulation)"
        )
    if training.compile:
        raise ScantlingInputError("training.compile with several processes is not supported: leave it out")
    if ranks.replicated:
        return
    sentence = "{} by sharded or tensor ranks: add --set 'parallel={{replicated: {}}}'"
    if (what := WHOLE.get(training.optimizer.kind)) is not None:
        raise ScantlingInputError(sentence.format(what, ranks.size))
    if training.lora is not None:
        raise ScantlingInputError(sentence.format("adapters are not trained", ranks.size))


def _divide(lm: Model, ranks: Ranks, mesh: Any, sharded: bool) -> None:
    """Cut the net's weights among tensor ranks, then among data ranks, a block at a time."""
    if ranks.tensor > 1:
        tensor_ranks.divide(lm.net, lm.parts, ranks.tensor, mesh["tensor"])
    if not sharded:
        return
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # Gradients of 16 bits are summed in float32, as the micro-batches of one process are.
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    blocks: list[Any] = [block for name in lm.parts.stacks for block in lm.net.get_submodule(name).blocks]  # type: ignore[union-attr]
    for module in (*blocks, lm.net):
        fully_shard(module, mesh=mesh["data"], mp_policy=policy)
    for module in (*blocks, lm.net):
        # The loss is divided by all tokens of the step already, so gradients are summed.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def _mesh(device: torch.device, ranks: Ranks) -> Any:
    """The processes in two dimensions."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device.type, (ranks.data, ranks.tensor), mesh_dim_names=("data", "tensor"))


def _local(tensor: Any) -> Tensor:
    """This rank's values, in the same storage."""
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def _chunk(whole: slice, pieces: int, number: int) -> slice:
    """A piece of a range as torch.chunk cuts: ceil(n / pieces) each, the last ones less or nothing."""
    size = whole.stop - whole.start
    each = -(-size // pieces)
    return slice(whole.start + min(size, number * each), whole.start + min(size, (number + 1) * each))


def _numel(where: tuple[slice, ...]) -> int:
    return math.prod(each.stop - each.start for each in where)
