"""What optimisers keep between two updates, in bytes, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from scantling.errors import ScantlingInputError, nearest
from scantling.parts.heads import TextVector
from scantling.parts.leaf import Linear
from scantling.parts.part import Part, Shape, join
from scantling.parts.transformer import Transformer
from scantling.units import DTYPE_BYTES

OPTIMIZERS = ("adamw", "adamw-8bit", "muon", "sgd")
"""``adamw`` and ``sgd`` with momentum as torch.optim has them; ``muon`` as torch.optim.Muon for the matrices of blocks
and AdamW for the rest; ``adamw-8bit`` as bitsandbytes 0.50 has it."""
BLOCK, SMALLEST = 256, 4096
"""Of adamw-8bit: values that share a scale, and the tensors that stay float32 below this size (Dettmers et al.,
arXiv:2110.02861, section 2; bitsandbytes/optim/optimizer.py, `Optimizer2State.init_state`)."""
AT_ONCE = 2**20
"""Values of a tensor whose 8-bit moments are wide at one time."""
_STEP = 4
"""Bytes of AdamW's count of updates, which each weight has for itself: a float32."""


@dataclass(frozen=True)
class Trained:
    """A weight that gets gradients.

    Attributes:
        matrix: of a block, two dimensions: what Muon takes.
    """

    name: str
    shape: Shape
    matrix: bool

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def trained(model: Transformer) -> list[Trained]:
    """The weights that training moves: all but computed ones, and those whose result nobody reads."""
    idle = "head.transform." if isinstance(model.head, TextVector) and model.head.spare else None
    return [
        weight
        for path, part, role in model.walk()
        if idle is None or not f"{path}.".startswith(idle)
        for weight in _own(path, part, role)
    ]


def _own(path: str, part: Part, role: str) -> Iterator[Trained]:
    if part.computed:
        return
    inside = ".blocks." in f".{path}" and isinstance(part, Linear) and role != "router"
    for name, shape in part.weights().items():
        yield Trained(join(path, name), shape, inside and len(shape) == 2)


def states(weights: list[Trained], optimizer: str, dtype: str) -> dict[str, int]:
    """Bytes of what the optimiser keeps, by item.

    Args:
        dtype: of the weights that it updates, which its moments have too.

    Raises:
        ScantlingInputError: no such optimiser.
    """
    if optimizer not in OPTIMIZERS:
        raise ScantlingInputError(
            f"no optimizer {optimizer!r}{nearest(optimizer, OPTIMIZERS)}; known: {', '.join(OPTIMIZERS)}"
        )
    if optimizer == "adamw-8bit":
        return _eight_bits(weights)
    size = DTYPE_BYTES[dtype]
    every = sum(weight.numel for weight in weights)
    if optimizer == "sgd":
        return {f"momentum, {dtype}": size * every}
    muon = [weight for weight in weights if weight.matrix] if optimizer == "muon" else []
    mixed = sum(weight.numel for weight in muon)
    found = {f"momentum of the blocks' matrices, {dtype}": size * mixed} if optimizer == "muon" else {}
    return found | {
        f"first moments, {dtype}": size * (every - mixed),
        f"second moments, {dtype}": size * (every - mixed),
        "counts of updates": _STEP * (len(weights) - len(muon)),
    }


def _eight_bits(weights: list[Trained]) -> dict[str, int]:
    small = sum(weight.numel for weight in weights if weight.numel < SMALLEST)
    large = [weight.numel for weight in weights if weight.numel >= SMALLEST]
    each = DTYPE_BYTES["float32"]
    return {
        "first moments, 8 bits": sum(large),
        "second moments, 8 bits": sum(large),
        f"scales, float32, one per {BLOCK}": 2 * each * sum(-(-numel // BLOCK) for numel in large),
        "what the 256 codes stand for": 2 * 256 * each if large else 0,
        f"moments of tensors below {SMALLEST}, float32": 2 * each * small,
    }


def working(weights: list[Trained], optimizer: str, dtype: str) -> int:
    """Bytes that an update holds for a moment, beyond the states: of the largest weight, one after another.

    The fused AdamW holds nothing; SGD with Nesterov's momentum makes a corrected gradient; Muon's Newton-Schulz keeps
    the blended gradient and, in bfloat16, two matrices of the weight's size and two Gram matrices of its short side.
    8-bit moments are wide for a piece of a tensor at a time: both, and three more of their size.
    """
    if optimizer == "adamw-8bit":
        largest = max((weight.numel for weight in weights if weight.numel >= SMALLEST), default=0)
        return 5 * DTYPE_BYTES["float32"] * min(largest, AT_ONCE)
    if optimizer == "sgd":
        return DTYPE_BYTES[dtype] * max((weight.numel for weight in weights), default=0)
    if optimizer != "muon":
        return 0
    narrow = DTYPE_BYTES["bfloat16"]
    return max(
        (
            (DTYPE_BYTES[dtype] + 2 * narrow) * weight.numel + 2 * narrow * min(weight.shape) ** 2
            for weight in weights
            if weight.matrix
        ),
        default=0,
    )
