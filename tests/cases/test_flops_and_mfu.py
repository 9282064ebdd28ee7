"""Cases about FLOPs and MFU."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from tests.cases.small import LLAMA
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

import scantling as sc
from scantling.cards.read import from_dict
from scantling.cli.main import _run
from scantling.numbers import mfu
from scantling.numbers.cost import CONVENTIONS, work
from scantling.numbers.flops import Flops, flops
from scantling.numbers.hardware import device
from scantling.numbers.phases import phases
from scantling.parts.part import Workload
from scantling.parts.transformer import Transformer
from scantling.study.verify import verify


def decoder(attention: dict[str, Any], **keys: Any) -> Transformer:
    heads = {"kind": "multi_head", **attention}
    return sc.assemble(from_dict({**LLAMA, "n_layers": 1, "attention": heads, **keys}, "case"))


def mix(found: Flops) -> int:
    """Scores and mix over the full square."""
    return found.by_part["scores and mix"]


def mix_visible(found: Flops) -> int:
    """The same over the pairs that are seen: all else is equal in both counts."""
    return mix(found) - (found.forward - found.forward_visible)


@pytest.mark.parametrize(("name", "per_token"), [("llama-3.2-1b", 2_471_493_632), ("llama-3-8b", 15_009_316_864)])
def test_a_lookup_costs_nothing_and_the_head_costs_2_v_d(name: str, per_token: int) -> None:
    """FLP-01: tied or not, the head is a product of V d and the input table none."""
    card = sc.card(name)
    found = flops(sc.assemble(card), Workload(tokens=128))
    assert found.forward - mix(found) == 128 * per_token
    assert found.by_part["head"] == 128 * 2 * card.vocab_size * card.d_model
    assert "embedding" not in found.by_part


def test_scores_cost_the_query_heads_and_the_keys_that_are_seen() -> None:
    """FLP-03: 4 T H d_head with 8 KV heads or with 32; a window of 4096 leaves 3072.25 keys on average, not 4096.5."""
    t, wide = 8192, {"d_model": 4096, "context": 8192}
    heads = {"n_heads": 32, "d_head": 128}
    every = flops(decoder({**heads, "n_kv_heads": 32}, **wide), Workload(tokens=t))
    grouped = flops(decoder({**heads, "n_kv_heads": 8}, **wide), Workload(tokens=t))
    assert mix(every) == mix(grouped) == t * 134_217_728
    assert every.by_part["attention projections"] > grouped.by_part["attention projections"]
    near = decoder({**heads, "n_kv_heads": 8, "window": 4096}, **wide)
    assert mix_visible(grouped) / t == 4 * 32 * 128 * 4096.5
    assert mix_visible(flops(near, Workload(tokens=t))) / t == 4 * 32 * 128 * 3072.25
    assert mix_visible(flops(near, Workload(tokens=1, past=t - 1))) == 67_108_864


def test_conventions_have_names_and_more_than_the_peak_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """FLP-04: 189 TFLOP/s counted over the full square are 378, 121.15 % of 312; the exact causal count is half."""
    args = ["cost", "--params", "7B", "--train-tokens", "1T", "--device", "a100-80gb", "--tflops"]
    assert _run([*args, "378"]) == 2
    assert "MFU would be 121.2 % of a dense peak of 312 TFLOP/s" in capsys.readouterr().err
    assert _run([*args, "189"]) == 0
    capsys.readouterr()
    # With T far above d nearly all is attention, and causal work is half of the square.
    model = decoder({"n_heads": 4, "d_head": 8}, context=2**20)
    counted = work(model, 2**20, 2**20).flops
    assert list(counted) == list(CONVENTIONS) == ["6nd", "full", "causal", "visible"]
    assert counted["full"] / counted["causal"] == pytest.approx(2, rel=1e-3)


def test_a_kernel_that_computes_scores_again_does_seven_products_where_six_are_counted() -> None:
    """FLP-04: per token and head channel 12 T over the square, 6 T over the causal half, 7 T with the scores again."""
    t, heads, d_head = 2**12, 4, 8
    model, w = decoder({"n_heads": heads, "d_head": d_head}, context=t), Workload(tokens=t)
    found, step = flops(model, w), phases(model, w)[-1]
    rest = found.training - 3 * mix(found)
    one = heads * d_head * t * t
    assert found.training - rest == 12 * one
    # The causal half holds the diagonal too.
    half = heads * d_head * t * (t + 1)
    assert found.training_visible - rest == 6 * half
    assert step.hardware.visible - rest == 7 * half


def test_the_peak_is_dense_and_of_its_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    """FLP-05: 312 in bf16 is the A100's, 624 has sparsity, and 156 would double the MFU."""
    assert device("a100-80gb").peak("bf16") == 312e12
    run = ["cost", "--params", "7B", "--train-tokens", "1T", "--device", "a100-80gb", "--tflops", "124.8"]
    assert _run(run) == 0
    assert "40.0 % of the dense peak in bf16, 312 TFLOP/s" in capsys.readouterr().out
    for peak in ("156", "624"):
        assert _run([*run, "--peak", peak]) == 2
    assert mfu.mfu(124.8e12, 1.0, 1, 312e12) == pytest.approx(0.4)


def test_attention_is_counted_and_the_counter_sees_it_on_the_math_kernel() -> None:
    """FLP-07: 12 heads of 64 over 64 positions: 4 * 12 * 64^3; torch's counter misses a fused kernel."""
    model = decoder({"n_heads": 12, "d_head": 64}, d_model=768)
    assert mix(flops(model, Workload(tokens=64))) == 12_582_912 == 4 * 12 * 64**3
    q = torch.zeros(1, 12, 64, 64)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        scaled_dot_product_attention(q, q, q, is_causal=True)
    assert counter.get_total_flops() == 12_582_912


def test_twice_the_length_costs_more_than_twice() -> None:
    """FLP-09: a layer of 24 d^2 + 4 T d at d = 4096 costs 2.5 times as much at 16384 as at 8192."""
    mlp = {"kind": "plain", "act": "gelu", "d_ff": 16384}
    model = decoder({"n_heads": 32, "d_head": 128}, d_model=4096, context=16384, mlp=mlp)
    short, long = (flops(model, Workload(tokens=t)) for t in (8192, 16384))
    assert (long.forward - long.by_part["head"]) / (short.forward - short.by_part["head"]) == 2.5
    assert long.rule_6n == 2 * short.rule_6n


def test_gpt2_small_on_eight_a100() -> None:
    """FLP-13: 480 rows of 1024, 600,000 steps, 4 days: 29.2 % of 312 TFLOP/s, by 6N + 12 L H d_head T or exactly."""
    model = sc.assemble(sc.card("gpt2"))
    n, tokens, day = 123_653_376, 480 * 1024 * 600_000, 86400
    rule = 6 * n + 12 * 12 * 12 * 64 * 1024
    assert (rule, n) == (855_166_464, model.params - 1024 * 768)
    exact = work(model, tokens, 1024).flops["full"]
    assert exact == 854_438_400 * tokens
    peak = device("a100-40gb").peak("bf16")
    assert mfu.mfu(rule * tokens, 4 * day, 8, peak) == pytest.approx(0.292, abs=5e-4)
    assert mfu.mfu(exact, 4 * day, 8, peak) == pytest.approx(0.292, abs=5e-4)


def test_packed_documents_cost_the_sum_of_their_squares() -> None:
    """FLP-14: 4096, 2048, 1024 and 1024 tokens cost 23,068,672 pairs, one row of 8192 costs 67,108,864."""
    model = decoder({"n_heads": 4, "d_head": 8}, context=8192)
    documents = sum(mix(flops(model, Workload(tokens=t))) for t in (4096, 2048, 1024, 1024))
    row = mix(flops(model, Workload(tokens=8192)))
    assert (documents, row) == (4 * 32 * 23_068_672, 4 * 32 * 67_108_864)
    assert row / documents == pytest.approx(2.909, abs=5e-4)


def test_the_same_count_three_times() -> None:
    """FLP-15: predicted and counted while it runs, in one process."""
    model = decoder({"n_heads": 4, "d_head": 8})
    found = [
        [(row.predicted, row.counted) for row in verify(model) if "FLOP" in row.what and row.counted is not None]
        for _ in range(3)
    ]
    assert found[0]
    assert found[0] == found[1] == found[2]
    assert all(predicted == counted for predicted, counted in found[0])


FIRST = """
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
import scantling as sc
from scantling.cards.read import from_dict
net = sc.assemble(from_dict({card!r}, "case")).build()
with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
    net(torch.zeros(1, 8, dtype=torch.int64))
print(counter.get_total_flops())
"""


def test_the_first_pass_of_a_mixture_is_counted_whole() -> None:
    """FLP-07: in a new process, on the CPU, a counter that is made before anything ran sees the experts too."""
    expert = {"kind": "gated", "act": "silu", "d_ff": 12}
    card = {**LLAMA, "mlp": {"kind": "moe", "n_experts": 4, "top_k": 2, "expert": expert}}
    run = subprocess.run(
        [sys.executable, "-c", FIRST.format(card=card)], capture_output=True, text=True, check=True, env=os.environ
    )
    assert int(run.stdout) == flops(sc.assemble(from_dict(card, "case")), Workload(tokens=8)).forward
