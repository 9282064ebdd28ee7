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
    config: Callable[[Card], dict[str, Any] | None] | None = None
