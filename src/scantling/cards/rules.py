"""What must hold between the keys of a card, and the defaults that follow from other keys."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from scantling.cards import family
from scantling.cards.schema import (
    Card,
    DynamicScaling,
    Gated,
    Latent,
    Layer,
    Learned,
    Llama3Scaling,
    LongRopeScaling,
    MoE,
    MultiHead,
    Plain,
    QKNorm,
    RMSNorm,
    RoPE,
    Side,
    Sinusoidal,
    YarnScaling,
)
from scantling.errors import ScantlingInputError
from scantling.strict_yaml import shown

MAX_PARAMS = 10**15
SIDES = ("encoder", "decoder")
"""The stacks of an encoder-decoder, in the order of execution."""


def complete(card: Card) -> Card:
    """The card with every default that depends on other keys filled in.

    Raises:
        ScantlingInputError: a default cannot be derived, or two keys contradict each other.
    """
    attention = _attention(card, card.attention)
    if not card.norm.at or len(set(card.norm.at)) != len(card.norm.at):
        _refuse(card, "norm.at", card.norm.at, "name one or more of in, res, out, each once")
    _residual(card)
    inner = card.embedding.norm
    for key, norm in (("norm", card.norm), ("embedding.norm", inner)):
        if isinstance(norm, RMSNorm) and norm.rounded and norm.plus_one:
            _refuse(card, f"{key}.rounded", True, "with plus_one the gain multiplies first")
    if inner is not None and (inner.at != ["in"] or inner.final is not None or inner.skip_first):
        _refuse(card, "embedding.norm", "given at, final or skip_first", "it stands in one place only: leave them out")
    if card.embedding.scale_rounded and card.embedding.scale is None:
        _refuse(card, "embedding.scale_rounded", True, "there is no embedding.scale that it could round")
    done = replace(card, attention=attention, mlp=_mlp(card, card.mlp))
    if isinstance(card.position, RoPE):
        done = replace(done, position=_rope(card, card.position, attention))
    done = replace(done, **{name: _side(card, name) for name in SIDES}, head=family.head(card, _refuse))
    family.check(done, _refuse)
    return replace(done, pattern=[_layer(done, i, layer) for i, layer in enumerate(card.pattern)])


def _layer(card: Card, i: int, layer: Layer) -> Layer:
    at = f"pattern[{i}]."
    if layer.times < 1:
        _refuse(card, f"{at}times", layer.times, "at least 1 layer is needed")
    attention = card.attention if layer.attention is None else _attention(card, layer.attention, at)
    position = layer.position
    if isinstance(position, RoPE):
        position = _rope(card, position, attention, at)
    elif position is None and isinstance(card.position, RoPE):
        # The card's own turns these heads too.
        _rope(card, card.position, attention, at)
    mlp = None if layer.mlp is None else _mlp(card, layer.mlp, at)
    return replace(layer, attention=None if layer.attention is None else attention, position=position, mlp=mlp)


def _side(card: Card, name: str) -> Side | None:
    side: Side | None = getattr(card, name)
    if side is None:
        return None
    given = {key: getattr(side, key) for key in ("attention", "cross") if getattr(side, key) is not None}
    filled: dict[str, Any] = {key: _attention(card, section, f"{name}.", key) for key, section in given.items()}
    if isinstance(card.position, RoPE) and "attention" in filled:
        _rope(card, card.position, filled["attention"], f"{name}.")
    return replace(side, mlp=None if side.mlp is None else _mlp(card, side.mlp, f"{name}."), **filled)


def _residual(card: Card) -> None:
    residual = card.residual
    if residual.shared_norm and not residual.parallel:
        _refuse(card, "residual.shared_norm", True, "only parallel sublayers can share a norm")
    if residual.parallel and card.norm.at != ["in"]:
        _refuse(card, "norm.at", card.norm.at, "parallel sublayers are normed at in")
    if card.norm.skip_first and (residual.parallel or "in" not in card.norm.at):
        _refuse(card, "norm.skip_first", True, "it needs sequential sublayers that are normed at in")
    if residual.from_norm and (residual.parallel or "in" not in card.norm.at):
        _refuse(card, "residual.from_norm", True, "it needs sequential sublayers that are normed at in")


def _qk_norm(card: Card, norm: QKNorm | None, at: str) -> None:
    if norm is None:
        return
    for key, kind in (("bias", "layernorm"), ("plus_one", "rmsnorm")):
        if getattr(norm, key) and (norm.kind != kind or norm.over == "each_head"):
            _refuse(card, f"{at}qk_norm.{key}", True, f"only a {kind} over head or width can have it")
    if norm.rounded is not None and (norm.kind != "rmsnorm" or norm.over == "each_head"):
        _refuse(card, f"{at}qk_norm.rounded", norm.rounded, "only a rmsnorm over head or width can have it")
    if norm.rounded and norm.plus_one:
        _refuse(card, f"{at}qk_norm.rounded", True, "with plus_one the gain multiplies first")


def _reach(card: Card, attention: MultiHead, at: str) -> None:
    window, chunk, stride = attention.window, attention.chunk, attention.stride
    if window is not None and chunk is not None:
        _refuse(card, f"{at}.chunk", chunk, f"there is a window of {window} already, and only one can be near")
    if attention.prefix and card.family != "decoder":
        _refuse(card, f"{at}.prefix", True, "only a card of family decoder has a prefix that is read both ways")
    if stride is None:
        return
    if stride.last is None and chunk is not None:
        right = "distances go with a window; with a chunk, stride.last says what is read of the others"
        _refuse(card, f"{at}.stride.last", None, right)
    if stride.last is not None:
        if window is not None:
            _refuse(card, f"{at}.stride.last", stride.last, "fixed positions go with a chunk, not a window")
        if stride.last > stride.every:
            _refuse(card, f"{at}.stride.last", stride.last, f"it cannot exceed every {stride.every}")
    if chunk is not None and chunk != stride.every:
        _refuse(card, f"{at}.stride.every", stride.every, f"it must be the chunk, {chunk}")


def _attention(
    card: Card, attention: MultiHead | Latent, at: str = "", section: str = "attention"
) -> MultiHead | Latent:
    if isinstance(attention, Latent):
        return _latent(card, attention, at)
    _qk_norm(card, attention.qk_norm, f"{at}{section}.")
    _reach(card, attention, f"{at}{section}")
    heads = attention.n_heads
    kv_heads = heads if attention.n_kv_heads is None else attention.n_kv_heads
    if heads % kv_heads:
        _refuse(card, f"{at}{section}.n_kv_heads", kv_heads, f"it must divide n_heads {heads}")
    d_head = attention.d_head
    if d_head is None:
        if card.d_model % heads:
            better = f"n_heads must divide d_model {card.d_model}, or d_head must be given"
            _refuse(card, f"{at}{section}.n_heads", heads, better)
        d_head = card.d_model // heads
    if len(set(attention.bias)) != len(attention.bias):
        _refuse(card, f"{at}{section}.bias", attention.bias, "name each projection once")
    return replace(attention, n_kv_heads=kv_heads, d_head=d_head)


def _latent(card: Card, attention: Latent, at: str) -> Latent:
    if not isinstance(card.position, RoPE):
        _refuse(card, "position.kind", type(card.position).__name__, "latent attention needs rope")
    if attention.d_rope % 2:
        _refuse(card, f"{at}attention.d_rope", attention.d_rope, "RoPE turns pairs of channels, so it must be even")
    return attention


def _rope(card: Card, position: RoPE, attention: MultiHead | Latent, at: str = "") -> RoPE:
    d_head = attention.d_rope if isinstance(attention, Latent) else attention.d_head
    assert d_head is not None
    width = d_head if position.d_rotary is None else position.d_rotary
    if width % 2:
        key = "attention.d_head" if width == d_head else "position.d_rotary"
        _refuse(card, f"{at}{key}", width, "RoPE turns pairs of channels, so it must be even")
    if width > d_head:
        _refuse(card, f"{at}position.d_rotary", width, f"it cannot exceed the head's {d_head} channels")
    scaling = position.scaling
    if isinstance(scaling, DynamicScaling) and width < 4:
        _refuse(card, f"{at}position.d_rotary", width, "dynamic scaling needs at least 4 channels")
    if isinstance(scaling, YarnScaling) and position.theta <= 1:
        _refuse(card, f"{at}position.theta", position.theta, "yarn scaling needs a base above 1")
    if isinstance(scaling, LongRopeScaling):
        if scaling.trained_length < 2 and scaling.attention_factor is None:
            right = "at least 2 positions are needed where attention_factor is not given"
            _refuse(card, f"{at}position.scaling.trained_length", scaling.trained_length, right)
        for key in ("short_factor", "long_factor"):
            if len(factors := getattr(scaling, key)) != width // 2:
                right = f"one for each of the {width // 2} pairs is needed"
                _refuse(card, f"{at}position.scaling.{key}", f"{len(factors)} numbers", right)
    if isinstance(scaling, Llama3Scaling) and scaling.low_freq_factor >= scaling.high_freq_factor:
        right = f"it must be below high_freq_factor {scaling.high_freq_factor}"
        _refuse(card, f"{at}position.scaling.low_freq_factor", scaling.low_freq_factor, right)
    return replace(position, d_rotary=width)


def _mlp(card: Card, mlp: Plain | Gated | MoE, at: str = "") -> Plain | Gated | MoE:
    if not isinstance(mlp, MoE):
        return _with_width(card, mlp, at)
    if mlp.scores == "top_softmax" and (mlp.selection_bias or mlp.groups > 1):
        key = "selection_bias" if mlp.selection_bias else "groups"
        _refuse(card, f"{at}mlp.{key}", getattr(mlp, key), "with scores top_softmax the best scores alone decide")
    if mlp.top_k > mlp.n_experts:
        _refuse(card, f"{at}mlp.top_k", mlp.top_k, f"it cannot exceed n_experts {mlp.n_experts}")
    if mlp.n_experts % mlp.groups:
        _refuse(card, f"{at}mlp.groups", mlp.groups, f"it must divide n_experts {mlp.n_experts}")
    if mlp.top_groups > mlp.groups:
        _refuse(card, f"{at}mlp.top_groups", mlp.top_groups, f"it cannot exceed groups {mlp.groups}")
    room = mlp.n_experts // mlp.groups * mlp.top_groups
    if mlp.top_k > room:
        _refuse(card, f"{at}mlp.top_k", mlp.top_k, f"{mlp.top_groups} of {mlp.groups} groups hold {room} experts")
    if mlp.group_score == "top2" and mlp.n_experts // mlp.groups < 2:
        _refuse(card, f"{at}mlp.group_score", "top2", "a group needs at least two experts for its two best")
    if mlp.shared_gate and mlp.shared is None:
        _refuse(card, f"{at}mlp.shared_gate", True, "there is no shared MLP to gate")
    shared = None if mlp.shared is None else _with_width(card, mlp.shared, at)
    return replace(mlp, expert=_with_width(card, mlp.expert, at), shared=shared)


def _with_width(card: Card, mlp: Plain | Gated, at: str) -> Plain | Gated:
    if isinstance(mlp, Gated) and mlp.clamp and mlp.act != "silu":
        _refuse(card, f"{at}mlp.act", mlp.act, "a clamped gate is defined with silu only")
    if mlp.d_ff is not None:
        return mlp
    gated = 256 * -(-8 * card.d_model // (3 * 256))
    return replace(mlp, d_ff=gated if isinstance(mlp, Gated) else 4 * card.d_model)


def table_rows(card: Card) -> int:
    """Rows of the embedding table: the vocabulary with its padding."""
    multiple = card.embedding.vocab_multiple
    return multiple * -(-card.vocab_size // multiple)


def position_limit(card: Card) -> int | None:
    """Positions that exist at all: the rows of a table; None where any position can be computed."""
    in_table = isinstance(card.position, Learned) or (isinstance(card.position, Sinusoidal) and card.position.table)
    return card.context if in_table else None


def positions_text(card: Card) -> str:
    """``1024 learned positions``, or of a table of waves ``512 positions in a table``."""
    return f"{card.context} {'learned positions' if isinstance(card.position, Learned) else 'positions in a table'}"


def _refuse(card: Card, key: str, value: object, right: str) -> None:
    raise ScantlingInputError(f"card {shown(card.name)}: {key} is {shown(value)}: {right}")
