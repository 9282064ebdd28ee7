"""Cards: reading, the presets, and the one function that turns any card-like argument into a Card."""

from __future__ import annotations

from pathlib import Path

from scantling.cards.read import read_file, read_text, to_yaml
from scantling.cards.schema import Card
from scantling.errors import ScantlingInputError, nearest

ALIASES = {
    "gpt2-small": "gpt2",
    "gpt3": "gpt3-175b",
    "mistral-7b": "mistral-7b-v0.1",
    "mixtral-8x7b": "mixtral-8x7b-v0.1",
}
"""Plain names of presets."""

_PRESETS = Path(__file__).parent / "presets"
_LADDER = Path(__file__).parent / "ladder"


def presets() -> list[str]:
    """Names of all presets, sorted."""
    return sorted(path.stem for path in _PRESETS.glob("*.yaml"))


def ladder() -> list[str]:
    """Names of the small cards that lead from a bag of words to a decoder of today, each one choice past the last."""
    return sorted(path.stem for path in _LADDER.glob("*.yaml"))


def is_preset(name: str) -> bool:
    """Whether `name` is a preset, a rung of the ladder, or an alias of one."""
    return ALIASES.get(name, name) in [*presets(), *ladder()]


def preset(name: str) -> Card:
    """The preset, or rung of the ladder, of that name or alias.

    Raises:
        ScantlingInputError: no such preset; the message names the nearest.
    """
    known = [*presets(), *ladder()]
    full = ALIASES.get(name, name)
    if full not in known:
        raise ScantlingInputError(
            f"no preset {name!r}{nearest(name, [*known, *ALIASES])} (`scantling cards` lists them)"
        )
    folder = _LADDER if full in ladder() else _PRESETS
    return read_text((folder / f"{full}.yaml").read_text("utf-8"), f"preset {full!r}")


def card(name_or_path: str | Path) -> Card:
    """A card by preset name, alias, or path of a ``.yaml`` file.

    Raises:
        ScantlingInputError: no such preset or file, or the file is not a card.
    """
    text = str(name_or_path)
    if text.endswith((".yaml", ".yml")):
        return read_file(Path(text))
    return preset(text)


__all__ = ["ALIASES", "Card", "card", "is_preset", "ladder", "preset", "presets", "read_file", "read_text", "to_yaml"]
