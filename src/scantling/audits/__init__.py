"""Audits: the classic failure modes of Transformers, on any model.

This room knows nothing of the program's own models: it judges callables, and writes its own predicates. What a model
is and can do is said by a `Subject`; each file of `probes` asks one question of it and answers with findings.
"""

from scantling.audits.callables import from_callable
from scantling.audits.draw import Effort
from scantling.audits.examine import Report, examine
from scantling.audits.finding import Finding, Verdict
from scantling.audits.protocol import Abilities, Facts, Feed, Subject

__all__ = [
    "Abilities",
    "Effort",
    "Facts",
    "Feed",
    "Finding",
    "Report",
    "Subject",
    "Verdict",
    "examine",
    "from_callable",
]
