"""The model that a config.json or GGUF metadata describes, with the tensors that it would have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec

from scantling.cards import Card
from scantling.cards.schema import Sinusoidal
from scantling.checkpoint.config_keys import read_json
from scantling.checkpoint.families import family, own
from scantling.checkpoint.families.gguf import architecture, card_of_gguf
from scantling.checkpoint.families.gguf.rope import BESIDE
from scantling.checkpoint.hf_config import beyond, read_config
from scantling.checkpoint.inspect.codes import Finding
from scantling.checkpoint.inspect.gather import Gathered
from scantling.checkpoint.matching import Matched, bare, matched
from scantling.checkpoint.names import Link, Row, Shape, foreign_shapes, heads, written_out
from scantling.errors import ScantlingInputError

WeightsOf = Callable[[Card], Mapping[str, Shape]]
"""The weights that a card's model stores, by our names."""


@dataclass(frozen=True)
class Declared:
    """What the config says.

    Attributes:
        name: of the family: a model type, or an architecture of GGUF.
        data: the config as it stands, the metadata, or what our own card says.
        rows: the table of names for a card of this family.
        ignored: patterns of names that carry no weights.
        copies: names, without the prefix, under which a tied matrix is stored again.
        heads: of those, the names of the head.
        computed: names of tensors that the model computes itself and that some files store.
        quantised: how the weights are quantised, by the config; their shapes are then not those of the model.
    """

    card: Card
    name: str
    data: Mapping[str, Any]
    rows: Callable[[Card], Any]
    weights_of: WeightsOf
    prefix: str = ""
    ignored: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    absent: tuple[str, ...] = ()
    copies: frozenset[str] = field(default_factory=frozenset)
    heads: frozenset[str] = field(default_factory=frozenset)
    computed: frozenset[str] = field(default_factory=frozenset)
    quantised: str | None = None

    @cached_property
    def _weights(self) -> Mapping[str, Shape]:
        return self.weights_of(self.card)

    @cached_property
    def table(self) -> list[Link]:
        """The table of names written out for the card."""
        return written_out(self.rows(self.card), self._weights)[0]

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """Every tensor that the files of the card's model have: their name and shape."""
        return foreign_shapes(self.table, self._weights)

    def shapes_of(self, card: Card) -> dict[str, Shape]:
        """The same of another card of this family."""
        weights = self.weights_of(card)
        return foreign_shapes(written_out(self.rows(card), weights)[0], weights)

    def beside(self, found: Mapping[str, Shape], card: Card | None = None) -> Matched:
        """The tensors of a file beside those."""
        wanted = self.shapes if card is None else self.shapes_of(card)
        return matched(found, wanted, self.prefix, self.ignored, self.renamed, self.absent)

    def checked(self) -> Declared:
        """Itself, if a model can be made of its card.

        Raises:
            ScantlingInputError: it cannot.
        """
        _ = self.shapes
        return self

    def plain(self, name: str) -> str:
        """A name of the file without wrappers and prefix, as the family spells it now."""
        return bare(name, self.renamed).removeprefix(self.prefix)


def declared(gathered: Gathered, weights_of: WeightsOf) -> tuple[Declared | None, list[Finding]]:
    """Read what the checkpoint says of itself; None where there is no config, or none that can be read as a card.

    Raises:
        ScantlingInputError: config.json is no JSON object.
    """
    if gathered.header is not None:
        return _of_gguf(gathered, weights_of)
    if gathered.config is None:
        return None, []
    data = read_json(gathered.config)
    try:
        found = _of_config(gathered, data, weights_of).checked()
    except ScantlingInputError as error:
        return None, [Finding("config_refused", str(error))]
    findings = []
    if found.quantised is not None:
        text = f"the config says {found.quantised}; matrices are not compared with the model's"
        findings.append(Finding("quantised", text))
    return found, findings


def _of_config(gathered: Gathered, data: Mapping[str, Any], weights_of: WeightsOf) -> Declared:
    assert gathered.config is not None
    where = str(gathered.config)
    card, model_type = read_config(gathered.config)
    kind = family(model_type, where)
    other_head = () if card.head.kind == "lm" else kind.vocabulary_head
    rows: tuple[Row, ...] = tuple(kind.rows(card))
    tied = frozenset(name.removeprefix(kind.prefix) for name in heads(rows) if card.tied)
    waves = isinstance(card.position, Sinusoidal) and card.position.table
    tables = [row.theirs + ".weight" for row in rows if str(row.ours).endswith("position.table")] if waves else []
    method = data.get("quantization_config")
    return Declared(
        card,
        model_type,
        msgspec.to_builtins(card) if kind is own.FAMILY else data,
        kind.rows,
        weights_of,
        kind.prefix,
        (*kind.ignored, *other_head, *beyond(gathered.config, kind, card.n_layers)),
        tuple(kind.renamed),
        tuple(kind.absent),
        tied.union(kind.copies),
        tied,
        frozenset(name.removeprefix(kind.prefix) for name in tables),
        str(method.get("quant_method")) if isinstance(method, Mapping) else None,
    )


def _of_gguf(gathered: Gathered, weights_of: WeightsOf) -> tuple[Declared | None, list[Finding]]:
    header, where = gathered.header, str(gathered.where)
    assert header is not None
    try:
        card = card_of_gguf(header.metadata, header.tensors, where)
        kind = architecture(header.metadata, where)
        name = str(header.metadata["general.architecture"])
        ignored = tuple(name.replace(".", r"\.") for name in BESIDE)
        found = Declared(card, name, header.metadata, kind.rows, weights_of, ignored=ignored).checked()
    except ScantlingInputError as error:
        return None, [Finding("config_refused", str(error))]
    return found, []
