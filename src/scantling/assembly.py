"""Card to parts: the only file that knows both."""

from __future__ import annotations

import math
from dataclasses import replace

from msgspec.structs import replace as replace_card

from scantling.cards import schema
from scantling.cards.rules import MAX_PARAMS, SIDES, complete, table_rows
from scantling.cards.schema import Card, Layer
from scantling.errors import ScantlingInputError
from scantling.parts import rope
from scantling.parts.attention import Attention
from scantling.parts.block import Block, ParallelBlock, Sublayer
from scantling.parts.cross import CrossAttention
from scantling.parts.heads import AnyHead, Head, Labels, NoHead, TextVector, Transform
from scantling.parts.latent import LatentAttention
from scantling.parts.leaf import Embedding, HeadNorm, LayerNorm, Linear, Norm, RMSNorm
from scantling.parts.mlp import MLP, GatedMLP
from scantling.parts.moe import MoE, Router
from scantling.parts.part import Part
from scantling.parts.position import ALiBi, Learned, NoPosition, Position, Sinusoidal
from scantling.parts.relative import RelativeBias
from scantling.parts.rope import RoPE
from scantling.parts.stack import Stack, TokenTypes
from scantling.parts.transformer import Transformer
from scantling.visibility import Visibility


def assemble(card: Card) -> Transformer:
    """The part tree of a card.

    Raises:
        ScantlingInputError: the card contradicts itself, or the model would have more than 10^15 parameters.
    """
    card = complete(card)
    rows, d_model, embedding = table_rows(card), card.d_model, card.embedding
    width = embedding.width or d_model
    widen = None if width == d_model else Linear(width, d_model, embedding.widen_bias)
    after = embedding.widen == "after"
    names = SIDES if card.family == "encoder-decoder" else (card.family,)
    stacks = {name: _stack(card, name, width if after else d_model, widen if after else None) for name in names}
    model = Transformer(
        embed=Embedding(rows, width),
        target_embed=None if embedding.shared else Embedding(rows, width),
        widen=None if after else widen,
        head=_head(card, width),
        scale=embedding.scale,
        scale_rounded=embedding.scale_rounded,
        **stacks,
    )
    if model.params > MAX_PARAMS:
        raise ScantlingInputError(
            f"card {card.name[:60]!r}: {model.params:.3g} parameters; the limit is {MAX_PARAMS:.0e}"
        )
    return model


def _stack(card: Card, name: str, width: int, widen: Linear | None) -> Stack:
    """The stack `name`; its tables are `width` wide."""
    side = getattr(card, name) or schema.Side()
    own = replace_card(card, **{key: getattr(side, key) or getattr(card, key) for key in ("attention", "mlp")})
    layers = _layers(card, card.n_layers if side.n_layers is None else side.n_layers)
    norm, types = card.embedding.norm, card.embedding.types
    cross = _cross(own, side.cross) if card.family == "encoder-decoder" and name == "decoder" else None
    return Stack(
        position=_stream_position(own, name, width),
        blocks=tuple(_block(own, name, i, layer, cross) for i, layer in enumerate(layers)),
        final_norm=_norm(card.norm, card.d_model) if _ends_in_norm(card) else None,
        width=width,
        embed_norm=None if norm is None else _norm(norm, width),
        dropout=card.dropout.embedding,
        types=None if types is None else TokenTypes(types, width),
        widen=widen,
    )


def _head(card: Card, width: int) -> AnyHead:
    spec, d_model = card.head, card.d_model
    reads = width if card.tied else d_model
    transform = None
    if spec.transform is not None:
        out = reads if spec.kind == "lm" else d_model
        norm = _norm(card.norm, out) if spec.transform.norm else None
        transform = Transform(d_model, out, spec.transform.act, spec.transform.bias, norm)
    match spec.kind:
        case "none":
            return NoHead(d_model)
        case "embedding":
            return TextVector(d_model, str(spec.pool), transform, spec.spare, spec.normalize)
        case "lm":
            return Head(
                d_model,
                reads,
                table_rows(card),
                card.vocab_size,
                card.tied,
                spec.bias,
                spec.bias_fixed,
                spec.scale,
                spec.softcap,
                transform,
                next_token=card.family != "encoder",
            )
    flat = spec.kind == "replaced"
    return Labels(
        d_model,
        spec.n_labels or 1,
        transform,
        spec.pool,
        spec.bias,
        "sigmoid" if flat else spec.scores,
        flat,
    )


def _layers(card: Card, n_layers: int) -> list[Layer]:
    """One entry per layer: the pattern, repeated and cut to `n_layers`."""
    if not card.pattern:
        return [Layer()] * n_layers
    unit = [layer for layer in card.pattern for _ in range(layer.times)]
    return [unit[i % len(unit)] for i in range(n_layers)]


def _ends_in_norm(card: Card) -> bool:
    return "out" not in card.norm.at if card.norm.final is None else card.norm.final


def _block(card: Card, stack: str, index: int, layer: Layer, cross: CrossAttention | None) -> Part:
    position = card.position if layer.position is None else layer.position
    parts: dict[str, Part] = {"attn": _attention(card, stack, index, layer.attention or card.attention, position)}
    if cross is not None:
        parts["cross"] = cross
    parts["mlp"] = _mlp(card.d_model, layer.mlp or card.mlp)
    norms = tuple((place, _norm(card.norm, card.d_model)) for place in ("in", "res", "out") if place in card.norm.at)
    sublayers = [Sublayer(name, part, norms) for name, part in parts.items()]
    if index == 0 and card.norm.skip_first:
        sublayers[0] = replace(sublayers[0], norms=tuple(norm for norm in norms if norm[0] != "in"))
    if not card.residual.parallel:
        return Block(card.d_model, tuple(sublayers), card.dropout.residual, card.residual.from_norm)
    if card.residual.shared_norm:
        sublayers[1:] = [replace(sub, norms=()) for sub in sublayers[1:]]
    return ParallelBlock(card.d_model, tuple(sublayers), card.dropout.residual)


def _cross(card: Card, spec: schema.MultiHead | None) -> CrossAttention:
    """Attention to the encoder: as `spec`, or as the stack's own attention where none is given."""
    own = card.attention if spec is None else spec
    assert isinstance(own, schema.MultiHead)
    assert own.n_kv_heads is not None
    assert own.d_head is not None
    return CrossAttention(
        d_model=card.d_model,
        n_heads=own.n_heads,
        n_kv_heads=own.n_kv_heads,
        d_head=own.d_head,
        scale=own.d_head**-0.5 if own.scale is None else own.scale,
        biases=frozenset(own.bias),
        softcap=own.softcap,
        dropout=card.dropout.attention,
    )


def _attention(
    card: Card, stack: str, index: int, spec: schema.MultiHead | schema.Latent, position: schema.Section
) -> Part:
    if isinstance(spec, schema.Latent):
        return _latent(card, spec, position)
    assert spec.n_kv_heads is not None
    assert spec.d_head is not None
    scale = spec.d_head**-0.5 if spec.scale is None else spec.scale
    q_norm, k_norm = (_qk_norm(spec.qk_norm, heads, spec.d_head) for heads in (spec.n_heads, spec.n_kv_heads))
    return Attention(
        d_model=card.d_model,
        n_heads=spec.n_heads,
        n_kv_heads=spec.n_kv_heads,
        d_head=spec.d_head,
        scale=scale / (index + 1) if spec.scale_by_layer else scale,
        visibility=_visibility(spec, causal=stack == "decoder"),
        position=_score_position(card, position, spec.n_heads, scale, stack == "encoder"),
        biases=frozenset(spec.bias),
        q_norm=q_norm,
        k_norm=k_norm,
        softcap=spec.softcap,
        sinks=spec.sinks,
        clip=spec.clip,
        dropout=card.dropout.attention,
    )


def _visibility(spec: schema.MultiHead, causal: bool) -> Visibility:
    stride = spec.stride
    every, last = (None, None) if stride is None else (stride.every, stride.last)
    return Visibility(causal, spec.window, spec.chunk, every, last, spec.prefix)


def _latent(card: Card, spec: schema.Latent, position: schema.Section) -> LatentAttention:
    scale = (spec.d_nope + spec.d_rope) ** -0.5 if spec.scale is None else spec.scale
    turns = _score_position(card, position, spec.n_heads, scale)
    if spec.scale is None and isinstance(turns, RoPE) and isinstance(turns.scaling, rope.Yarn):
        scale *= turns.scaling.factor_on_scores
    return LatentAttention(
        d_model=card.d_model,
        n_heads=spec.n_heads,
        kv_rank=spec.kv_rank,
        d_nope=spec.d_nope,
        d_rope=spec.d_rope,
        d_value=spec.d_value,
        eps=spec.eps,
        scale=scale,
        q_rank=spec.q_rank,
        position=turns,
        dropout=card.dropout.attention,
    )


def _qk_norm(spec: schema.QKNorm | None, heads: int, d_head: int) -> Norm | HeadNorm | None:
    if spec is None:
        return None
    if spec.over == "each_head":
        return HeadNorm(heads, d_head, spec.eps, centred=spec.kind == "layernorm")
    width = d_head if spec.over == "head" else heads * d_head
    if spec.kind == "rmsnorm":
        return _rms_norm(width, spec)
    return LayerNorm(width, spec.eps, spec.bias)


def _stream_position(card: Card, stack: str, width: int) -> Position:
    """What the stack has at its bottom: vectors to add to the residual stream, or the table of the scores' shifts."""
    spec = card.position
    if isinstance(spec, schema.Learned):
        return Learned(card.context, width, spec.offset, spec.from_mask, spec.pad_id)
    if isinstance(spec, schema.Sinusoidal):
        return Sinusoidal(width, spec.theta, spec.halves, card.context if spec.table else None)
    if isinstance(spec, schema.Relative):
        return _relative(spec, card.attention.n_heads, stack == "encoder")
    return NoPosition()


def _relative(spec: schema.Relative, n_heads: int, both_ways: bool) -> RelativeBias:
    return RelativeBias(n_heads, spec.buckets, spec.max_distance, both_ways)


def _score_position(card: Card, spec: schema.Section, n_heads: int, scale: float, both_ways: bool = False) -> Position:
    """What acts on queries, keys, or scores."""
    if isinstance(spec, schema.Relative):
        return _relative(spec, n_heads, both_ways)
    if isinstance(spec, schema.RoPE):
        assert spec.d_rotary is not None
        return RoPE(spec.d_rotary, spec.theta, spec.interleaved, _scaling(card, spec.scaling))
    if isinstance(spec, schema.ALiBi):
        return ALiBi(n_heads, spec.max_bias, scale if spec.scaled else 1.0, spec.rounded)
    return NoPosition()


def _scaling(card: Card, spec: schema.Scaling | None) -> rope.Scaling | None:
    match spec:
        case None:
            return None
        case schema.LinearScaling():
            return rope.Linear(spec.factor)
        case schema.DynamicScaling():
            return rope.Dynamic(spec.factor, spec.trained_length)
        case schema.Llama3Scaling():
            return rope.Llama3(spec.factor, spec.trained_length, spec.low_freq_factor, spec.high_freq_factor)
        case schema.YarnScaling():
            return rope.Yarn(
                spec.factor,
                spec.trained_length,
                spec.beta_fast,
                spec.beta_slow,
                spec.attention_factor,
                spec.mscale,
                spec.mscale_all_dim,
                spec.truncate,
            )
        case schema.LongRopeScaling():
            stretch = card.context / spec.trained_length
            usual = math.sqrt(1 + math.log(stretch) / math.log(spec.trained_length)) if stretch > 1 else 1.0
            factor = usual if spec.attention_factor is None else spec.attention_factor
            return rope.LongRope(spec.trained_length, tuple(spec.short_factor), tuple(spec.long_factor), factor)


def _norm(spec: schema.RMSNorm | schema.LayerNorm, d: int) -> Norm:
    if isinstance(spec, schema.RMSNorm):
        return _rms_norm(d, spec)
    return LayerNorm(d, spec.eps, spec.bias)


def _rms_norm(d: int, spec: schema.RMSNorm | schema.QKNorm) -> RMSNorm:
    rounded = not spec.plus_one if spec.rounded is None else spec.rounded
    return RMSNorm(d, spec.eps, spec.plus_one, rounded)


def _mlp(
    d_model: int, spec: schema.Plain | schema.Gated | schema.MoE, n_experts: int | None = None
) -> MLP | GatedMLP | MoE:
    if isinstance(spec, schema.MoE):
        experts = _mlp(d_model, spec.expert, spec.n_experts)
        shared = None if spec.shared is None else _mlp(d_model, spec.shared)
        assert not isinstance(experts, MoE)
        assert not isinstance(shared, MoE)
        return MoE(_router(d_model, spec), experts, shared, spec.shared_gate)
    assert spec.d_ff is not None
    if isinstance(spec, schema.Plain):
        return MLP(d_model, spec.d_ff, spec.act, spec.bias, n_experts)
    clamp = None if spec.clamp is None else (spec.clamp.limit, spec.clamp.alpha)
    return GatedMLP(d_model, spec.d_ff, spec.act, spec.bias, n_experts, clamp)


def _router(d_model: int, spec: schema.MoE) -> Router:
    return Router(
        d_model=d_model,
        n_experts=spec.n_experts,
        top_k=spec.top_k,
        normalize=spec.normalize,
        scores=spec.scores,
        bias=spec.bias,
        selection_bias=spec.selection_bias,
        scale=spec.scale,
        groups=spec.groups,
        top_groups=spec.top_groups,
        group_score=spec.group_score,
    )
