"""Memory of a rank in training: weights, gradients, optimizer, what the backward needs, and room to work in."""

from __future__ import annotations

from dataclasses import dataclass

from scantling.errors import ScantlingInputError, nearest
from scantling.numbers.parallel.shards import Held
from scantling.numbers.training import Recipe
from scantling.units import DTYPE_BYTES


@dataclass(frozen=True)
class Precision:
    """Bytes of a parameter.

    Attributes:
        weights: that the products read.
        gradients: as they are summed over micro-batches and replicas.
        state: master copy and moments of AdamW.
        about: in words.
    """

    weights: int
    gradients: int
    state: int
    about: str


def _with_two_moments(recipe: Recipe, about: str) -> Precision:
    formats = recipe.formats
    weights, updated = DTYPE_BYTES[formats.weights], DTYPE_BYTES[formats.updated]
    gradients = DTYPE_BYTES["float32"] if recipe.main_gradients else weights
    return Precision(weights, gradients, 2 * updated + (updated if formats.master else 0), about)


PRECISIONS = {
    "mixed": _with_two_moments(Recipe("bf16-master"), "16-bit weights, float32 gradients, master copy and two moments"),
    "mixed-16": _with_two_moments(
        Recipe("bf16-master", main_gradients=False), "16-bit weights and gradients, float32 master copy and two moments"
    ),
    "bf16": _with_two_moments(Recipe("bf16"), "everything in 16 bits, no master copy"),
    "fp32": _with_two_moments(Recipe("fp32"), "everything in float32"),
}
"""What a parameter takes, by name."""


def precision(name: str) -> Precision:
    """A precision by name.

    Raises:
        ScantlingInputError: no such precision.
    """
    if name not in PRECISIONS:
        raise ScantlingInputError(
            f"no precision {name!r}; use one of {', '.join(PRECISIONS)}{nearest(name, PRECISIONS)}"
        )
    return PRECISIONS[name]


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank.

    Attributes:
        weights, gradients, optimizer: of its shard.
        activations: kept for the backward by all passes under way.
        work: gathered weights, the block that is computed again, logits.
        reserved: of the device.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    work: int
    reserved: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.work + self.reserved


def per_rank(held: Held, ranks: tuple[int, int], shared: bool, size: int) -> int:
    """Bytes of parameters of `size` bytes each.

    Args:
        ranks: that have the same dense weights, and the same experts.
        shared: whether they share them.
    """
    if not shared:
        return size * held.total
    return size * (-(-held.dense // ranks[0]) + -(-held.experts // ranks[1]))


def under_way(rank: int, pipeline: int, virtual: int, micro_batches: int) -> float:
    """Micro-batches whose activations a pipeline rank keeps at once, in units of all of its blocks.

    1F1B keeps p - r; interleaved, a rank starts 2 (p - r - 1) + (v - 1) p + 1 chunks before its first backward, which
    on the first rank is 1 + (p - 1) / (p v) times p (arXiv:2205.05198, section 4.2.3).
    """
    if virtual == 1:
        return min(micro_batches, pipeline - rank)
    chunks = 2 * (pipeline - rank - 1) + (virtual - 1) * pipeline + 1
    return min(micro_batches * virtual, chunks) / virtual
