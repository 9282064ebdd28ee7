"""Optimisers: which weight belongs to which group, who updates it, and in which precision.

A weight decays if it multiplies: matrices and tables, by default also the token table; gains of norms, shifts, sinks
and what else has one number per channel do not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from scantling.errors import ScantlingInputError
from scantling.parts.leaf import Embedding, Linear
from scantling.parts.part import Part, join
from scantling.train.eight_bits import AdamW8

KINDS = ("adamw", "adamw-8bit", "muon", "sgd")


@dataclass(frozen=True)
class Recipe:
    """An optimiser and its constants.

    Attributes:
        kind: ``adamw`` (arXiv:1711.05101, algorithm 2); ``adamw-8bit``, the same with moments in 8 bits; ``muon``:
            matrices of the blocks by Muon (Newton-Schulz, sizes matched to AdamW's by arXiv:2502.16982, eq. 4), all
            others by AdamW; ``sgd`` with Nesterov momentum.
        lr: the peak rate, of every group.
        momentum: of Muon and SGD.
        decay_embeddings: whether tables decay like matrices.
    """

    kind: str = "adamw"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    momentum: float = 0.95
    decay_embeddings: bool = True


@dataclass(frozen=True)
class Group:
    """Weights that are treated alike.

    Attributes:
        name: ``decayed``, ``plain`` or ``muon``.
        weights: by their names in the state dict, each once.
    """

    name: str
    weights: dict[str, Tensor]
    weight_decay: float

    @property
    def numel(self) -> int:
        """Values in all."""
        return sum(weight.numel() for weight in self.weights.values())


def groups(parts: Part, weights: Mapping[str, Tensor], recipe: Recipe) -> list[Group]:
    """The weights that are trained, by group; every one in exactly one.

    Args:
        weights: those that take a gradient, by their names in the state dict. A name that the part tree does not know
            (an adapter's) goes by its number of dimensions.

    Raises:
        ScantlingInputError: nothing is trained.
    """
    if not weights:
        raise ScantlingInputError("no weight takes a gradient: nothing is trained")
    owners = {join(path, name): (part, role) for path, part, role in parts.walk() for name in part.weights()}
    sorted_: dict[str, dict[str, Tensor]] = {"muon": {}, "decayed": {}, "plain": {}}
    for name, weight in weights.items():
        part, role = owners.get(name, (None, ""))
        sorted_[_kind(name, weight, part, role, recipe)][name] = weight
    found = [
        Group(name, some, 0.0 if name == "plain" else recipe.weight_decay) for name, some in sorted_.items() if some
    ]
    assert sum(len(group.weights) for group in found) == len(weights)
    return found


def _kind(name: str, weight: Tensor, part: Part | None, role: str, recipe: Recipe) -> str:
    if weight.dim() < 2 or name.endswith("bias") or role == "norm":
        return "plain"
    if isinstance(part, Embedding):
        return "decayed" if recipe.decay_embeddings else "plain"
    if recipe.kind == "muon" and isinstance(part, Linear) and ".blocks." in f".{name}" and role != "router":
        return "muon"
    return "decayed"


class Optimizers:
    """One or two optimisers behind one face: a step, a rate, a state by the weights' names.

    Args:
        masters: weights are kept twice, in float32 where they are updated and in 16 bits where they compute
            (arXiv:1710.03740, section 3.1); gradients of all micro-batches are then summed in float32.
    """

    def __init__(self, found: list[Group], recipe: Recipe, masters: bool = False) -> None:
        if recipe.kind not in KINDS:
            raise ScantlingInputError(f"no optimizer {recipe.kind!r} to train with: use one of {', '.join(KINDS)}")
        self.groups, self.recipe = found, recipe
        self.weights = {name: weight for group in found for name, weight in group.weights.items()}
        self.masters = {name: _wide(weight) for name, weight in self.weights.items()} if masters else {}
        trained = self.masters or self.weights
        self._all: list[torch.optim.Optimizer] = []
        rest = [self._group(group, trained) for group in found if group.name != "muon"]
        if muon := [self._group(group, trained) for group in found if group.name == "muon"]:
            sized = "match_rms_adamw"
            self._all.append(torch.optim.Muon(muon, recipe.lr, momentum=recipe.momentum, adjust_lr_fn=sized))
        if rest and recipe.kind == "sgd":
            self._all.append(
                torch.optim.SGD(rest, lr=recipe.lr, momentum=recipe.momentum, nesterov=recipe.momentum > 0)
            )
        elif rest and recipe.kind == "adamw-8bit":
            self._all.append(AdamW8(rest, recipe.lr, recipe.betas, recipe.eps))
        elif rest:
            self._all.append(
                torch.optim.AdamW(rest, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps, fused=_fused(trained))
            )

    @staticmethod
    def _group(group: Group, trained: Mapping[str, Tensor]) -> dict[str, Any]:
        return {"params": [trained[name] for name in group.weights], "weight_decay": group.weight_decay}

    def gather(self) -> None:
        """Take the gradients of one micro-batch over to the float32 copies, where there are any."""
        for name, master in self.masters.items():
            weight = self.weights[name]
            if weight.grad is None:
                continue
            master.grad = weight.grad.float() if master.grad is None else master.grad.add_(weight.grad)
            weight.grad = None

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The gradients that the next step will use, by name."""
        for name, weight in (self.masters or self.weights).items():
            if weight.grad is not None:
                yield name, weight.grad

    def step(self, factor: float) -> None:
        """Update at `factor` times the peak rate; gradients are gone afterwards."""
        for optimizer in self._all:
            for group in optimizer.param_groups:
                group["lr"] = self.recipe.lr * factor
            optimizer.step()
        self.clear()
        with torch.no_grad():
            for name, master in self.masters.items():
                self.weights[name].copy_(master)

    def not_finite(self) -> str | None:
        """The entry of the state, or the float32 copy, that holds a value that is not finite; None where none does."""
        names, values = [], []
        for key, value in self.state().items():
            if value.dim() and value.is_floating_point():
                names.append(key)
                values.append(value)
        if not values:
            return None
        # A sum over each is finite only if all its values are, or overflows, which is then looked at closely.
        sums = torch.stack([value.float().sum() if value.dtype != torch.float32 else value.sum() for value in values])
        if bool(sums.isfinite().all()):
            return None
        return next((n for n, v in zip(names, values, strict=True) if not bool(v.isfinite().all())), None)

    def clear(self) -> None:
        """Forget the gradients."""
        for weight in (*self.weights.values(), *self.masters.values()):
            weight.grad = None

    def state(self) -> dict[str, Tensor]:
        """Everything but the weights, by ``weight/entry``: moments, steps, and float32 copies as ``weight/master``."""
        trained = self.masters or self.weights
        found = {f"{name}/master": master.detach() for name, master in self.masters.items()}
        for optimizer in self._all:
            for name, weight in trained.items():
                entries: Mapping[str, Any] = optimizer.state.get(weight, {})
                kept = {key: torch.as_tensor(value).detach() for key, value in entries.items() if value is not None}
                found |= {f"{name}/{key}": value for key, value in kept.items()}
        return found

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Put a state back.

        Raises:
            ScantlingInputError: it is that of another optimiser: entries are missing, unknown or of another shape.
        """
        trained = self.masters or self.weights
        if unknown := [key for key in state if key.rpartition("/")[0] not in trained]:
            raise ScantlingInputError(f"the optimizer's state has {unknown[0]!r}, a weight that is not trained now")
        by_weight: dict[str, dict[str, Tensor]] = {}
        for key, value in state.items():
            name, _, entry = key.rpartition("/")
            by_weight.setdefault(name, {})[entry] = value
        if bool(self.masters) != any("master" in entries for entries in by_weight.values()):
            raise ScantlingInputError(
                "the optimizer's state is of another precision: it has float32 copies of the weights, or lacks them"
            )
        names = {id(weight): name for name, weight in trained.items()}
        for optimizer in self._all:
            for group in optimizer.param_groups:
                for weight in group["params"]:
                    name = names[id(weight)]
                    self._restore(optimizer, name, weight, by_weight.get(name, {}))

    def _restore(
        self, optimizer: torch.optim.Optimizer, name: str, weight: Tensor, entries: Mapping[str, Tensor]
    ) -> None:
        kept = {key: value.to(weight.device) for key, value in entries.items() if key != "master"}
        wanted = _entries(optimizer, weight)
        if kept and set(kept) != set(wanted):
            raise ScantlingInputError(
                f"the optimizer's state of {name!r} has {', '.join(kept)} and this optimizer keeps {', '.join(wanted)}"
            )
        for entry, value in entries.items():
            shape = wanted.get(entry, tuple(weight.shape))
            if value.dim() and value.shape != shape:
                raise ScantlingInputError(
                    f"{entry} of {name!r} has shape {list(value.shape)} in the optimizer's state and "
                    f"{list(shape)} is needed"
                )
        if "master" in entries:
            with torch.no_grad():
                weight.copy_(entries["master"])
        if kept:
            optimizer.state[weight] = {key: value.clone() for key, value in kept.items()}
            if isinstance(optimizer, AdamW8):
                optimizer.state[weight]["step"] = int(kept["step"])


def _entries(optimizer: torch.optim.Optimizer, weight: Tensor) -> dict[str, tuple[int, ...]]:
    """What an optimiser keeps of a weight, with its shape."""
    if isinstance(optimizer, AdamW8):
        return optimizer.entries(weight)
    shape = tuple(weight.shape)
    if isinstance(optimizer, torch.optim.AdamW):
        return {"step": (), "exp_avg": shape, "exp_avg_sq": shape}
    return {"momentum_buffer": shape}


def _wide(weight: Tensor) -> Tensor:
    return nn.Parameter(weight.detach().float().clone())


def _fused(trained: Mapping[str, Tensor]) -> bool:
    return all(weight.device.type in ("cpu", "cuda", "mps") for weight in trained.values())


def norms_by_block(gradients: Mapping[str, Tensor]) -> dict[str, float]:
    """The Euclidean norm of the gradient of each block, and of what stands outside blocks by its first name.

    Where a gradient is not finite its norm is not either, which is how the block that went first is found.
    """
    squares: dict[str, list[Tensor]] = {}
    for name, gradient in gradients.items():
        squares.setdefault(block_of(name), []).append(gradient)
    return {block: float(torch.nn.utils.get_total_norm(some)) for block, some in squares.items()}


def block_of(name: str) -> str:
    """``decoder.blocks.3.attn.q.weight`` is of ``decoder.blocks.3``, ``embed.weight`` of ``embed``.

    >>> block_of("decoder.blocks.3.attn.q.weight")
    'decoder.blocks.3'
    """
    pieces = name.split(".")
    if "blocks" in pieces:
        return ".".join(pieces[: pieces.index("blocks") + 2])
    return ".".join(pieces[:-1]) or name


def total_norm(norms: Mapping[str, float]) -> float:
    """The norm over all blocks: the root of the sum of squares."""
    return math.sqrt(math.fsum(norm * norm for norm in norms.values()))


def clip(gradients: Mapping[str, Tensor], norm: float, limit: float) -> None:
    """Scale gradients in place so that their joint norm is at most `limit` (arXiv:1211.5063, algorithm 1)."""
    if norm > limit:
        for gradient in gradients.values():
            gradient.mul_(limit / norm)
