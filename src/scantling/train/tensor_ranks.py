"""Tensor parallelism from the part tree: what is divided among ranks, what cannot be, and the net made ready for it.

Queries, keys, values, gate and up by their outputs, o and down by their inputs (Shoeybi et al., arXiv:1909.08053,
section 3), tables and the head by tokens. `numbers.parallel` divides on paper by the same list.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from scantling.errors import ScantlingInputError
from scantling.numbers.parallel.shards import COLUMN, divided
from scantling.parts.attention import Attention
from scantling.parts.cross import CrossAttention
from scantling.parts.heads import Head
from scantling.parts.latent import LatentAttention
from scantling.parts.leaf import Embedding, GroupedLinear, HeadNorm, Linear
from scantling.parts.mlp import MLP, GatedMLP
from scantling.parts.part import Part, join
from scantling.parts.position import ALiBi
from scantling.parts.relative import RelativeBias
from scantling.parts.transformer import Transformer

_WHOLE: dict[type[Part], str] = {
    LatentAttention: "latent attention has one compressed key for all heads",
    GroupedLinear: "experts are divided by other means",
    HeadNorm: "its gains are by head",
}
"""Parts that stay whole, and why."""


def check(parts: Transformer, tensor: int) -> None:
    """Whether every block of a model can be divided among so many ranks.

    Raises:
        ScantlingInputError: one cannot; the sentence names the place.
    """
    if tensor == 1:
        return
    for path, part, _ in parts.walk():
        if (why := _refusal(part, tensor)) is not None:
            raise ScantlingInputError(
                f"parallel.tensor is {tensor}, and {path or 'the model'} cannot be divided: {why}; use sharded ranks"
            )


def _refusal(part: Part, tensor: int) -> str | None:
    if type(part) in _WHOLE:
        return _WHOLE[type(part)]
    if isinstance(part, Attention | CrossAttention):
        for name, heads in (("heads", part.n_heads), ("KV heads", part.n_kv_heads)):
            if heads % tensor:
                return f"{heads} {name} do not divide among {tensor} tensor ranks"
        if part.dropout:
            return "dropout of attention weights would drop the same ones in every rank's heads"
    if isinstance(part, Attention):
        if part.sinks:
            return "its sinks are by head"
        if isinstance(part.position, ALiBi | RelativeBias):
            return "its shift of the scores is by head"
        if part.q_norm is not None and getattr(part.q_norm, "d", part.d_head) != part.d_head:
            return "its norm of queries and keys is over all heads"
    if isinstance(part, MLP | GatedMLP) and part.d_ff % tensor:
        return f"d_ff {part.d_ff} does not divide among {tensor} tensor ranks"
    return None


def dimensions(parts: Transformer, tensor: int) -> dict[str, int]:
    """The dimension that is divided, by the weight's name; a weight that is not listed is whole in every rank."""
    found: dict[str, int] = {}
    for path, (how, leaf) in _leaves(parts, tensor).items():
        found[join(path, "weight")] = 0 if how == COLUMN else 1
        if isinstance(leaf, Linear) and leaf.bias and how == COLUMN:
            found[join(path, "bias")] = 0
    return found


def partial(parts: Transformer, tensor: int) -> frozenset[str]:
    """Weights that are whole in every rank and of whose gradient each rank has a part: those by head, used by all."""
    if tensor == 1:
        return frozenset()
    found = {
        join(join(path, name), weight)
        for path, part, _ in parts.walk()
        if isinstance(part, Attention)
        for name in ("q_norm", "k_norm")
        if name in part.children()
        for weight in part.children()[name].weights()
    }
    if isinstance(parts.head, Head) and _splits(parts, tensor):
        found |= {join("head", name) for name in parts.head.weights()}
    return frozenset(found)


def _splits(parts: Transformer, tensor: int) -> bool:
    """Whether tables and the head's matrix divide by tokens into equal pieces, none of them padding alone."""
    sizes = {part.rows for _, part, _ in parts.walk() if isinstance(part, Head)}
    sizes |= {parts.embed.rows} | ({parts.target_embed.rows} if parts.target_embed else set())
    tokens = parts.head.vocab_size if isinstance(parts.head, Head) else parts.embed.rows
    return all(rows % tensor == 0 and rows // tensor * (tensor - 1) < tokens for rows in sizes)


def _leaves(parts: Transformer, tensor: int) -> dict[str, tuple[str, Part]]:
    """The maps and tables that are divided, by path, and how."""
    if tensor == 1:
        return {}
    found: dict[str, tuple[str, Part]] = {}
    for path, part, _ in parts.walk():
        if isinstance(part, Transformer | Head) and not _splits(parts, tensor):
            continue
        for name, (how, _) in divided(part).items():
            leaf = part.children().get(name)
            if isinstance(leaf, Linear | Embedding):
                found[join(path, name)] = (how, leaf)
    return found


def divide(net: nn.Module, parts: Transformer, tensor: int, mesh: Any) -> None:
    """Replace the divided weights by this rank's pieces (DTensors on `mesh`), and let parts see their own heads only.

    Activations between the divided maps are this rank's, everything else is the same in all ranks of the group.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    # What several maps read becomes a DTensor once, so that its gradient is summed over ranks once.
    shared = (Replicate(), None)
    plan: dict[str, Any] = {
        path: PrepareModuleInput(input_layouts=shared, desired_input_layouts=shared)
        for path, part, _ in parts.walk()
        if isinstance(part, Attention | CrossAttention | MLP | GatedMLP)
    }
    for path, (how, leaf) in _leaves(parts, tensor).items():
        if isinstance(leaf, Embedding):
            # Torch calls a table row-wise whose rows are divided.
            plan[path] = RowwiseParallel(input_layouts=Replicate())
        elif path == join("head", "matrix"):
            plan[path] = ColwiseParallel(output_layouts=Replicate())
        else:
            plan[path] = ColwiseParallel() if how == COLUMN else RowwiseParallel()
    parallelize_module(net, mesh, plan, src_data_rank=None)
    for module in net.modules():
        part = getattr(module, "part", None)
        if isinstance(part, Attention | CrossAttention):
            module.part = replace(part, n_heads=part.n_heads // tensor, n_kv_heads=part.n_kv_heads // tensor)  # type: ignore[assignment]
