"""What every test shares: where the recorded data is, and the real weights."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

DATA = Path(__file__).parent / "data"
GOLDEN = DATA / "golden"

settings.register_profile("same", derandomize=True)
settings.register_profile("search")
settings.load_profile(os.environ.get("SCANTLING_HYPOTHESIS", "same"))


def golden_json(name: str) -> Any:
    """A recorded table."""
    return json.loads((GOLDEN / name).read_text())


def stacks_of(name: str) -> str:
    """decoder, encoder or encoder-decoder: what the tiny model of that name is."""
    from scantling.checkpoint.families import FAMILIES

    return FAMILIES[golden_json(f"tiny/{name}/config.json")["model_type"]].stacks


@pytest.fixture(scope="session")
def smollm() -> Any:
    """SmolLM2-135M-Instruct, dequantised to float32."""
    import scantling

    return scantling.load()
