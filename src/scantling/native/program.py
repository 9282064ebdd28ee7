"""Which part trees the compiled pass can run, and what it is told of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from scantling.native.tiles import ROWS, padded
from scantling.parts.attention import Attention
from scantling.parts.block import Block, ParallelBlock, Sublayer
from scantling.parts.heads import Head
from scantling.parts.leaf import HeadNorm, LayerNorm, RMSNorm
from scantling.parts.mlp import MLP, GatedMLP
from scantling.parts.moe import MoE
from scantling.parts.part import Part
from scantling.parts.position import ALiBi, Learned, NoPosition
from scantling.parts.rope import Dynamic, RoPE
from scantling.parts.stack import Stack
from scantling.parts.transformer import Transformer

ACTS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4, "quick_gelu": 5}
SCORINGS = {"softmax": 0, "sigmoid": 1, "top_softmax": 2}
WIDEST_HEAD = 256
PLACES = ("in", "res", "out")


@dataclass(frozen=True)
class Layer:
    """One block.

    Attributes:
        mlp: its MLP, or that of every expert.
        experts: the mixture that the MLP stands in, or None.
        norms: by their names in the block those of ``attn`` before it, on what it gives and after the sum, then those
            of ``mlp``; (name, None) where there is none.
    """

    path: str
    attention: Attention
    mlp: MLP | GatedMLP
    experts: MoE | None
    norms: tuple[tuple[str, RMSNorm | LayerNorm | None], ...]

    @property
    def mlp_path(self) -> str:
        """Of the MLP's matrices."""
        return f"{self.path}.mlp" if self.experts is None else f"{self.path}.mlp.experts"


@dataclass(frozen=True)
class Outline:
    """A part tree that the compiled pass can run.

    Attributes:
        parallel: both sublayers of a block read the same stream.
    """

    model: Transformer
    stack: Stack
    head: Head
    layers: tuple[Layer, ...]
    parallel: bool

    @property
    def attention(self) -> Attention:
        """Of the first layer; the number of heads and their width are those of all."""
        return self.layers[0].attention

    @property
    def d_head(self) -> int:
        """Channels that a head takes in the pass: filled up with zeros to whole registers."""
        return padded(self.attention.d_head, ROWS)

    @property
    def turned(self) -> int:
        """Channels of each head that are turned, in the layers that turn any."""
        return max(layer.attention.position.turned for layer in self.layers)


def outline(model: Transformer) -> Outline | str:
    """The tree as layers, or one sentence that says which part the compiled pass does not know."""
    return next(_oddities(model), None) or _outlined(model)


def _outlined(model: Transformer) -> Outline:
    stack, head = model.decoder, model.head
    assert stack is not None
    assert isinstance(head, Head)
    layers = tuple(_layer(f"decoder.blocks.{i}", _sublayers(block)) for i, block in enumerate(stack.blocks))
    return Outline(model, stack, head, layers, isinstance(stack.blocks[0], ParallelBlock))


def _layer(path: str, sublayers: tuple[Sublayer, ...]) -> Layer:
    attention, last = (sub.part for sub in sublayers)
    experts = last if isinstance(last, MoE) else None
    mlp = last.experts if isinstance(last, MoE) else last
    assert isinstance(attention, Attention)
    assert isinstance(mlp, MLP | GatedMLP)
    norms = [(sub.norm_name(place) or "", dict(sub.norms).get(place)) for sub in sublayers for place in PLACES]
    return Layer(path, attention, mlp, experts, tuple(norms))


def _sublayers(block: Part) -> tuple[Sublayer, ...]:
    return block.sublayers if isinstance(block, Block | ParallelBlock) else ()


def _oddities(model: Transformer) -> Iterator[str]:
    """What stands in the way, in the order of the tree."""
    stack = model.decoder
    if stack is None or model.two_stacks or not stack.blocks:
        yield "it runs decoders that stand alone and have a block"
        return
    position = stack.position
    if model.widen or stack.types or stack.widen:
        yield "its tables are as wide as the stream, and tokens are of one kind"
    if not isinstance(position, NoPosition | RoPE | ALiBi | Learned) or getattr(position, "pad_id", None) is not None:
        yield f"it has no positions of kind {type(position).__name__}"
    head = model.head
    if not isinstance(head, Head):
        yield "it scores a vocabulary"
        return
    if head.transform or head.width != head.d_model or (head.bias and head.scale):
        yield "its head is one matrix"
    for block in stack.blocks:
        yield from _odd_block(block)
    attentions = [sub.part for block in stack.blocks for sub in _sublayers(block)[:1]]
    names = ("n_heads", "n_kv_heads", "d_head", "softcap", "clip")
    sizes = {tuple(getattr(attention, name, None) for name in names) for attention in attentions}
    turned = {attention.position.turned for attention in attentions if isinstance(attention, Attention)} - {0}
    kinds = {isinstance(block, ParallelBlock) for block in stack.blocks}
    if len(sizes) > 1 or len(turned) > 1 or len(kinds) > 1:
        yield "all layers have heads of one size and number, and blocks of one kind"


def _odd_block(block: Part) -> Iterator[str]:
    sublayers = _sublayers(block)
    if [sub.name for sub in sublayers] != ["attn", "mlp"] or (isinstance(block, Block) and block.from_norm):
        yield "its blocks are attention and MLP, each added to the stream"
        return
    attention, mlp = (sub.part for sub in sublayers)
    if not isinstance(attention, Attention):
        yield f"it has no {type(attention).__name__}"
        return
    yield from _odd_attention(attention)
    if isinstance(mlp, MoE):
        yield from _odd_experts(mlp, isinstance(block, ParallelBlock))
        mlp = mlp.experts
    if not isinstance(mlp, MLP | GatedMLP):
        yield f"it has no {type(mlp).__name__}"
    elif mlp.act not in ACTS:
        yield f"its MLP has one of the activations {', '.join(ACTS)}"


def _odd_experts(moe: MoE, parallel: bool) -> Iterator[str]:
    if parallel:
        yield "its experts stand in blocks whose sublayers follow one another"
    if moe.shared is not None and moe.shared.act not in ACTS:
        yield f"its MLP has one of the activations {', '.join(ACTS)}"


def _odd_attention(attention: Attention) -> Iterator[str]:
    seen, position = attention.visibility, attention.position
    if not seen.causal or seen.chunk or seen.stride or seen.prefix:
        yield "attention is causal, with or without a window"
    if not isinstance(position, NoPosition | RoPE | ALiBi):
        yield f"it turns queries and keys, and this card has {type(position).__name__}"
    elif isinstance(position, ALiBi) and (position.rounded or attention.softcap):
        yield "penalties are not rounded and not capped"
    elif position.renewed_past is not None or isinstance(getattr(position, "scaling", None), Dynamic):
        yield "the angles do not depend on the length"
    if padded(attention.d_head, ROWS) > WIDEST_HEAD:
        yield f"heads have up to {WIDEST_HEAD} channels"
    wide = isinstance(attention.q_norm, RMSNorm)
    for norm in (attention.q_norm, attention.k_norm):
        if norm is not None and not isinstance(norm, HeadNorm) and norm.d != attention.d_head and not wide:
            yield "only an RMSNorm goes over all heads"
