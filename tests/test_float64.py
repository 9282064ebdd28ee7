"""The tiny models in double precision, where rounding cannot hide a small mistake.

`float64.json` has, per model, the recorded float64 logits of every 16th token at the last position of row 0. The
original code rounds to float32 inside even then: softmax nearly everywhere, RoPE's angles, and every RMSNorm.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from tests.conftest import GOLDEN, golden_json

import scantling as sc
from scantling.parts.leaf import RMSNorm

RECORDED = golden_json("float64.json")
NOTHING_ROUNDED = {"gpt2", "gpt2-untied-invlayer", "openai-gpt-postnorm", "falcon-mqa-parallel", "falcon-gqa-newarch"}
"""Layer norms, and softmax inside torch's own double-precision kernel, in the original too."""


@pytest.mark.parametrize("name", RECORDED)
def test_double_precision(name: str) -> None:
    lm = sc.load(GOLDEN / "tiny" / name)
    lm.net.double()
    ids = load_file(GOLDEN / "tiny" / name / "io.safetensors")["input_ids"][:1]
    with torch.no_grad():
        logits = lm.net(ids)[0, -1, ::16]
    assert logits.dtype == torch.float64
    worst = float((logits - torch.tensor(RECORDED[name], dtype=torch.float64)).abs().max())
    rounded = any(isinstance(part, RMSNorm) for _, part, _ in lm.parts.walk())
    assert worst < (1e-12 if name in NOTHING_ROUNDED else 1e-5 if rounded else 1e-6)
