"""What the tests of layouts share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import scantling as sc
from scantling.cards import preset
from scantling.numbers.hardware import device
from scantling.numbers.parallel.communication import fabric
from scantling.numbers.parallel.job import Job
from scantling.numbers.parallel.memory import precision
from scantling.numbers.parallel.work import speed

MakeJob = Callable[..., Job]


def _job(name: str, devices: int, tokens: int, sequences: int, **more: Any) -> Job:
    where = device(more.pop("device", "a100-80gb"))
    return Job(
        model=sc.assemble(preset(name)),
        devices=devices,
        tokens=tokens,
        sequences=sequences,
        speed=speed(where, "bf16"),
        fabric=more.pop("fabric", fabric(where, devices)),
        memory=where.memory_bytes or 0,
        precision=precision(more.pop("precision", "mixed")),
        **more,
    )


@pytest.fixture(scope="session")
def job() -> MakeJob:
    """A job on A100s with 80 GB by a preset's name, devices, positions and rows."""
    return _job
