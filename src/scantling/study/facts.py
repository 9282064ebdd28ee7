"""What there is to say about one card: its choices, its sizes, and its numbers at one length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from scantling.cards.schema import Card, MoE, MultiHead, RoPE
from scantling.numbers.cost import ASSUMED_MFU
from scantling.numbers.count import count
from scantling.numbers.flops import flops, half_at
from scantling.numbers.hardware import device
from scantling.numbers.memory import memory
from scantling.numbers.phases import decode_step
from scantling.numbers.roofline import roofline
from scantling.numbers.training import Recipe, training_memory
from scantling.parts.attention import Attention
from scantling.parts.cross import CrossAttention
from scantling.parts.latent import LatentAttention
from scantling.parts.mlp import MLP, GatedMLP
from scantling.parts.moe import Router
from scantling.parts.part import Part, Workload
from scantling.parts.transformer import Transformer
from scantling.units import DTYPE_BYTES
from scantling.visibility import Visibility

Value = int | float | str | bool | None
DTYPES = ("float32", "bfloat16", "int8")
"""In which the bytes of the weights are given."""
CACHE_DTYPE = "bfloat16"
RECIPE = Recipe("bf16-master")
DEVICE = "h100"
TRAINED = 10**12


@dataclass(frozen=True)
class Fact:
    """One line about a card.

    Attributes:
        section: choices, sizes, parameters, FLOPs, memory or cost.
        what: with its unit and convention.
        value: a number, a word, or None where the card has no such thing.
    """

    section: str
    what: str
    value: Value


def facts(card: Card, model: Transformer, w: Workload) -> list[Fact]:
    """Everything about `card`, assembled as `model`, with the numbers of a prefill `w` and of the step that ends it.

    Raises:
        ScantlingInputError: the workload is none that the model can do.
    """
    sections = {
        "choices": _choices(card, model),
        "sizes": _sizes(card, model),
        "parameters": _parameters(model),
        "FLOPs": _flops(model, w),
        "memory": _memory(model, w),
        "cost": _cost(model, w),
    }
    return [Fact(section, what, value) for section, rows in sections.items() for what, value in rows]


def _choices(card: Card, model: Transformer) -> Iterator[tuple[str, Value]]:
    attention, position = card.attention, card.position
    yield "family", card.family
    yield "attention", str(attention.__struct_config__.tag)
    yield "reach", reach(model)
    if isinstance(attention, MultiHead):
        yield "biases of q, k, v, o", " ".join(attention.bias) or "none"
        norm = attention.qk_norm
        yield "QK-norm", "none" if norm is None else f"{norm.kind} over {norm.over}"
        yield "score cap", attention.softcap
    kind = str(position.__struct_config__.tag)
    yield "position", f"{kind}, theta {position.theta:g}" if isinstance(position, RoPE) else kind
    if isinstance(position, RoPE):
        yield "turned channels of a head", position.d_rotary
        yield "RoPE scaling", "none" if position.scaling is None else str(position.scaling.__struct_config__.tag)
    mlp = card.mlp.expert if isinstance(card.mlp, MoE) else card.mlp
    yield "MLP", ("experts, " if isinstance(card.mlp, MoE) else "") + str(mlp.__struct_config__.tag)
    yield "activation", mlp.act
    yield "norm", str(card.norm.__struct_config__.tag)
    yield "norm at", " ".join(card.norm.at)
    yield "residual", "parallel" if card.residual.parallel else "sequential"
    yield "head", card.head.kind
    yield "tied", card.tied
    yield "stored dtype", card.dtype


def _sizes(card: Card, model: Transformer) -> Iterator[tuple[str, Value]]:
    layers = [len(stack.blocks) for stack in model.stacks.values()]
    pieces = [part for _, part, _ in model.walk()]
    attentions = [p for p in pieces if isinstance(p, Attention | LatentAttention)]
    mlps = [p for p in pieces if isinstance(p, MLP | GatedMLP)]
    yield "layers", layers[0] if len(layers) == 1 else " + ".join(map(str, layers))
    yield "d_model", card.d_model
    yield "d_model / layers", card.d_model / sum(layers) if sum(layers) else None
    yield "heads", _each(a.n_heads for a in attentions)
    yield "KV heads", _each(a.n_kv_heads for a in attentions if isinstance(a, Attention))
    yield "head size", _each(a.d_head for a in attentions)
    if cross := [p for p in pieces if isinstance(p, CrossAttention)]:
        yield "heads of cross-attention", _each(p.n_heads for p in cross)
    yield "d_ff", _each(m.d_ff for m in mlps)
    yield "d_ff / d_model", _each(m.d_ff / card.d_model for m in mlps)
    if routers := [p for p in pieces if isinstance(p, Router)]:
        yield "experts", _each(r.n_experts for r in routers)
        yield "experts per token", _each(r.top_k for r in routers)
    yield "vocabulary", card.vocab_size
    yield "rows of the token table", model.embed.rows
    yield "context", card.context


def _each(values: Iterable[int | float]) -> Value:
    """The value that all layers have, or each different one, in the order of the layers."""
    different = list(dict.fromkeys(values))
    if len(different) <= 1:
        return different[0] if different else None
    return ", ".join(f"{value:,}" if isinstance(value, int) else f"{value:.4g}" for value in different)


def reach(model: Transformer) -> str:
    """Who reads whom, and in how many layers where they differ: ``5 x window 512, 1 x causal``."""
    seen = Counter(_visible(p.visibility) for p in _attentions(model))
    if not seen:
        return "no attention"
    return next(iter(seen)) if len(seen) == 1 else ", ".join(f"{n} x {what}" for what, n in seen.items())


def _attentions(model: Part) -> Iterator[Attention | LatentAttention]:
    yield from (part for _, part, _ in model.walk() if isinstance(part, Attention | LatentAttention))


def _visible(v: Visibility) -> str:
    near = {"window": v.window, "chunk": v.chunk, "stride": v.stride, "last of a stride": v.last}
    said = [f"{name} {size:,}" for name, size in near.items() if size is not None]
    return " ".join([*(["causal"] if v.causal else ["both ways"]), *said, *(["prefix"] if v.prefix else [])])


def _parameters(model: Transformer) -> Iterator[tuple[str, Value]]:
    counted = count(model)
    yield "total", counted.total
    yield "active per token", counted.active
    yield "stored besides, trained by no gradient", counted.buffers
    for role, n in sorted(counted.by_part.items(), key=lambda item: _ROLES.index(item[0])):
        yield role.replace("_", "-"), n
        yield f"{role.replace('_', '-')}, share", n / counted.total


_ROLES = (
    "embedding",
    "types",
    "position",
    "attention",
    "cross_attention",
    "mlp",
    "experts",
    "router",
    "norm",
    "head",
    "other",
)


def _flops(model: Transformer, w: Workload) -> Iterator[tuple[str, Value]]:
    n, f = w.batch * w.tokens, flops(model, w)
    yield "prefill, forward, full square", f.forward
    yield "prefill per token", _per(f.forward, n)
    yield "prefill per token, only visible pairs", _per(f.forward_visible, n)
    yield "training per token", _per(f.training, n)
    step = None if model.decoder is None else flops(model, decode_step(w)).forward
    yield "decode, one step at that length", step
    yield "attention share of the blocks", f.attention_share
    yield "attention share of all", f.attention_share_of_total
    yield "length where attention is half of the blocks", half_at(model, w.source)["full"]


def _per(total: int, n: int) -> int | float:
    return total // n if total % n == 0 else total / n


def _memory(model: Transformer, w: Workload) -> Iterator[tuple[str, Value]]:
    kept = memory(model, w, "int8", CACHE_DTYPE)
    for dtype in DTYPES:
        yield f"weights, {dtype}, bytes", kept.weights * DTYPE_BYTES[dtype] // DTYPE_BYTES["int8"]
    yield f"KV cache per token, {CACHE_DTYPE}, bytes", kept.kv_per_token
    yield f"KV cache at that length, {CACHE_DTYPE}, bytes", kept.kv
    step = training_memory(model, w, RECIPE)
    yield f"training states, {RECIPE.precision}, {RECIPE.optimizer}, bytes", step.states
    yield "kept for the backward at that length, bfloat16, fused kernel, bytes", step.activations


def _cost(model: Transformer, w: Workload) -> Iterator[tuple[str, Value]]:
    found, chip = flops(model, w).training, device(DEVICE)
    spent = found * TRAINED // (w.batch * w.tokens)
    hours = spent / (ASSUMED_MFU * chip.peak("bf16")) / 3600
    yield "training on 10^12 tokens in such rows, FLOPs", spent
    yield f"device-hours of that on {DEVICE} at {100 * ASSUMED_MFU:g} % of its dense peak", round(hours)
    bounds = roofline(model, chip, w).passes
    yield (
        f"decode at that length on one {DEVICE}, at most tokens/s",
        (round(bounds["decode"].tokens_per_second) if "decode" in bounds else None),
    )
