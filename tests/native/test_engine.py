"""The engine over the compiled pass: what each request gives alone, bit for bit, and what PyTorch gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.native.test_session import built

import scantling as sc
from scantling.cli.generate import predicted
from scantling.cli.main import _run
from scantling.generate.batching import Engine, Limits
from scantling.generate.engine import one_by_one
from scantling.generate.packed_pages import PackedPages
from scantling.generate.request import Handle, Request
from scantling.generate.sampling import Sampling
from scantling.generate.settings import Generation, Options
from scantling.generate.speculative import Drafting
from scantling.native import library

pytestmark = pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))
ON = Options(ignore_eos=True, logprobs=0)
LENGTHS = (15, 22, 41, 15, 17, 9)
NEWS = (30, 15, 15, 23, 1, 12)


@pytest.fixture(scope="module")
def lm() -> sc.Model:
    found = built("window")
    found.pack()
    return found


def prompts() -> list[list[int]]:
    """The third begins as the second does, so that a block is shared."""
    draw = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, 70, (n,), generator=draw).tolist() for n in LENGTHS]
    rows[2][:22] = rows[1]
    return rows


def requests(sampling: Sampling | None = None) -> list[Request]:
    return [Request(p, n, sampling or Sampling(), ON) for p, n in zip(prompts(), NEWS, strict=True)]


def together(lm: sc.Model, asked: list[Request], limits: Limits) -> tuple[Engine, list[Handle]]:
    """Each joins two steps after the one before it."""
    engine, handles = Engine(lm, limits), []
    for request in asked:
        handles.append(engine.submit(request))
        engine.step()
        engine.step()
    engine.run()
    return engine, handles


def told(handle: Handle) -> list[tuple[int, float]]:
    return [(one.id, one.logprob) for one in handle.result().logprobs or ()]


def test_a_request_does_not_depend_on_the_others(lm: sc.Model) -> None:
    """Ids and log-probabilities, to the last bit: alone, joining and leaving, preempted, and in pieces of 3."""
    alone = []
    for request in requests():
        engine = Engine(lm, Limits())
        handle = engine.submit(request)
        engine.run()
        alone.append(told(handle))
    preempted, shared = [], []
    small = Limits(rows=5, positions=64, chunk=7)
    for limits in (small, Limits(), Limits(rows=6, positions=128, block=32, chunk=50), Limits(invariant=True)):
        engine, handles = together(lm, requests(), limits)
        assert isinstance(engine.cache, PackedPages)
        assert [told(handle) for handle in handles] == alone
        assert engine.blocks.free == engine.blocks.count
        preempted.append(engine.preempted)
        shared.append(engine.shared)
    assert preempted[0] > 0
    assert shared[1] == shared[3] == 16


def test_the_texts_are_those_of_pytorch(lm: sc.Model) -> None:
    plain = built("window")
    for sampling in (Sampling(), Sampling(temperature=0.9, top_k=20, seed=11)):
        wanted = [handle.ids for handle in together(plain, requests(sampling), Limits(rows=4))[1]]
        assert [handle.ids for handle in together(lm, requests(sampling), Limits(rows=4))[1]] == wanted


def test_unequal_rows_are_what_each_gives_alone(lm: sc.Model) -> None:
    found = lm.generate(prompts(), 9, options=Options(ignore_eos=True))
    for row, prompt in zip(found, prompts(), strict=True):
        assert row == lm.generate([prompt], 9, options=Options(ignore_eos=True))[0].tolist()


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (Limits(block=8), "blocks of a multiple of 16 positions, and 8 are asked for"),
        (Limits(numbers="int8"), "the compiled pass keeps float32"),
    ],
)
def test_caches_that_the_pass_does_not_have(lm: sc.Model, limits: Limits, message: str) -> None:
    with pytest.raises(sc.ScantlingInputError, match=message):
        Engine(lm, limits)


@pytest.mark.parametrize("drafting", [{"lookup": 2}, {"layers": 1}])
def test_drafts_change_nothing(lm: sc.Model, drafting: dict[str, Any]) -> None:
    ids = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])
    plain = lm.generate(ids, 20, options=Options(ignore_eos=True))
    assert torch.equal(lm.generate(ids, 20, options=Options(ignore_eos=True, drafting=Drafting(**drafting))), plain)


@pytest.mark.parametrize("drafting", [None, {"lookup": 2}, {"layers": 1}])
def test_the_cache_of_drafts_is_in_the_account(lm: sc.Model, drafting: dict[str, Any] | None) -> None:
    """The first layers have one of their own, in PyTorch, beside that of the pass."""
    options = Options(drafting=None if drafting is None else Drafting(**drafting))
    with torch.inference_mode():
        found = next(one_by_one(lm, [5, 6, 7, 5, 6, 7], 20, Sampling(temperature=1.0), options)).cache_bytes
        alone = lm.packed.session(lm, 1, 26).cache.nbytes
    made = Generation("", [5], 6, 1, "length", 0.1, 0.1, found, 20)
    assert found == predicted(lm, made, options)["cache_bytes"]
    assert (found > alone) == (drafting == {"layers": 1})


def test_prompts_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The default model, by both engines; the packed one is the default."""
    lines = [{"prompt": "The three primary colours are"}, {"prompt": "Once upon a time", "max_new_tokens": 5}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    texts = {}
    for engine in ("auto", "torch"):
        out = tmp_path / f"{engine}.jsonl"
        given = ["--prompts", str(tmp_path / "in.jsonl"), "--out", str(out), "--max-new-tokens", "8"]
        assert _run(["generate", *given, "--engine", engine]) == 0
        assert ("engine: packed" in capsys.readouterr().err) == (engine == "auto")
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        texts[engine] = sorted((row["index"], row["text"]) for row in rows)
    assert texts["auto"] == texts["torch"]
    assert len(texts["auto"]) == 2
