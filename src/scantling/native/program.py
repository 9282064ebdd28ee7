"""Which part trees the compiled pass can run, and what it is told of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from scantling.parts.attention import Attention
from scantling.parts.block import Block
from scantling.parts.heads import Head
from scantling.parts.leaf import RMSNorm
from scantling.parts.mlp import MLP, GatedMLP
from scantling.parts.part import Part
from scantling.parts.position import NoPosition, Position
from scantling.parts.rope import RoPE
from scantling.parts.transformer import Transformer

ACTS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4, "quick_gelu": 5}
LANES, WIDEST_HEAD = 16, 256


@dataclass(frozen=True)
class Layer:
    """One block: its path, attention and MLP."""

    path: str
    attention: Attention
    mlp: MLP | GatedMLP


@dataclass(frozen=True)
class Outline:
    """A part tree that the compiled pass can run."""

    model: Transformer
    head: Head
    layers: tuple[Layer, ...]

    @property
    def attention(self) -> Attention:
        """Of the first layer; sizes are those of all."""
        return self.layers[0].attention

    @property
    def turned(self) -> int:
        """Channels of each head that are turned, in the layers that turn any."""
        return max(layer.attention.position.turned for layer in self.layers)

    @property
    def mlp(self) -> MLP | GatedMLP:
        """Of the first layer; sizes are those of all."""
        return self.layers[0].mlp


def outline(model: Transformer) -> Outline | str:
    """The tree as layers, or one sentence that says which part the compiled pass does not know."""
    return next(_oddities(model), None) or _outlined(model)


def _outlined(model: Transformer) -> Outline:
    assert model.decoder is not None
    assert isinstance(model.head, Head)
    layers = []
    for i, block in enumerate(model.decoder.blocks):
        parts = block.children()
        attention, mlp = parts["attn"], parts["mlp"]
        assert isinstance(attention, Attention)
        assert isinstance(mlp, MLP | GatedMLP)
        layers.append(Layer(f"decoder.blocks.{i}", attention, mlp))
    return Outline(model, model.head, tuple(layers))


def _oddities(model: Transformer) -> Iterator[str]:
    """What stands in the way, in the order of the tree."""
    stack = model.decoder
    if stack is None or model.two_stacks or not stack.blocks:
        yield "it runs decoders that stand alone and have a block"
        return
    if model.widen or stack.embed_norm or stack.types or stack.widen or dict(stack.position.parts()):
        yield "it runs stacks that begin with the token table alone"
    if not isinstance(stack.position, NoPosition | RoPE):
        yield f"it turns queries and keys, and this card adds {type(stack.position).__name__}"
    if not _plain_norm(stack.final_norm):
        yield "it ends in an RMSNorm"
    if not isinstance(model.head, Head):
        yield "it scores a vocabulary"
        return
    head = model.head
    if head.transform or head.bias or head.width != head.d_model:
        yield "its head is one matrix without a shift"
    if model.table.d_model % LANES:
        yield f"d_model is a multiple of {LANES}"
    for block in stack.blocks:
        yield from _odd_block(block)
    sizes = {_sizes(block) for block in stack.blocks if isinstance(block, Block)}
    turned = {layer.turned for layer in map(_position, stack.blocks)} - {0}
    if len(sizes) > 1 or len(turned) > 1:
        yield "all layers have heads and MLPs of one size"


def _odd_block(block: Part) -> Iterator[str]:
    if not isinstance(block, Block) or block.from_norm or [s.name for s in block.sublayers] != ["attn", "mlp"]:
        yield "its blocks are attention and MLP, one after the other"
        return
    if any([place for place, _ in sub.norms] != ["in"] or not _plain_norm(sub.norms[0][1]) for sub in block.sublayers):
        yield "each sublayer has one RMSNorm before it"
    attention, mlp = (sub.part for sub in block.sublayers)
    if not isinstance(attention, Attention):
        yield f"it has no {type(attention).__name__}"
        return
    yield from _odd_attention(attention)
    if not isinstance(mlp, MLP | GatedMLP):
        yield f"it has no {type(mlp).__name__}"
    elif mlp.act not in ACTS or getattr(mlp, "clamp", None):
        yield f"its MLP has one of the activations {', '.join(ACTS)}, without a clamp"
    elif mlp.d_ff % LANES:
        yield f"d_ff is a multiple of {LANES}"


def _odd_attention(attention: Attention) -> Iterator[str]:
    seen, position = attention.visibility, attention.position
    if not seen.causal or seen.chunk or seen.stride or seen.prefix:
        yield "attention is causal, with or without a window"
    if not isinstance(position, NoPosition | RoPE):
        yield f"it turns queries and keys, and this card has {type(position).__name__}"
    elif position.renewed_past is not None:
        yield "the angles do not depend on the length"
    if attention.sinks or attention.clip:
        yield "there are no attention sinks and no clipping"
    if attention.d_head % LANES or attention.d_head > WIDEST_HEAD:
        yield f"d_head is a multiple of {LANES} up to {WIDEST_HEAD}"
    norms = [norm for norm in (attention.q_norm, attention.k_norm) if norm is not None]
    if any(not _plain_norm(norm) or getattr(norm, "d", None) != attention.d_head for norm in norms):
        yield "queries and keys are normed head by head with one RMSNorm"


def _position(block: Part) -> Position:
    attention = block.children().get("attn")
    return attention.position if isinstance(attention, Attention) else NoPosition()


def _plain_norm(norm: Any) -> bool:
    return isinstance(norm, RMSNorm)


def _sizes(block: Block) -> tuple[Any, ...]:
    attention, mlp = (sub.part for sub in block.sublayers)
    qk_eps = getattr(getattr(attention, "q_norm", None), "eps", None)
    eps = tuple(norm.eps for sub in block.sublayers for _, norm in sub.norms)
    shapes = [getattr(attention, name, None) for name in ("n_heads", "n_kv_heads", "d_head", "scale", "softcap")]
    return (*shapes, qk_eps, eps, type(mlp), getattr(mlp, "d_ff", None), getattr(mlp, "act", None))
