"""What the family of a card rules in and out: stacks, heads, positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from scantling.cards.schema import ALiBi, Card, Head, Latent, Learned, Relative

Refuse = Callable[[Card, str, object, str], None]

POOLED = ("sequence", "embedding")
LABELLED = ("sequence", "tokens")
KINDS = {
    "decoder": ("lm", "none"),
    "encoder": ("lm", "tokens", "sequence", "replaced", "embedding", "none"),
    "encoder-decoder": ("lm",),
}
"""The heads that each family can have."""


def head(card: Card, refuse: Refuse) -> Head:
    """The head with its defaults filled in.

    Raises:
        ScantlingInputError: a key that its kind does not have, or one that is missing.
    """
    spec = card.head
    if spec.kind not in KINDS[card.family]:
        refuse(card, "head.kind", spec.kind, f"a card of family {card.family} has {' or '.join(KINDS[card.family])}")
    for key, kinds in _KEYS.items():
        if getattr(spec, key) not in (None, False, "softmax") and spec.kind not in kinds:
            refuse(card, f"head.{key}", getattr(spec, key), f"only kind {' or '.join(kinds)} has it")
    if spec.kind in LABELLED and spec.n_labels is None:
        refuse(card, "head.n_labels", None, f"kind {spec.kind} needs the number of labels")
    if card.tied and spec.kind != "lm":
        refuse(card, "tied", True, f"a head of kind {spec.kind} has no matrix that could be the token table")
    if spec.spare and spec.transform is None:
        refuse(card, "head.spare", True, "there is no transform whose result could be left unread")
    if spec.bias_fixed and not spec.bias:
        refuse(card, "head.bias_fixed", True, "there is no bias")
    return replace(spec, pool=spec.pool or "first") if spec.kind in POOLED else spec


_KEYS = {
    "bias": ("lm", "tokens", "sequence", "replaced"),
    "bias_fixed": ("lm",),
    "scale": ("lm",),
    "softcap": ("lm",),
    "transform": ("lm", "tokens", "sequence", "replaced", "embedding"),
    "spare": ("embedding",),
    "pool": POOLED,
    "normalize": ("embedding",),
    "n_labels": LABELLED,
    "scores": LABELLED,
}
"""Which kinds of heads a key belongs to."""


def check(card: Card, refuse: Refuse) -> None:
    """Refuse what a card of this family cannot have."""
    two = card.family == "encoder-decoder"
    for key in ("encoder", "decoder"):
        if getattr(card, key) is not None and not two:
            refuse(card, key, "a section", "only a card of family encoder-decoder has two stacks that can differ")
    if card.encoder is not None and card.encoder.cross is not None:
        refuse(card, "encoder.cross", "a section", "the decoder reads the encoder, not the other way round")
    if not card.embedding.shared and not two:
        refuse(card, "embedding.shared", False, "only an encoder-decoder has a source and a target")
    if card.embedding.types is not None and card.family != "encoder":
        refuse(card, "embedding.types", card.embedding.types, "only a card of family encoder has kinds of tokens")
    if two and card.embedding.width not in (None, card.d_model):
        refuse(card, "embedding.width", card.embedding.width, f"the table of an encoder-decoder is {card.d_model} wide")
    _narrow(card, refuse)
    if card.family != "decoder":
        attentions: list[Any] = [card.attention, *(layer.attention for layer in card.pattern)]
        if any(isinstance(attention, Latent) for attention in attentions):
            refuse(card, "attention.kind", "latent", "it is defined for a card of family decoder")
        if isinstance(card.position, ALiBi) and card.position.rounded:
            refuse(card, "position.rounded", True, "it is defined for a card of family decoder")
    if isinstance(card.position, Relative):
        _relative(card, card.position, refuse)
    if two and _layers(card)["decoder"] == 0:
        refuse(card, "n_layers", 0, "a decoder without layers would not read its encoder")
    for at, cross in (("decoder.cross", card.decoder.cross if card.decoder else None),):
        for key in ("window", "chunk", "stride", "scale_by_layer", "qk_norm", "sinks", "clip"):
            if cross is not None and getattr(cross, key):
                refuse(card, f"{at}.{key}", getattr(cross, key), "cross-attention reads the whole source as it is")
    if two:
        _overruled(card, refuse)
    if isinstance(card.position, Learned) and card.position.pad_id is not None:
        if card.family != "encoder":
            right = "it is defined for a card of family encoder: the ids that a cache holds cannot be counted again"
            refuse(card, "position.pad_id", card.position.pad_id, right)
        if card.position.from_mask:
            refuse(card, "position.from_mask", True, "tokens are counted by pad_id already")
        if card.position.offset < 1:
            refuse(card, "position.offset", card.position.offset, "padding stands one row below position 0: at least 1")


def _overruled(card: Card, refuse: Refuse) -> None:
    """Refuse a section of a side without effect: the pattern, which both stacks follow, says it for all layers."""
    unit = [layer for layer in card.pattern for _ in range(layer.times)]
    for side, n_layers in _layers(card).items():
        layers = unit[:n_layers]
        for key in ("attention", "mlp"):
            given = getattr(getattr(card, side), key, None)
            if given is not None and layers and all(getattr(layer, key) is not None for layer in layers):
                refuse(card, f"{side}.{key}", "a section", f"the pattern has {key} of its own for every layer")


def _layers(card: Card) -> dict[str, int]:
    """Blocks of each stack."""
    names = ("encoder", "decoder") if card.family == "encoder-decoder" else (card.family,)
    sides = {name: getattr(card, name) for name in names}
    return {n: card.n_layers if side is None or side.n_layers is None else side.n_layers for n, side in sides.items()}


def _relative(card: Card, position: Relative, refuse: Refuse) -> None:
    unit = [layer.position is None for layer in card.pattern for _ in range(layer.times)] or [True]
    for name, layers in _layers(card).items():
        if not any(unit[i % len(unit)] for i in range(layers)):
            refuse(card, "position.kind", "relative", f"no layer of the {name} would read its table")
    if position.buckets % 4:
        refuse(card, "position.buckets", position.buckets, "a multiple of 4 is needed")
    if position.max_distance <= position.buckets // 2:
        right = f"the {position.buckets // 2} first distances have a bucket each, so it must exceed them"
        refuse(card, "position.max_distance", position.max_distance, right)
    own = {layer.attention.n_heads for layer in card.pattern if layer.attention}
    sides = [getattr(card, name).attention for name in _layers(card) if getattr(card, name) is not None]
    stacks = [card.attention, *(section for section in sides if section is not None)]
    if any(own - {section.n_heads} for section in stacks):
        refuse(card, "position.kind", "relative", "all layers share one table, so they have equally many heads")


def _narrow(card: Card, refuse: Refuse) -> None:
    embedding = card.embedding
    narrow = embedding.width not in (None, card.d_model)
    if embedding.widen == "after" and not narrow:
        refuse(card, "embedding.widen", "after", "the table is as wide as the stream")
    if embedding.widen_bias and not narrow:
        refuse(card, "embedding.widen_bias", True, "the table is as wide as the stream")
