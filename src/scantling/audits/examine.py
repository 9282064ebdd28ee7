"""Every probe on one subject."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from scantling.audits.ask import REFUSALS, could_not, crashed, merged
from scantling.audits.draw import ORDINARY, Effort
from scantling.audits.finding import Finding, Verdict
from scantling.audits.probes import PROBES
from scantling.audits.protocol import Subject
from scantling.audits.registry import Probe
from scantling.errors import ScantlingInputError, nearest

SHORTEST = 12
"""Positions that a model must have to be asked at all."""


@dataclass(frozen=True)
class Report:
    """What an audit found.

    Attributes:
        name: of the subject.
        asked: names of the probes, in order.
    """

    name: str
    asked: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def defects(self) -> list[Finding]:
        """The findings that are defects."""
        return [f for f in self.findings if f.verdict is Verdict.DEFECT]

    def of(self, probe: str) -> list[Finding]:
        """The answers of one probe."""
        return [f for f in self.findings if f.probe == probe]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        counts = {str(v): sum(f.verdict is v for f in self.findings) for v in Verdict}
        return {"name": self.name, "counts": counts, "findings": [f.as_json() for f in self.findings]}


def examine(
    subject: Subject,
    probes: Iterable[str] | None = None,
    effort: Effort = ORDINARY,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Ask the probes of these names, or all.

    Args:
        progress: called with the name of each probe before it runs.

    Raises:
        ScantlingInputError: no such probe.
    """
    chosen = named(probes)
    found: list[Finding] = []
    for probe in chosen:
        if progress is not None:
            progress(probe.name)
        found += answers(probe, subject, effort)
    return Report(subject.name, tuple(p.name for p in chosen), tuple(found))


def named(names: Iterable[str] | None) -> Sequence[Probe]:
    """Probes by name, in the registry's order.

    Raises:
        ScantlingInputError: no such probe.
    """
    if names is None:
        return list(PROBES.values())
    wanted = list(names)
    for name in wanted:
        if name not in PROBES:
            raise ScantlingInputError(f"no probe {name!r}{nearest(name, PROBES)}; known: {', '.join(PROBES)}")
    return [probe for name, probe in PROBES.items() if name in wanted]


def answers(probe: Probe, subject: Subject, effort: Effort = ORDINARY) -> list[Finding]:
    """What one probe says, answers that are alike put together."""
    context = subject.facts.context
    if context is not None and context < SHORTEST:
        return [could_not(probe.name, f"it has {context} positions; the rows of an audit have at least {SHORTEST}")]
    module = subject.can.module
    modes = {} if module is None else {m: m.training for m in module.modules()}
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(effort.seed)
            return merged(list(probe.run(subject, effort)))
    except REFUSALS as error:
        return [could_not(probe.name, f"it refuses: {str(error).strip()[:200]}")]
    except Exception as error:
        return [crashed(probe.name, error)]
    finally:
        for m, was in modes.items():
            m.training = was
