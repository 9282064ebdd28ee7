"""Our own layout, for cards that no family's config can express: card.yaml beside the weights under our names."""

from __future__ import annotations

from typing import Any

from scantling.checkpoint.config_keys import Keys
from scantling.checkpoint.family import Family
from scantling.checkpoint.names import Row
from scantling.errors import ScantlingInputError

MODEL_TYPE = "scantling"
CARD_FILE = "card.yaml"
LAYOUT = 1
"""Of the layout; a later one that is read differently has a higher number."""


def _card(keys: Keys) -> dict[str, Any]:
    raise ScantlingInputError(f"{keys.where}: model_type is {MODEL_TYPE!r}, whose sizes are in {CARD_FILE} beside it")


def check(keys: Keys) -> None:
    """Refuse a config of another layout.

    Raises:
        ScantlingInputError: the layout is newer, or a key is unknown.
    """
    keys.only("layout", LAYOUT)
    keys.finish(frozenset({"decoder_start_token_id"}))


FAMILY = Family(card=_card, rows=lambda card: (Row("*", "*"),), prefix="")
