"""The support matrix, docs/support.md: every choice of a card against what the tests run and what checkpoints use.

``python -m tests.support_matrix --write`` rewrites it; a test fails where it is out of date.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace
from tests import test_laws
from tests.choices import Choice, choices, made
from tests.conftest import GOLDEN

import scantling as sc
from scantling.cards.read import from_dict
from scantling.cards.rules import complete
from scantling.cards.schema import Card
from scantling.checkpoint.config_choice import choose
from scantling.checkpoint.families import FAMILIES, own
from scantling.checkpoint.gguf_write import drawn
from scantling.checkpoint.hf_config import card_of_config
from scantling.checkpoint.origin import Origin
from scantling.parts.rope import RoPE
from scantling.tensor.attend import KERNELS

PATH = Path(__file__).parents[1] / "docs" / "support.md"
FAR = 10**6

HEADER = """# What is supported

Each row is a choice that a card can make, each column what a test runs with it. This page is made by
`python -m tests.support_matrix --write` (or `make docs`) from the card's schema, from the cards that the laws of
`tests/test_laws.py` run over, from the configs in `tests/data/golden`, and by asking what writes checkpoints whether it
can write these cards; a test fails where it is out of date.

- A key alone means any value but its default; `key: value` means that value. Keys with a default that follows from
  others count where they say something else.
- **yes**: the law holds for at least one card with this choice, and for every card that the laws run over.
  **no test**: no card of the laws makes the choice.
- **within the trained length**: the angles follow the length of the sequence, so a cached or padded run equals the
  plain one only as long as no row exceeds the trained length.
- **a row each**: every card with the choice gives one vector or one set of scores per row, so no two texts share one.
- **encoders only**: a card with a decoder cannot make the choice, so nothing is cached.
- *cached decoding*: logits of any pieces over the cache are those of one pass, for a decoder alone or one that reads an
  encoder. *padding*: padding on either side, that of the source too, and the neighbours of a row move no real token.
  *packing*: documents that share a row give what each gives alone, those of the source too.
  *kernels*: no future token reaches a past logit, and an encoder reads both ways. *compile*:
  `torch.compile(fullgraph=True)`. *verify*: names, shapes, FLOPs and cache bytes, built and run on the meta device, are
  the predicted ones.
- *read from*: checkpoint families with a config here that makes the choice. *saved as*: **Hugging Face** where the
  config of a family is written from some card with the choice; **Hugging Face, if loaded** where only a model that came
  with such a config keeps it; else **own layout**: the card beside the weights, which Scantling reads. *GGUF*:
  architectures that say all of some card with the choice.
"""


def _marks(*tests: Any) -> dict[str, list[Any]]:
    """The parameters of a test, or of its class, by their names."""
    marks = [mark for test in tests for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
    return {mark.args[0]: list(mark.args[1]) for mark in marks if isinstance(mark.args[0], str)}


@cache
def choices_of(name: str) -> frozenset[Choice]:
    """What a card of the laws chooses."""
    return frozenset(made(test_laws.CARDS[name]))


def cards_of(*tests: Any, **parameters: Any) -> frozenset[str]:
    """The cards that a test runs over with these parameters, by their names in the laws."""
    given = _marks(*tests)
    if not all(value in given[key] for key, value in parameters.items()):
        return frozenset()
    names = given.get("name", [])
    return frozenset(names) | {name for name, card in test_laws.CARDS.items() if card in given.get("card", [])}


@cache
def law_cards() -> dict[str, frozenset[str]]:
    """For each column that a law stands behind, the cards that it really runs over."""
    part, decoder = test_laws.TestEveryPart, test_laws.TestEveryDecoder
    both = test_laws.test_an_encoder_reads_both_ways
    kernels = {
        f"{name} kernel": (cards_of(decoder, decoder.test_no_future, kernel=name) | cards_of(both, kernel=name))
        & cards_of(part, part.test_kernels_agree)
        for name in KERNELS
    }
    return {
        "cached decoding": frozenset.intersection(
            *(cards_of(decoder, decoder.test_cache, kernel=name) for name in KERNELS)
        ),
        "padding": cards_of(part, part.test_padding_and_neighbours),
        "packing": cards_of(part, part.test_packing, kernel="fused") & one_result_a_token(),
        **kernels,
        "compile": cards_of(part, part.test_it_compiles_without_a_graph_break),
        "verify": cards_of(part, part.test_execution),
    }


def one_result_a_token() -> frozenset[str]:
    """The cards of the laws whose head does not pool."""
    return frozenset(name for name, card in test_laws.CARDS.items() if card.head.kind not in test_laws.POOLED)


@cache
def config_cards() -> tuple[tuple[Card, frozenset[Choice], dict[str, Any]], ...]:
    """Card, choices and the config itself, for every config of a known family."""
    found = []
    for path in [*sorted((GOLDEN / "configs").glob("*.json")), *sorted((GOLDEN / "tiny").glob("*/config.json"))]:
        config = json.loads(path.read_text())
        if config.get("model_type") in FAMILIES:
            card = card_of_config(config, path.stem, path.name)
            found.append((card, frozenset(made(card)), config))
    return tuple(found)


def follows_length(card: Card) -> bool:
    """Whether angles differ between a short and a long sequence of the same model."""
    positions = [part.position for _, part, _ in sc.assemble(card).walk() if hasattr(part, "position")]
    return any(rope.frequencies(1) != rope.frequencies(FAR) for rope in positions if isinstance(rope, RoPE))


def encoders_only(choice: Choice) -> bool:
    """Whether the rules refuse the choice to every card with a decoder.

    What an encoder of the laws says in that section is laid, in every part that has the key, over a plain card.
    """
    if choice.owner is Card and choice.key == "family":
        return bool(choice.value == "encoder")
    if choice.path.count(".") or choice.owner is Card:
        return False
    name, key = section(choice), choice.key.partition(".")[0]
    cards = [card for law, card in test_laws.CARDS.items() if choice in choices_of(law)]
    return bool(cards) and not any(_legal_with_a_decoder(getattr(card, name), name, key) for card in cards)


def _legal_with_a_decoder(held: Any, name: str, key: str) -> bool:
    fields = {field.name: field for field in msgspec.structs.fields(type(held))}
    needed = {n: getattr(held, n) for n, field in fields.items() if field.required}
    others = [n for n, f in fields.items() if not f.required and n != key and getattr(held, n) != f.default]
    for size in range(len(others) + 1):
        for kept in combinations(others, size):
            laid = type(held)(**needed, **{n: getattr(held, n) for n in (*kept, *({key} - needed.keys()))})
            for family in ("decoder", "encoder-decoder"):
                try:
                    complete(replace(from_dict({**test_laws.BASE, "family": family}, "plain"), **{name: laid}))
                except sc.ScantlingInputError:
                    continue
                return True
    return False


def law(column: str, *, by_length: bool = False) -> Callable[[Choice], str]:
    """A column: whether its law runs over a card with the choice."""

    def cell(choice: Choice) -> str:
        cards = [test_laws.CARDS[name] for name in law_cards()[column] if choice in choices_of(name)]
        if not cards:
            if column == "packing" and any(choice in choices_of(name) for name in test_laws.CARDS):
                return "a row each"
            alone = column == "cached decoding" and encoders_only(choice)
            return "encoders only" if alone else "no test"
        # Positions alone have angles: a choice elsewhere is not limited by the card that happens to make it.
        limited = by_length and section(choice) == "position" and all(map(follows_length, cards))
        return "within the trained length" if limited else "yes"

    return cell


def read_from(choice: Choice) -> str:
    """Model types with a config that makes the choice."""
    return ", ".join(sorted({config["model_type"] for _, made_here, config in config_cards() if choice in made_here}))


@dataclass(frozen=True)
class Written:
    """How a card goes out.

    Attributes:
        anew: the model type of the config that is written from the card alone.
        loaded: that of the config which it came with and which it keeps.
        architecture: of GGUF; empty where none says all of it.
    """

    choices: frozenset[Choice]
    anew: str
    loaded: str
    architecture: str


@cache
def written() -> tuple[Written, ...]:
    """Every card of the laws and of the configs."""
    cards = [(card, choices_of(name), None) for name, card in test_laws.CARDS.items()]
    found = []
    for card, made_here, config in [*cards, *config_cards()]:
        parts = sc.assemble(card)

        def same(other: Card, parts: Any = parts, context: int = card.context) -> bool:
            return other.context == context and sc.assemble(other) == parts

        anew = loaded = choose(card, None, same, "float32", {}).model_type
        if config is not None:
            loaded = choose(card, Origin(config, Path(".")), same, "float32", {}).model_type
        try:
            architecture = drawn(card, parts.named_stored).architecture
        except sc.ScantlingInputError:
            architecture = ""
        found.append(Written(made_here, anew, loaded, architecture))
    return tuple(found)


def saved_as(choice: Choice) -> str:
    """The layout of a folder; of a card that no family can write, our own."""
    cards = [card for card in written() if choice in card.choices]
    if any(card.anew != own.MODEL_TYPE for card in cards):
        return "Hugging Face"
    return "Hugging Face, if loaded" if any(card.loaded != own.MODEL_TYPE for card in cards) else "own layout"


def gguf(choice: Choice) -> str:
    """The architectures that a card with the choice is written as."""
    return ", ".join(sorted({card.architecture for card in written() if choice in card.choices} - {""}))


COLUMNS: dict[str, Callable[[Choice], str]] = {
    **{column: law(column, by_length=column in ("cached decoding", "padding", "packing")) for column in law_cards()},
    "read from": read_from,
    "saved as": saved_as,
    "GGUF": gguf,
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
