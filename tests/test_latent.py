"""Latent attention: what it caches, what it costs, how it is scaled, and that no kernel stores the scores."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from tests.conftest import GOLDEN, golden_json
from torch.utils._python_dispatch import TorchDispatchMode

import scantling as sc
from scantling.cards.read import from_dict
from scantling.checkpoint.hf_config import card_of_config
from scantling.numbers.count import count
from scantling.numbers.flops import flops
from scantling.numbers.memory import memory
from scantling.parts.latent import LatentAttention
from scantling.parts.part import Workload, total
from scantling.tensor.context import Context

PARAMS = golden_json("params.json")


def published(name: str) -> Any:
    config = json.loads((GOLDEN / "configs" / f"{name}.json").read_text())
    return sc.assemble(card_of_config(config, name, name))


def attention(model: Any) -> LatentAttention:
    part = model.decoder.blocks[0].children()["attn"]
    assert isinstance(part, LatentAttention)
    return part


@pytest.mark.parametrize(("name", "bytes_per_token"), [("deepseek-v2-lite", 31104), ("deepseek-v3", 70272)])
def test_the_cache_holds_latents_and_one_key(name: str, bytes_per_token: int) -> None:
    model = published(name)
    m = memory(model, Workload(batch=3, tokens=10), "bfloat16", "bfloat16")
    assert m.kv_per_token == bytes_per_token == PARAMS[name]["kv_cache_measured"]["bytes_per_token_16bit"]
    assert m.kv == 30 * bytes_per_token
    kept = model.named_state(Workload(tokens=10))
    rows = [step for step in model.steps(Workload(tokens=10)) if step.path in kept]
    assert 2 * sum(step.numel * step.repeat for step in rows) == 10 * bytes_per_token


def test_the_scale_carries_the_square_of_mscale() -> None:
    lite, large = (attention(published(name)) for name in ("deepseek-v2-lite", "deepseek-v3"))
    assert lite.scale == pytest.approx(192**-0.5 * (0.1 * 0.707 * math.log(40) + 1) ** 2, rel=1e-12)
    assert large.scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2, rel=1e-12)
    # With both mscales equal nothing is left for the cosines.
    assert lite.position.scaling.factor_on_turns == large.position.scaling.factor_on_turns == 1.0  # type: ignore[attr-defined]


def test_a_decoded_token_pays_for_the_keys_and_values_of_all_positions_before_it() -> None:
    part = attention(published("deepseek-v3"))
    here, later = (total(part.steps(Workload(past=p)), "flops") for p in (0, 1000))
    expanded = 2 * 512 * 128 * (128 + 128)
    read = 2 * 128 * (192 + 128)
    assert later - here == 1000 * (expanded + read)
    kernels = [total(part.steps(Workload(tokens=9, past=4, kernel=k)), "flops") for k in ("fused", "reference")]
    assert kernels[0] == kernels[1]


def test_projections_and_the_square_are_told_apart() -> None:
    model = published("deepseek-v2-lite")
    by_part = flops(model, Workload(tokens=100)).by_part
    per_layer = 2048 * 16 * 192 + 2048 * 576 + 512 * 16 * 256 + 16 * 128 * 2048
    assert by_part["attention projections"] == 2 * 100 * 27 * per_layer
    assert by_part["scores and mix"] == 2 * 27 * 16 * 100 * 100 * (192 + 128)
    assert count(model).by_part["attention"] == 27 * per_layer


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v2-qlora-groups", "deepseek-v3"])
def test_flops_are_those_that_torch_counts_in_the_original(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    from torch.utils.flop_counter import FlopCounterMode

    folder = GOLDEN / "tiny" / name
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    original = transformers.AutoModelForCausalLM.from_pretrained(folder, **plain)
    ids = torch.randint(0, 131, (2, 9), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        cache = original(ids, use_cache=True).cache
    model = sc.load(folder).parts
    assert counter.get_total_flops() == flops(model, Workload(batch=2, tokens=9)).forward
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        original(ids[:, :1], cache=cache)
    assert counter.get_total_flops() == flops(model, Workload(batch=2, tokens=1, past=9)).forward


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else [out]:
            if isinstance(value, torch.Tensor):
                self.numel = max(self.numel, value.numel())
        return out


@pytest.mark.parametrize("padded", [False, True])
def test_a_long_prompt_never_stores_the_scores(padded: bool) -> None:
    part = LatentAttention(16, n_heads=2, kv_rank=8, d_nope=4, d_rope=2, d_value=3, eps=1e-6, scale=0.4)
    net, x, tokens = part.build(), torch.randn(1, 1500, 16, generator=torch.Generator().manual_seed(0)), 1500
    padding = torch.ones(1, tokens, dtype=torch.bool)
    padding[0, :7] = not padded
    contexts = [
        Context(1, tokens, torch.device("cpu"), padding=padding if padded else None, kernel_name=kernel)
        for kernel in ("fused", "reference")
    ]
    with Largest() as largest, torch.inference_mode():
        fused = net(x, contexts[0])
    assert largest.numel < tokens * tokens
    with torch.inference_mode():
        torch.testing.assert_close(fused, net(x, contexts[1]), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"position": {"kind": "learned"}}, "latent attention needs rope"),
        ({"attention": {"d_rope": 3}}, r"attention\.d_rope is 3"),
        ({"position": {"kind": "rope", "theta": 1e4, "d_rotary": 6}}, r"position\.d_rotary is 6"),
        ({"pattern": [{"attention": {"d_rope": 5}}]}, r"pattern\[0\]\.attention\.d_rope is 5"),
        ({"attention": {"n_kv_heads": 2}}, r"unknown key 'attention\.n_kv_heads'"),
    ],
)
def test_cards_that_make_no_sense_are_refused(change: dict[str, Any], words: str) -> None:
    latent = {"kind": "latent", "n_heads": 2, "kv_rank": 8, "d_nope": 4, "d_rope": 4, "d_value": 3, "eps": 1e-6}
    data: dict[str, Any] = {
        "name": "latent",
        "family": "decoder",
        "n_layers": 1,
        "d_model": 16,
        "vocab_size": 11,
        "context": 16,
        "position": {"kind": "rope", "theta": 1e4},
        "norm": {"kind": "rmsnorm", "eps": 1e-6},
        "mlp": {"kind": "gated", "act": "silu"},
        "tied": False,
        **change,
        "attention": {**latent, **change.get("attention", {})},
    }
    with pytest.raises(sc.ScantlingInputError, match=words):
        from_dict(data, "latent")
