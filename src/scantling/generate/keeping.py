"""How keys and values are kept: whole or as rings, as they are or in 8 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from scantling.errors import ScantlingInputError
from scantling.parts.part import Workload
from scantling.tensor.cache import Cache, RingCache

if TYPE_CHECKING:
    from scantling.model import Model
    from scantling.parts.transformer import Transformer

KINDS = ("full", "ring")


@dataclass(frozen=True)
class Keeping:
    """How a session keeps keys and values.

    Attributes:
        kind: ``full``, or ``ring``, which keeps of a layer only the positions that it can still read.
        numbers: ``plain``, or ``int8``, which keeps a vector within max |x| / 254 of each of its values.
    """

    kind: str = "full"
    numbers: str = "plain"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ScantlingInputError(f"unknown kind of cache {self.kind!r}: use one of {', '.join(KINDS)}")

    def allocate(self, model: Model, w: Workload) -> Cache:
        """An empty cache for `w.keys` positions of `w.batch` rows."""
        shapes, place = model.parts.named_state(w), (model.dtype, model.device, self.numbers)
        return RingCache(shapes, reaches(model.parts), *place) if self.kind == "ring" else Cache(shapes, *place)


def reaches(parts: Transformer) -> dict[str, int | None]:
    """By the path of each slot of the cache how many positions a query reads; None where there is no limit."""
    return {
        f"{path}:{name}": part.visibility.reach
        for path, part, _ in parts.walk()
        if hasattr(part, "visibility")
        for name in part.state(Workload())
    }
