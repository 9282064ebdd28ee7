"""Planted faults that each probe must find, and near-faults that it must let pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from scantling.audits.draw import ORDINARY
from scantling.audits.examine import answers, named
from scantling.audits.finding import Finding, Verdict
from scantling.audits.registry import Plant, Probe


@dataclass(frozen=True)
class Trial:
    """One plant and what its probe said of it."""

    probe: str
    plant: Plant
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """A fault was found; or what is none was not called a defect, and was called by its name where it has one."""
        verdicts = [f.verdict for f in self.findings]
        if self.plant.faulty:
            # A plant that crashes by mistake proves nothing.
            return any(
                f.verdict is Verdict.DEFECT and bool(f.data.get("crash")) == self.plant.crashes for f in self.findings
            )
        wanted = self.plant.verdict
        return Verdict.DEFECT not in verdicts and (wanted is None or wanted in verdicts)


def certify(probes: Iterable[str] | None = None) -> list[Trial]:
    """Run the plants of the probes of these names, or of all."""
    return [trial(probe, plant) for probe in named(probes) for plant in probe.plants]


def trial(probe: Probe, plant: Plant) -> Trial:
    """One plant before its probe."""
    return Trial(probe.name, plant, tuple(answers(probe, plant.make(), ORDINARY)))


@dataclass(frozen=True)
class Row:
    """Counts of one probe."""

    probe: str
    planted: int
    caught: int
    near: int
    let_pass: int


def table(trials: Iterable[Trial]) -> list[Row]:
    """Counts per probe."""
    rows: dict[str, list[Trial]] = {}
    for t in trials:
        rows.setdefault(t.probe, []).append(t)
    return [
        Row(
            name,
            sum(t.plant.faulty for t in group),
            sum(t.plant.faulty and t.passed for t in group),
            sum(not t.plant.faulty for t in group),
            sum(not t.plant.faulty and t.passed for t in group),
        )
        for name, group in rows.items()
    ]
