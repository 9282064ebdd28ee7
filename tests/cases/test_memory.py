"""Cases about the sizes of weights and caches."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import scantling as sc
from scantling.cards.read import from_dict, to_yaml
from scantling.cli.main import _run
from scantling.numbers.memory import read_per_token
from scantling.parts.part import Workload
from scantling.tensor.cache import Cache

QWEN3_4B: dict[str, Any] = {
    "name": "qwen3-4b",
    "family": "decoder",
    "n_layers": 36,
    "d_model": 2560,
    "vocab_size": 151936,
    "context": 40960,
    "attention": {
        "kind": "multi_head",
        "n_heads": 32,
        "n_kv_heads": 8,
        "d_head": 128,
        "qk_norm": {"kind": "rmsnorm", "eps": 1e-6},
    },
    "position": {"kind": "rope", "theta": 1e6},
    "norm": {"kind": "rmsnorm", "eps": 1e-6},
    "mlp": {"kind": "gated", "act": "silu", "d_ff": 9728},
    "tied": True,
}


def told(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    """What `scantling memory` says."""
    assert _run(["memory", *args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_cache_of_heads_whose_width_is_their_own(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    """MEM-01: 2 x 36 x 8 x 128 x 2 bytes; with d / H for the head it would be 92,160."""
    path = tmp_path / "qwen3-4b.yaml"
    path.write_text(to_yaml(from_dict(QWEN3_4B, "qwen3-4b")))
    assert told(capsys, str(path))["kv_cache_bytes_per_token"] == 147456 != 2 * 36 * 8 * (2560 // 32) * 2
    assert sc.assemble(sc.card(path)).params == 4022468096


def test_the_cache_counts_the_width_once(capsys: pytest.CaptureFixture[str]) -> None:
    """MEM-03: half a MiB per token, and not eight times that."""
    assert told(capsys, "llama-2-7b", "--cache-dtype", "fp16")["kv_cache_bytes_per_token"] == 524288


def test_a_step_reads_the_cache_of_the_kv_heads(capsys: pytest.CaptureFixture[str]) -> None:
    """MEM-04: 8192 x 131,072 bytes allocated and read, eight heads in every slot."""
    w = Workload(1, 1, 8191)
    model = sc.assemble(sc.card("llama-3-8b"))
    m = told(capsys, "llama-3-8b", "--tokens", "1", "--past", "8191")
    assert m["kv_cache_bytes"] == 8192 * 131072 == 1073741824
    cache = Cache(model.named_state(w), torch.bfloat16, "meta")
    assert cache.nbytes == 1073741824
    assert {shape[1] for shape in cache.shapes.values()} == {8}
    assert len(cache.shapes) == 2 * 32
    read = read_per_token(model, 8191, "bfloat16") - read_per_token(model, 0, "bfloat16")
    assert read == 8191 * 131072


@pytest.mark.parametrize(
    ("options", "each", "gib"),
    [
        (["--precision", "bf16-master"], [2, 4, 2, 4, 4, 0], 18.42),
        (["--precision", "bf16-master", "--main-gradients"], [2, 4, 4, 4, 4, 0], 20.72),
        (["--precision", "fp32"], [4, 4, 4, 4, 0], 18.42),
    ],
)
def test_sixteen_or_eighteen_bytes_item_by_item(
    capsys: pytest.CaptureFixture[str], options: list[str], each: list[int], gib: float
) -> None:
    """MEM-06: gradients in bfloat16 or float32, a master copy and two moments, each on its own line; or all float32."""
    n = sc.assemble(sc.card("llama-3.2-1b")).params
    assert n == 1235814400
    found = told(capsys, "llama-3.2-1b", "--train", "--batch", "1", "--tokens", "8", *options)
    assert [size // n for size in found["states"].values()] == each
    assert sum(found["states"].values()) / 2**30 == pytest.approx(gib, abs=5e-3)
    assert found["weights_bytes"] == found["states"][next(iter(found["states"]))]
