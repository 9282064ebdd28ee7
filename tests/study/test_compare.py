"""Cards side by side: every preset, values known from elsewhere, and what counts as a difference."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.conftest import golden_json

import scantling as sc
from scantling.cards import ladder, presets
from scantling.cli.main import _run
from scantling.errors import ScantlingInputError
from scantling.numbers.flops import flops
from scantling.parts.part import Workload
from scantling.study.compare import Row, compare
from scantling.study.facts import reach


def rows(*names: str, tokens: int = 64) -> dict[tuple[str, str], Row]:
    cards = [sc.card(name) for name in names]
    return {(row.section, row.what): row for row in compare(cards, [Workload(1, tokens)] * len(cards))}


@pytest.mark.parametrize("name", [*presets(), *ladder()])
def test_a_card_beside_itself_differs_nowhere(name: str) -> None:
    found = rows(name, name)
    assert not [row.what for row in found.values() if row.differs]
    total = found["parameters", "total"].values[0]
    if name in (params := golden_json("params.json")) and "class_name" not in params[name]:
        assert total == params[name]["total_unique"]
    by_part = [r.values[0] for key, r in found.items() if key[0] == "parameters" and not key[1].endswith("share")]
    active_and_buffers = [found["parameters", what].values[0] for what in _NOT_A_PART]
    assert sum(by_part) - sum(active_and_buffers) == total  # type: ignore[arg-type]
    shares = [r.values[0] for key, r in found.items() if key[1].endswith(", share")]
    assert sum(shares) == pytest.approx(1)  # type: ignore[arg-type]


_NOT_A_PART = ("total", "active per token", "stored besides, trained by no gradient")


def test_all_presets_at_once_have_one_value_a_column() -> None:
    names = presets()
    found = rows(*names, tokens=16)
    assert {len(row.values) for row in found.values()} == {len(names)}
    assert found["choices", "family"].values == tuple(sc.card(name).family for name in names)
    recorded = golden_json("params.json")
    for name, total in zip(names, found["parameters", "total"].values, strict=True):
        if name in recorded and "class_name" not in recorded[name]:
            assert total == recorded[name]["total_unique"], name


def test_llama_2_70b_and_llama_3_8b_by_hand() -> None:
    found = rows("llama-2-70b", "llama-3-8b", tokens=4096)

    def values(section: str, what: str) -> tuple[Any, ...]:
        return found[section, what].values

    assert values("parameters", "total") == (68976648192, 8030261248)
    assert values("sizes", "d_model / layers") == (102.4, 128.0)
    assert values("sizes", "heads") == (64, 32)
    assert values("sizes", "d_ff / d_model") == (3.5, 3.5)
    assert not found["sizes", "d_ff / d_model"].differs
    # 2 (keys and values) x layers x KV heads x head size x 2 bytes.
    assert values("memory", "KV cache per token, bfloat16, bytes") == (2 * 80 * 8 * 128 * 2, 2 * 32 * 8 * 128 * 2)
    assert values("memory", "weights, float32, bytes") == (4 * 68976648192, 4 * 8030261248)
    # Llama 3 8B: products of all weights but the table, and 4 T H D for each of 32 layers.
    products = 2 * (8030261248 - 128256 * 4096 - 65 * 4096)
    assert values("FLOPs", "prefill per token")[1] == products + 32 * 4 * 4096 * 32 * 128
    assert values("FLOPs", "decode, one step at that length")[1] == products + 32 * 4 * 4096 * 32 * 128
    training = 3 * (products + 32 * 4 * 4096 * 32 * 128)
    assert values("FLOPs", "training per token")[1] == training
    # 2 bytes of weights and 4 of each of a master copy, gradients and two moments; a float32 count of each tensor's.
    assert values("memory", "training states, bf16-master, adamw, bytes")[1] == 18 * 8030261248 + 4 * 291
    assert values("cost", "training on 10^12 tokens in such rows, FLOPs")[1] == training * 10**12
    hours = training * 10**12 / (0.4 * 989.4e12) / 3600
    assert values("cost", "device-hours of that on h100 at 40 % of its dense peak")[1] == round(hours)
    read = 2 * (8030261248 - 128256 * 4096 + 4096) + 4096 * 131072
    assert values("cost", "decode at that length on one h100, at most tokens/s")[1] == round(3.35e12 / read)


def test_flops_are_those_that_the_original_was_measured_to_have() -> None:
    real = golden_json("flops.json")["gpt2@B1T1024"]
    prefill = rows("gpt2", tokens=1024)["FLOPs", "prefill, forward, full square"]
    assert prefill.values == (real["total"],)


def test_families_stand_beside_each_other() -> None:
    found = rows("bert-base-uncased", "t5-base", "gpt2")
    assert found["FLOPs", "decode, one step at that length"].values[0] is None
    assert found["cost", "decode at that length on one h100, at most tokens/s"].values[0] is None
    assert found["memory", "KV cache per token, bfloat16, bytes"].values == (0, 36864, 36864)
    assert found["sizes", "layers"].values == (12, "12 + 12", 12)
    assert found["sizes", "heads of cross-attention"].values == (None, 12, None)
    assert found["choices", "reach"].values == ("both ways", "12 x both ways, 12 x causal", "causal")


def test_the_source_of_an_encoder_decoder_has_its_own_length() -> None:
    card = sc.card("t5-base")
    (row,) = [r for r in compare([card], [Workload(1, 64, source=256)]) if r.what == "prefill, forward, full square"]
    assert row.values == (flops(sc.assemble(card), Workload(1, 64, source=256)).forward,)
    # The step of the end reads the 256 of the source and no more.
    (cache,) = [r for r in compare([card], [Workload(1, 64, source=256)]) if r.what.startswith("KV cache at")]
    assert cache.values == (2 * 12 * 12 * 64 * (64 + 256) * 2,)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mistral-7b-v0.1", "causal window 4,096"),
        ("gemma-2-2b", "13 x causal window 4,096, 13 x causal"),
        ("gemma-3-1b", "22 x causal window 512, 4 x causal"),
        ("bert-base-uncased", "both ways"),
        ("deepseek-v3", "causal"),
    ],
)
def test_reach(name: str, text: str) -> None:
    assert reach(sc.assemble(sc.card(name))) == text


def test_a_row_that_one_card_lacks_stands_in_its_place() -> None:
    order = [what for section, what in rows("gpt2", "mixtral-8x7b") if section == "parameters"]
    assert order.index("attention") < order.index("experts") < order.index("norm")


def test_no_card_is_refused() -> None:
    with pytest.raises(ScantlingInputError, match="0 cards and 0 workloads"):
        compare([], [])


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["compare", "llama-2-7b", "llama-3-8b", "t5-base", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["models"] == ["llama-2-7b", "llama-3-8b", "t5-base"]
    assert told["tokens"] == 512
    total = next(row for row in told["rows"] if row["what"] == "total")
    assert total == {
        "section": "parameters",
        "what": "total",
        "values": [6738415616, 8030261248, 222903552],
        "differs": True,
    }
    assert _run(["compare", "llama-2-7b", "llama-3-8b", "--differing"]) == 0
    out = capsys.readouterr().out
    assert all(line.startswith(" *") for line in out.splitlines() if "KV heads" in line)
    assert "d_model / layers" not in out
    assert _run(["compare", "gpt2", "llama-3-8b", "--tokens", "2048"]) == 2
    assert "1024 learned positions" in capsys.readouterr().err
    assert _run(["compare"]) == 2
