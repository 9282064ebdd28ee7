"""What is shown of a checkpoint: facts on both sides, its split into parts, and how it is stored."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from scantling.cards import Card
from scantling.cards.schema import Learned, MultiHead, Sinusoidal
from scantling.checkpoint.inspect.compare import Comparison
from scantling.checkpoint.inspect.declared import Declared
from scantling.checkpoint.inspect.facts import Fact, Value
from scantling.checkpoint.inspect.gather import Gathered
from scantling.checkpoint.inspect.parts import part_of


@dataclass(frozen=True)
class Line:
    """One fact on both sides.

    Attributes:
        tensors: what names and shapes show; None is unknown.
        config: what the config says of the same thing; None where it says nothing.
    """

    fact: Fact
    config: Value

    @property
    def tensors(self) -> Value:
        """What names and shapes show; None is unknown."""
        return self.fact.value

    @property
    def agree(self) -> bool | None:
        """Whether both sides say the same; None where one says nothing."""
        return None if self.tensors is None or self.config is None else self.tensors == self.config


def lines(found: Comparison, said: Declared | None) -> list[Line]:
    """Every fact with what the config says of it."""
    stated = {} if said is None else _stated(said.card)
    keys = list(dict.fromkeys([*found.file.facts, *(found.said.facts if found.said else {})]))
    out = []
    for key in keys:
        by_config = stated.get(key) if key in stated else found.said.value(key) if found.said else None
        fact = found.file.facts.get(key)
        if fact is None:
            assert found.said is not None
            fact = Fact(key, found.said.facts[key].what, None)
        out.append(Line(fact, by_config))
    return out


def _stated(card: Card) -> dict[str, Value]:
    """What a card says of facts that tensors often do not show."""
    out: dict[str, Value] = {"norm": str(card.norm.__struct_config__.tag), "head": card.head.kind}
    attention, position = card.attention, card.position
    alike = card.decoder is None or card.decoder.attention is None
    if isinstance(attention, MultiHead) and alike:
        out |= {"heads": attention.n_heads, "kv_heads": attention.n_kv_heads, "d_head": attention.d_head}
    parallel = "parallel, one norm" if card.residual.shared_norm else "parallel"
    out["residual"] = parallel if card.residual.parallel else "sequential"
    in_table = isinstance(position, Learned) or (isinstance(position, Sinusoidal) and position.table)
    out["position"] = "table" if in_table else str(position.__struct_config__.tag)
    out["head"] = "labels" if card.head.kind in ("tokens", "sequence", "replaced") else card.head.kind
    out["context"] = card.context
    return out


def by_part(gathered: Gathered, found: Comparison) -> dict[str, int]:
    """Numbers in the model's tensors by part, the largest first."""
    parts: Counter[str] = Counter()
    weights, tensors = set(found.weights), gathered.tensors
    for names, role in found.file.roles.items():
        part = part_of(names[0])
        for stored in role.names.values():
            parts[part] += sum([tensors[name].numel for name in stored if name in weights])
    return {part: n for part, n in parts.most_common() if n}
