"""Cases about the sizes of weights, caches, training states and activations."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import scantling as sc
from scantling.cards.read import from_dict, to_yaml
from scantling.cli.main import _run
from scantling.numbers.reading import read_per_token
from scantling.parts.part import Workload, total
from scantling.tensor.cache import Cache
from scantling.tensor.context import Context
from scantling.tensor.kept import Kept

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


LLAMA_2: dict[str, Any] = {
    "name": "llama-2",
    "family": "decoder",
    "context": 4096,
    "attention": {"kind": "multi_head", "n_heads": 32},
    "position": {"kind": "rope", "theta": 1e4},
    "norm": {"kind": "rmsnorm", "eps": 1e-5},
    "mlp": {"kind": "gated", "act": "silu", "d_ff": 11008},
    "tied": False,
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
        (["--precision", "bf16-master", "--no-main-gradients"], [2, 4, 2, 4, 4, 0], 18.42),
        (["--precision", "bf16-master"], [2, 4, 4, 4, 4, 0], 20.72),
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


def test_activations_are_the_bytes_that_torch_saves(capsys: pytest.CaptureFixture[str]) -> None:
    """MEM-08: not 12 h b s L numbers; 4 layers of d 256 equal the hooks, the float32 of softmax and loss included."""
    small = LLAMA_2 | {"n_layers": 4, "d_model": 256, "vocab_size": 1000, "mlp": {**LLAMA_2["mlp"], "d_ff": 688}}
    small["attention"] = {"kind": "multi_head", "n_heads": 8, "d_head": 32}
    model = sc.assemble(from_dict(small, "small"))
    w = Workload(8, 64, training=True, kernel="reference", dtype="bfloat16")
    net = model.build(dtype="bfloat16").train()
    ids = torch.randint(0, 1000, (8, 64), generator=torch.Generator().manual_seed(0))
    ctx = Context.of(ids, training=True, kernel_name="reference")
    with Kept(net.parameters()) as kept:
        outcome = model.outcome(net, ids, net(ids, ctx), ctx)
    assert kept.nbytes == total(model.steps(w), "saved_bytes")
    assert outcome[1] > 0
    # Of Llama 2 7B by hand, bytes of a layer: norms 6 each (float32 vectors, rounded ones), what each feeds 2, queries,
    # keys, values and their mix 2, the MLP's four 2; of scores float32 weights, bfloat16 ones, and a mask of one byte.
    n, d, d_ff, heads, t = 8 * 512, 4096, 11008, 32, 512
    layer = 2 * (8 * n * d + 4 * n) + 8 * n * d + 6 * 8 * heads * t * t + t * t + 8 * n * d_ff
    run = ["llama-2-7b", "--train", "--batch", "8", "--tokens", "512", "--precision", "bf16", "--kernel", "reference"]
    found = told(capsys, *run)["activations_bytes"]
    rest = found - 32 * layer
    # The last norm and what it feeds, the loss, the ids, the targets, and the tables of turns.
    judged = 8 * 511
    assert rest == 8 * n * d + 4 * n + judged * (32000 * 4 + 8) + 4 + 8 * n + 2 * t * 128 * 2
    assert found > 2.9 * 12 * d * n * 32 * 2
