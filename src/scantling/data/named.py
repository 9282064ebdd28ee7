"""The objectives by their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from scantling.data.masked import MaskedLM
from scantling.data.objectives import Causal, Objective, PrefixLM
from scantling.data.seq2seq import Seq2Seq, SpanCorruption
from scantling.errors import ScantlingInputError, nearest

OBJECTIVES: Mapping[str, Callable[[], Objective]] = {
    kind.name: kind for kind in (Causal, PrefixLM, MaskedLM, Seq2Seq, SpanCorruption)
}


def objective_named(name: str) -> Objective:
    """The objective of a name, with its defaults.

    Raises:
        ScantlingInputError: no such objective.
    """
    if name not in OBJECTIVES:
        raise ScantlingInputError(f"no objective {name!r}{nearest(name, OBJECTIVES)}; known: {', '.join(OBJECTIVES)}")
    return OBJECTIVES[name]()
