"""Every probe finds its planted faults and lets its near-faults pass, and the certificate can fail."""

from __future__ import annotations

import pytest
from tests.audit import page

from scantling.audits.certify import Trial, table, trial
from scantling.audits.finding import Finding, Verdict
from scantling.audits.planted import FAULTS
from scantling.audits.planted_subject import planted
from scantling.audits.probes import PROBES
from scantling.audits.registry import Plant

PLANTS = [(probe, plant) for probe in PROBES.values() for plant in probe.plants]


@pytest.mark.parametrize(("probe", "plant"), PLANTS, ids=[f"{p.name}: {q.what}" for p, q in PLANTS])
def test_faults_are_found_and_near_faults_are_not(probe, plant) -> None:  # type: ignore[no-untyped-def]
    done = trial(probe, plant)
    assert done.passed, [(f.verdict, f.where, f.message) for f in done.findings]


@pytest.mark.parametrize("name", PROBES)
def test_each_probe_has_three_faults_and_two_near_faults(name: str) -> None:
    plants = PROBES[name].plants
    assert sum(plant.faulty for plant in plants) >= 3
    assert sum(not plant.faulty for plant in plants) >= 2
    assert len({plant.what for plant in plants}) == len(plants)


def test_every_fault_of_the_small_transformer_is_planted_somewhere() -> None:
    used = set()
    for _, plant in PLANTS:
        subject = plant.make()
        for twin in (subject, subject.can.reference() if subject.can.reference else subject):
            if twin.can.module is not None:
                used |= set(getattr(twin.can.module, "shape").faults)  # noqa: B009
    assert used == set(FAULTS)


def test_a_certificate_can_fail() -> None:
    """A sound model that is called faulty, a fault that is called sound, and a fault that only crashes."""
    probe = PROBES["future"]
    missed = trial(probe, Plant("sound, called faulty", planted, True))
    alarm = trial(probe, Plant("faulty, called sound", lambda: planted("no mask"), False))
    named = trial(probe, Plant("clean, wanted as rounding", planted, False, Verdict.ROUNDING))
    crash = Finding("future", Verdict.DEFECT, "it crashes", data={"crash": True})
    crashed = Trial("future", Plant("crashes", planted), (crash,))
    assert [t.passed for t in (missed, alarm, named, crashed)] == [False] * 4
    assert Trial("future", Plant("crashes", planted, crashes=True), (crash,)).passed
    (row,) = table([missed, alarm, named, crashed])
    assert (row.planted, row.caught, row.near, row.let_pass) == (2, 0, 2, 0)


def test_the_page_lists_the_probes_as_they_are() -> None:
    """``make docs``, or ``python -m tests.audit.page --write``, rewrites it."""
    assert page.PATH.read_text(encoding="utf-8") == page.page()
    assert all(f"| `{name}` | " in page.table() for name in PROBES)
