"""What a checkpoint family says of itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from scantling.cards import Card
from scantling.checkpoint.config_keys import Keys
from scantling.checkpoint.names import Row


@dataclass(frozen=True)
class Family:
    """One family of checkpoints.

    Attributes:
        card: the sections of the card, from the config's keys; it takes every key it understands.
        rows: the table of names for a card.
        prefix: name of the base model, which some files leave out.
        ignored: patterns of tensor names, without the prefix, that carry no weights.
        irrelevant: config keys that change neither sizes nor results.
        tied_by_default: when the config does not say.
        extra_layers: config key of how many layers the files have beyond the model's own, or None: they predict tokens
            further ahead in training or for drafting, and no logits depend on them.
        stacks: the card's family: decoder, encoder or encoder-decoder.
        renamed: old spellings in tensor names, as (pattern, replacement) of `re.sub`.
        vocabulary_head: patterns, without the prefix, of the tensors that score the vocabulary, which are passed over
            where the config asks for another head.
        absent: patterns of tensor names, without the prefix, that some files leave out where all their numbers are 0.
        copies: names of tensors, without the prefix, in which some files store the token table again.
        config: the way back, from a card to a config: the keys of this family, or None where it sees that the card is
            none of its own. What it gives is tried before it is used: `card` must read the same model out of it.
    """

    card: Callable[[Keys], dict[str, Any]]
    rows: Callable[[Card], Sequence[Row]]
    prefix: str
    ignored: Sequence[str] = ()
    irrelevant: frozenset[str] = frozenset()
    tied_by_default: bool = True
    extra_layers: str | None = None
    stacks: str = "decoder"
    renamed: Sequence[tuple[str, str]] = ()
    absent: Sequence[str] = ()
    vocabulary_head: Sequence[str] = ()
    copies: Sequence[str] = ()
    config: Callable[[Card], dict[str, Any] | None] | None = None
