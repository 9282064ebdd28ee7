"""The support matrix, docs/support.md: every choice of a card against what the tests run and what checkpoints use.

``python -m tests.support_matrix --write`` rewrites it; a test fails where it is out of date.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests import test_laws
from tests.choices import Choice, choices, made
from tests.conftest import GOLDEN

import scantling as sc
from scantling.cards.schema import Card
from scantling.checkpoint.families import FAMILIES
from scantling.checkpoint.hf_config import card_of_config
from scantling.parts.rope import RoPE
from scantling.tensor.attend import KERNELS

PATH = Path(__file__).parents[1] / "docs" / "support.md"
LAWS = test_laws.TestEveryPart
FAR = 10**6

HEADER = """# What is supported

Each row is a choice that a card can make, each column what a test runs with it. This page is made by
`python -m tests.support_matrix --write` (or `make docs`) from the card's schema, from the cards that the laws of
`tests/test_laws.py` run over, and from the configs in `tests/data/golden`; a test fails where it is out of date.

- A key alone means any value but its default; `key: value` means that value. Keys with a default that follows from
  others count where they say something else.
- **yes**: the law holds for at least one card with this choice, and for every card that the laws run over.
  **no test**: no card of the laws makes the choice.
- **within the trained length**: the angles follow the length of the sequence, so a cached or padded run equals the
  plain one only as long as no row exceeds the trained length.
- *cached decoding*: logits of any pieces over the cache are those of one pass. *left padding*: padding and the
  neighbours of a row move no real token. *kernels*: no future token reaches a past logit, and all kernels agree.
  *compile*: `torch.compile(fullgraph=True)`. *verify*: names, shapes, FLOPs and cache bytes, built and run on the meta
  device, are the predicted ones.
- *read from*: checkpoint families with a config here that makes the choice. *written to*: formats that can express it.
"""


def _marks(test: Any) -> dict[str, list[Any]]:
    """The parameters of a test by their names."""
    marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
    return {mark.args[0]: list(mark.args[1]) for mark in marks if isinstance(mark.args[0], str)}


@cache
def law_cards() -> tuple[tuple[Card, frozenset[Choice]], ...]:
    """The cards that the class of laws runs over, and their choices."""
    return tuple((card, frozenset(made(card))) for card in _marks(LAWS)["card"])


@cache
def config_cards() -> tuple[tuple[str, frozenset[Choice]], ...]:
    """Model type and choices of every config of a known family."""
    found = []
    for path in [*sorted((GOLDEN / "configs").glob("*.json")), *sorted((GOLDEN / "tiny").glob("*/config.json"))]:
        config = json.loads(path.read_text())
        if config.get("model_type") in FAMILIES:
            card = card_of_config(config, path.stem, path.name)
            found.append((config["model_type"], frozenset(made(card))))
    return tuple(found)


def follows_length(card: Card) -> bool:
    """Whether angles differ between a short and a long sequence of the same model."""
    positions = [part.position for _, part, _ in sc.assemble(card).walk() if hasattr(part, "position")]
    return any(rope.frequencies(1) != rope.frequencies(FAR) for rope in positions if isinstance(rope, RoPE))


def law(name: str, *, by_length: bool = False, **parameters: Any) -> Callable[[Choice], str]:
    """A column: whether the law of that name runs, with these parameters, over a card with the choice."""
    test = getattr(LAWS, name)
    runs = all(value in _marks(test)[key] for key, value in parameters.items())

    def cell(choice: Choice) -> str:
        cards = [card for card, made_here in law_cards() if choice in made_here]
        if not cards or not runs:
            return "no test"
        # Positions alone have angles: a choice elsewhere is not limited by the card that happens to make it.
        limited = by_length and section(choice) == "position" and all(map(follows_length, cards))
        return "within the trained length" if limited else "yes"

    return cell


def read_from(choice: Choice) -> str:
    """Model types with a config that makes the choice."""
    return ", ".join(sorted({kind for kind, made_here in config_cards() if choice in made_here}))


def written_to(choice: Choice) -> str:
    """Formats that can express the choice: a family's table of names goes both ways, so what is read can be written."""
    writes = find_spec("scantling.checkpoint.save") is not None
    return "card.yaml, Hugging Face" if writes and read_from(choice) else "card.yaml"


COLUMNS: dict[str, Callable[[Choice], str]] = {
    "cached decoding": law("test_cache", by_length=True),
    "left padding": law("test_padding_and_neighbours", by_length=True),
    **{f"{name} kernel": law("test_no_future", kernel=name) for name in KERNELS},
    "compile": law("test_it_compiles_without_a_graph_break"),
    "verify": law("test_execution"),
    "read from": read_from,
    "written to": written_to,
}


def rows() -> list[tuple[Choice, list[str]]]:
    """Every choice with its cells."""
    return [(choice, [cell(choice) for cell in COLUMNS.values()]) for choice in choices()]


def section(choice: Choice) -> str:
    """The key of the card under which a choice stands."""
    return (choice.path or choice.key).split(".")[0].split(" ")[0]


def page() -> str:
    """The whole document."""
    found = rows()
    lines = [HEADER]
    for name in dict.fromkeys(section(choice) for choice, _ in found):
        lines += [f"## {name}", "", *_table((c, cells) for c, cells in found if section(c) == name), ""]
    return "\n".join(lines)


def _table(body: Iterable[tuple[Choice, list[str]]]) -> list[str]:
    head = f"| choice | {' | '.join(COLUMNS)} |"
    return [head, "|---" * (len(COLUMNS) + 1) + "|", *(f"| `{c}` | {' | '.join(cells)} |" for c, cells in body)]


def main() -> int:
    """Print the page, or write it where ``--write`` is given."""
    if "--write" not in sys.argv[1:]:
        print(page(), end="")
        return 0
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
