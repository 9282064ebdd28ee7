"""Kinds of caches: what they give is what the whole pass gives, and their bytes are the account's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.conftest import GOLDEN, stacks_of
from tests.test_golden import CLOSE

import scantling as sc
from scantling.generate.keeping import Keeping
from scantling.generate.session import Session, Source, follows_length
from scantling.numbers.cache import cache_bytes
from scantling.parts.moe import MoE
from scantling.parts.part import Workload
from scantling.tensor.store import Int8

NAMES = sorted(p.name for p in (GOLDEN / "tiny").iterdir())
DECODERS = [name for name in NAMES if stacks_of(name) == "decoder"]
PAIRS = [name for name in NAMES if stacks_of(name) == "encoder-decoder"]


@pytest.fixture(scope="module", params=DECODERS)
def case(request: pytest.FixtureRequest) -> tuple[sc.Model, dict[str, Any]]:
    folder = GOLDEN / "tiny" / request.param
    return sc.load(folder), load_file(folder / "io.safetensors")


def walked(lm: sc.Model, io: dict[str, Any], keeping: Keeping, chunk: int | None = None) -> torch.Tensor:
    """Logits (B, 20, V): after the prompt, then after each of the recorded tokens but the last."""
    ids, mask = io["gen_input_ids"], io["gen_attention_mask"]
    session = Session(lm, ids.shape[0], ids.shape[1] + 20, keeping=keeping)
    with torch.inference_mode():
        found = [session.prefill(ids, mask, chunk)]
        found += [session.step(io["expected_ids"][:, ids.shape[1] + i]) for i in range(19)]
    return torch.stack(found, 1)


def test_a_ring_gives_the_recorded_logits(case: Any) -> None:
    lm, io = case
    torch.testing.assert_close(walked(lm, io, Keeping("ring")), io["gen_logits"], **CLOSE)


@pytest.mark.parametrize("kind", ["full", "ring"])
@pytest.mark.parametrize("chunk", [1, 4])
def test_a_prompt_in_chunks_is_the_whole_prompt(case: Any, kind: str, chunk: int) -> None:
    lm, io = case
    if follows_length(lm):
        with pytest.raises(sc.ScantlingInputError, match="dynamic NTK turns keys by the length so far"):
            walked(lm, io, Keeping(kind), chunk)
        return
    torch.testing.assert_close(walked(lm, io, Keeping(kind), chunk), io["gen_logits"], **CLOSE)


# Root mean square change of a logit, as a share of the spread of the logits: measured over all families 0.002 to 0.026
# on these weights, which are drawn at random; with routers 0.040 at most, where an expert changes.
INT8_LOGITS = {False: 0.04, True: 0.06}


def moved(exact: torch.Tensor, kept: torch.Tensor) -> float:
    return float((exact - kept).std() / exact.std())


@pytest.mark.parametrize("kind", ["full", "ring"])
def test_int8_keeps_within_its_stated_error(case: Any, kind: str) -> None:
    lm, io = case
    exact, kept = walked(lm, io, Keeping(kind)), walked(lm, io, Keeping(kind, "int8"))
    routed = any(isinstance(part, MoE) for _, part, _ in lm.parts.walk())
    assert 0 < moved(exact, kept) < INT8_LOGITS[routed]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_moves_no_value_by_more_than_half_a_step(dtype: torch.dtype) -> None:
    new = (torch.randn(3, 2, 50, 16, generator=torch.Generator().manual_seed(0)) * 7).to(dtype)
    new[0, 0, 0] = 0
    kept = Int8((3, 2, 50, 16), dtype, "cpu")
    kept.put((), new)
    largest = new.float().abs().amax(-1, keepdim=True)
    rounding = torch.finfo(dtype).eps * largest
    assert bool(((kept.get(()) - new).abs() <= largest / 254 + rounding).all())
    assert torch.equal(kept.get(()), kept.kept(new))
    assert kept.nbytes == 3 * 2 * 50 * (16 + 4)


@pytest.mark.parametrize("numbers", ["plain", "int8"])
@pytest.mark.parametrize("kind", ["full", "ring"])
def test_bytes_are_the_accounts(case: Any, kind: str, numbers: str) -> None:
    lm, _ = case
    w = Workload(batch=3, tokens=29)
    assert Keeping(kind, numbers).allocate(lm, w).nbytes == cache_bytes(lm.parts, w, "float32", kind, numbers)


def test_a_ring_of_a_windowed_model_is_smaller() -> None:
    lm = sc.load(GOLDEN / "tiny" / "mistral-swa")
    windows = {layer.visibility.window for _, layer, _ in lm.parts.walk() if hasattr(layer, "visibility")}
    (window,) = windows
    w = Workload(tokens=60)
    assert cache_bytes(lm.parts, w, "float32", "ring") * 60 == cache_bytes(lm.parts, w, "float32") * window


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("kind", ["full", "ring"])
def test_pairs_with_a_source(name: str, kind: str) -> None:
    lm, io = sc.load(GOLDEN / "tiny" / name), load_file(GOLDEN / "tiny" / name / "io.safetensors")
    source = Source(io["gen_input_ids"], io["gen_attention_mask"].bool())
    found = {}
    for numbers in ("plain", "int8"):
        session = Session(lm, 2, 21, source=source, keeping=Keeping(kind, numbers))
        with torch.inference_mode():
            rows = [session.prefill(io["expected_ids"][:, :1])]
            rows += [session.step(io["expected_ids"][:, i]) for i in range(1, 20)]
        found[numbers] = torch.stack(rows, 1)
        w = Workload(batch=2, tokens=21, source=source.ids.shape[1])
        assert session.cache.nbytes == cache_bytes(lm.parts, w, "float32", kind, numbers)
    torch.testing.assert_close(found["plain"], io["gen_logits"], atol=2e-4, rtol=1e-4)
    assert 0 < moved(found["plain"], found["int8"]) < INT8_LOGITS[False]


def test_a_session_goes_back_and_forth(case: Any) -> None:
    """Positions that were forgotten leave no trace, and several at once score as one by one."""
    lm, io = case
    if follows_length(lm):
        return  # by design: a pass of several tokens turns all by its last length
    ids, mask, wanted = io["gen_input_ids"], io["gen_attention_mask"], io["expected_ids"][:, -20:]
    session = Session(lm, ids.shape[0], ids.shape[1] + 20)
    with torch.inference_mode():
        session.prefill(ids, mask)
        session.score(wanted[:, :5].flip(0) * 0 + 3)
        session.rewind(5)
        scored = session.score(wanted[:, :6])
        torch.testing.assert_close(scored, io["gen_logits"][:, 1:7], **CLOSE)
        session.rewind(2)
        torch.testing.assert_close(session.step(wanted[:, 4]), io["gen_logits"][:, 5], **CLOSE)


def test_rows_change_places(case: Any) -> None:
    lm, io = case
    ids, mask, wanted = io["gen_input_ids"], io["gen_attention_mask"], io["expected_ids"][:, -20:]
    order = torch.tensor([2, 0, 0, 1])
    session = Session(lm, ids.shape[0], ids.shape[1] + 20)
    with torch.inference_mode():
        session.prefill(ids, mask)
        session.select(order)
        torch.testing.assert_close(session.step(wanted[order, 0]), io["gen_logits"][order, 1], **CLOSE)


def test_what_cannot_be_is_refused() -> None:
    lm = sc.load(GOLDEN / "tiny" / "mistral-swa")
    with pytest.raises(sc.ScantlingInputError, match="unknown kind of cache 'square'"):
        Keeping("square")
    with pytest.raises(sc.ScantlingInputError, match="unknown kind of numbers in a cache 'int3'"):
        Session(lm, 1, 4, keeping=Keeping("full", "int3"))
    session = Session(lm, 1, 40, keeping=Keeping("ring"))
    session.prefill(torch.ones(1, 30, dtype=torch.int64))
    with pytest.raises(sc.ScantlingInputError, match="a ring cache cannot go back"):
        session.rewind(1)
    with pytest.raises(sc.ScantlingInputError, match="made for 40 positions and 41 are needed"):
        session.score(torch.ones(1, 11, dtype=torch.int64))
    with pytest.raises(sc.ScantlingInputError, match="prefill chunk is 0"):
        Session(lm, 1, 40).prefill(torch.ones(1, 30, dtype=torch.int64), chunk=0)
