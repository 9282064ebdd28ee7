"""What a pass must read, and the bounds that follow, against arithmetic written out here and predicates."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tests.test_laws import WITH_DECODER

import scantling as sc
from scantling.cards.schema import Card
from scantling.cli.main import _run
from scantling.numbers.cache import cache_bytes, cache_read
from scantling.numbers.hardware import device
from scantling.numbers.memory import memory
from scantling.numbers.reading import read_per_token, weights_read
from scantling.numbers.roofline import Formats, roofline
from scantling.parts.part import Workload
from scantling.tensor.cache import RingCache


def told(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    assert _run([*args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_decode_of_llama_3_8b_is_bound_by_its_bytes() -> None:
    """Weights but the input table once, plus 131,072 bytes a position and row; 3.35 TB/s; 2 FLOPs a weight."""
    row, t, b = device("h100"), 8192, 4
    products = 32 * (4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336) + 128256 * 4096
    norms, one_row = 65 * 4096, 4096
    found = roofline(sc.assemble(sc.card("llama-3-8b")), row, Workload(b, t))
    decode, prefill = found.decode, found.prefill
    assert decode.weight_bytes == 2 * (products + norms + one_row)
    assert decode.cache_bytes == b * t * 131072
    assert decode.flops == b * (2 * products + 4 * 32 * t * 4096)
    assert decode.binds == "memory"
    assert decode.tokens_per_second == pytest.approx(b * 3.35e12 / (decode.weight_bytes + decode.cache_bytes))
    assert found.ridge == pytest.approx(989.4e12 / 3.35e12)
    # The head reads the last position of each row only.
    blocks = products - 128256 * 4096
    pairs = t * (t + 1) // 2
    assert prefill.flops == b * (2 * t * blocks + 4 * 32 * pairs * 4096 + 2 * 128256 * 4096)
    assert prefill.binds == "compute"
    assert prefill.tokens_per_second == pytest.approx(b * t * 989.4e12 / prefill.flops)
    assert found.resident_bytes == 2 * 8030261248 + b * t * 131072
    assert found.fits


def test_a_large_batch_of_short_rows_is_bound_by_arithmetic() -> None:
    model, row = sc.assemble(sc.card("llama-3-8b")), device("h100")
    assert roofline(model, row, Workload(256)).decode.binds == "memory"
    assert roofline(model, row, Workload(512)).decode.binds == "compute"
    assert not roofline(model, device("l4"), Workload(64, 8192)).fits


def test_a_mixture_reads_more_experts_with_more_rows() -> None:
    """Mixtral, 2 of 8: one row enters 2 experts a layer, two rows 8 (1 - 0.75^2) = 3.5 on average, many all 8."""
    model, row = sc.assemble(sc.card("mixtral-8x7b")), device("h100")
    one, two, many = (roofline(model, row, Workload(b)).decode.weight_bytes for b in (1, 2, 4096))
    expert = 32 * 3 * 4096 * 14336 * 2
    assert two - one == round(1.5 * expert)
    assert many - one == 6 * expert
    assert many == 2 * (46702792704 - 32000 * 4096 + 4096)


def test_blocks_of_four_bits_are_read_as_they_are_stored() -> None:
    """18 bytes for 32 weights, norms in float32, one row of the table; products in bfloat16."""
    model, found = sc.assemble(sc.card("llama-3-8b")), Formats("q4_0", "q8_0")
    products = 32 * (4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336) + 128256 * 4096
    assert weights_read(model, "q4_0", 1) == (products + 4096) // 32 * 18 + 65 * 4096 * 4
    decode = roofline(model, device("h100"), Workload(1, 1024), found).decode
    assert decode.cache_bytes == 1024 * 65536 // 32 * 34
    assert decode.compute_seconds == pytest.approx(decode.flops / 989.4e12)


def test_a_window_is_all_that_a_step_reads() -> None:
    """Gemma 2 9B: of 8,192 positions 21 layers see all and 21 see 4,096; 8 heads of 256, keys and values."""
    model = sc.assemble(sc.card("gemma-2-9b"))
    one = 2 * 8 * 256 * 2
    assert cache_read(model, Workload(past=8191), "bfloat16") == 21 * (8192 + 4096) * one
    assert cache_bytes(model, Workload(tokens=8192), "bfloat16") == 42 * 8192 * one
    found = roofline(model, device("h100"), Workload(1, 8192))
    assert found.decode.cache_bytes == found.prefill.cache_bytes == 21 * (8192 + 4096) * one
    assert found.resident_bytes == 2 * model.params + 42 * 8192 * one
    grown = read_per_token(model, 8191, "bfloat16") - read_per_token(model, 4095, "bfloat16")
    assert grown == 21 * 4096 * one


@pytest.mark.parametrize("card", WITH_DECODER.values(), ids=WITH_DECODER)
@pytest.mark.parametrize("past", [0, 3, 13])
def test_what_a_step_sees_is_what_its_predicate_lets_it(card: Card, past: int) -> None:
    model, w = sc.assemble(card), Workload(2, past=past, source=5)
    wanted = 0
    for _, part, _ in model.walk():
        visibility = getattr(part, "visibility", None)
        for _, heads, positions, width in part.state(w).values():
            seen = positions if visibility is None else sum(bool(visibility.sees(past, key)) for key in range(past + 1))
            wanted += 2 * heads * seen * width * 4
    assert cache_read(model, w, "float32") == wanted


def test_an_encoder_has_one_pass_and_no_cache(capsys: pytest.CaptureFixture[str]) -> None:
    """BERT base over 512: 121,244,221,440 FLOPs, and every weight but the looked-up rows of its three tables."""
    found = told(capsys, "roofline", "bert-base-uncased", "--device", "a100-80gb")
    assert "decode" not in found
    assert "prefill" not in found
    forward = found["forward"]
    assert (forward["flops"], forward["cache_bytes"], forward["binds"]) == (121_244_221_440, 0, "compute")
    # Its head is the table of tokens, so that one is read whole.
    rows = 768 + (768 - 512 * 768) + (768 - 2 * 768)
    assert forward["weight_bytes"] == 2 * (109_514_298 + rows)


def test_a_source_is_read_once_and_then_only_seen(capsys: pytest.CaptureFixture[str]) -> None:
    """T5 small, S 100, T 50: a step enters the decoder without the keys and values of the source, and the head."""
    run = ["roofline", "t5-small", "--device", "h100", "--context", "50", "--source-tokens", "100"]
    found = told(capsys, *run)
    assert found["source_tokens"] == 100
    d, d_ff, v, layers = 512, 2048, 32128, 6
    layer = 4 * d * d + 2 * d * d + 2 * d * d_ff + 3 * d
    # One row of the table to look up, one of the distances; the table again as the head; the last norm.
    assert found["decode"]["weight_bytes"] == 2 * (layers * layer + d + 8 + v * d + d)
    assert found["decode"]["cache_bytes"] == 2 * 2 * layers * d * (50 + 100)
    assert found["prefill"]["weight_bytes"] == 2 * 60_506_624
    assert found["prefill"]["cache_bytes"] == 2 * 2 * layers * d * (1 + 100)
    assert _run(run) == 0
    assert "S 100 of the source" in capsys.readouterr().out


def test_expanded_latents_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["roofline", "deepseek-v3", "--device", "h200", "--context", "64"]) == 0
    assert "latents that every step expands" in capsys.readouterr().out
    assert _run(["roofline", "gpt2", "--device", "h200", "--context", "64"]) == 0
    assert "latents" not in capsys.readouterr().out


class TestRings:
    def test_a_long_text_of_gemma_3(self, capsys: pytest.CaptureFixture[str]) -> None:
        """22 layers keep 512 positions and 4 keep all: keys and values of one head of 256 are 1,024 bytes."""
        run = ["memory", "gemma-3-1b", "--tokens", "32768"]
        whole, rings = told(capsys, *run), told(capsys, *run, "--cache", "ring")
        assert whole["kv_cache_bytes"] == 26 * 32768 * 1024
        assert rings["kv_cache_bytes"] == (22 * 512 + 4 * 32768) * 1024
        assert rings["kv_cache_bytes_per_token"] == 4 * 1024
        assert whole["peak_bytes"] - rings["peak_bytes"] == whole["kv_cache_bytes"] - rings["kv_cache_bytes"]

    def test_the_line_is_what_is_allocated(self) -> None:
        model, w = sc.assemble(sc.card("gemma-2-2b")), Workload(3, 6000)
        reaches = {
            f"{path}:{name}": part.visibility.reach
            for path, part, _ in model.walk()
            if hasattr(part, "visibility")
            for name in part.state(w)
        }
        for numbers in ("plain", "int8"):
            made = RingCache(model.named_state(w), reaches, torch.bfloat16, "meta", numbers)
            assert memory(model, w, "bfloat16", "bfloat16", kind="ring", numbers=numbers).kv == made.nbytes

    def test_more_fits_into_rings_and_one_more_does_not(self, capsys: pytest.CaptureFixture[str]) -> None:
        run = ["memory", "gemma-3-1b", "--fit", "6GiB"]
        whole, rings = (told(capsys, *run, "--cache", kind)["fit"]["tokens"] for kind in ("full", "ring"))
        assert rings > whole
        run = ["memory", "gemma-3-1b", "--cache", "ring", "--tokens"]
        peaks = [told(capsys, *run, str(tokens))["peak_bytes"] for tokens in (rings, rings + 1)]
        assert peaks[0] <= 6 * 2**30 < peaks[1]

    def test_pages_are_of_a_full_cache(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert _run(["memory", "gemma-3-1b", "--cache", "ring", "--page", "16"]) == 2
        assert "a ring is allotted whole" in capsys.readouterr().err
        assert _run(["memory", "gemma-3-1b", "--train", "--cache", "ring"]) == 2
        assert "--cache is of inference" in capsys.readouterr().err
