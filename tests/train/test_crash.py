"""Kills at random instants: nothing lost, nothing different. `bench/crash.py` is the long form."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "crash.py"


@pytest.mark.slow
def test_ten_kills_lose_nothing_and_change_nothing() -> None:
    command = [sys.executable, str(BENCH), "--kills", "10", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tally = json.loads(done.stdout.splitlines()[-1])
    assert tally["kills"] == 10
    assert tally["runs"] >= 1
    assert (tally["lost"], tally["different"]) == (0, 0)
