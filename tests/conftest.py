"""What every test shares: where the recorded data is, and the real weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parent / "data"
GOLDEN = DATA / "golden"


def golden_json(name: str) -> Any:
    """A recorded table."""
    return json.loads((GOLDEN / name).read_text())


def stacks_of(name: str) -> str:
    """Which stacks a recorded tiny model has: decoder, encoder or encoder-decoder."""
    from scantling.checkpoint.families import FAMILIES

    config = json.loads((GOLDEN / "tiny" / name / "config.json").read_text())
    return FAMILIES[config["model_type"]].stacks


@pytest.fixture(scope="session")
def smollm() -> Any:
    """SmolLM2-135M-Instruct, dequantised to float32."""
    import scantling

    return scantling.load()
