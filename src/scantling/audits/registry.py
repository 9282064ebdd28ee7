"""The probes, in the order in which they are asked, and what each asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from scantling.audits.draw import Effort
from scantling.audits.finding import Finding, Verdict
from scantling.audits.protocol import Subject


@dataclass(frozen=True)
class Plant:
    """A subject with a known fault, or with what only looks like one.

    Attributes:
        what: it is.
        make: the subject.
        faulty: it must be found; otherwise nothing may be called a defect.
        verdict: where nothing may be called a defect, what it must be called; None for any other verdict.
        crashes: the fault is that it crashes.
    """

    what: str
    make: Callable[[], Subject]
    faulty: bool = True
    verdict: Verdict | None = None
    crashes: bool = False


@dataclass(frozen=True)
class Probe:
    """One audit.

    Attributes:
        name: on the command line and in reports.
        asks: what it asks, in one line.
        run: the answers.
        plants: what proves that it works: faults that it must find, and near-faults that it must let pass.
    """

    name: str
    asks: str
    run: Callable[[Subject, Effort], Sequence[Finding]]
    plants: Sequence[Plant] = field(default_factory=tuple)
