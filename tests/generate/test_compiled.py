"""The compiled step: what its session gives, which models it refuses, and what is kept of it."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.conftest import GOLDEN, stacks_of
from tests.test_golden import CLOSE

import scantling as sc
from scantling.cli.main import _run
from scantling.generate import compiled as room
from scantling.generate import compiled_kept as kept
from scantling.generate.batching import Engine, Limits
from scantling.generate.beam import Beams
from scantling.generate.compiled import Compiled, Paged, Step, why_not
from scantling.generate.compiled_step import DecodeStep, PagedStep
from scantling.generate.engine import Options
from scantling.generate.keeping import Keeping
from scantling.generate.request import Request
from scantling.generate.session import Session
from scantling.generate.speculative import Drafting
from scantling.parts.part import Workload
from scantling.tensor.paged import PagedCache
from scantling.tensor.slots import SlotCache

TINY = GOLDEN / "tiny"
DECODERS = [name for name in sorted(p.name for p in TINY.iterdir()) if stacks_of(name) == "decoder"]
REFUSED = {
    "llama-rope-dynamic": "llama-rope-dynamic: dynamic NTK turns keys by the length so far",
    "phi3-longrope-long": "phi3-longrope-long: past 8 positions LongRoPE turns all keys anew",
}
KNOWN = [name for name in DECODERS if name not in REFUSED]
needs_compiler = pytest.mark.skipif(kept.missing() is not None, reason=str(kept.missing()))


class Uncompiled(Compiled):
    """The same function of tensors, run by Python."""

    def step(self, model: sc.Model, cache: SlotCache, rows: int) -> Step:
        return DecodeStep(model.net, list(cache.shapes)).over_net

    def paged(self, model: sc.Model, cache: PagedCache, size: int, rows: int) -> Paged:
        run = PagedStep(model.net, list(cache.stores)).over_net
        return lambda ids, pasts, tables: run(ids, pasts, tables, [one.values for one in cache.stores.values()])


class Exported(Compiled):
    """The graph that torch exports of it."""

    def step(self, model: sc.Model, cache: SlotCache, rows: int) -> Step:
        made, weights = room._export(model, rows).module(), room._weights(model)
        return lambda ids, pasts, slots: made(ids, pasts, weights, slots)


def loaded(name: str, dtype: str | None = None) -> tuple[sc.Model, dict[str, Any]]:
    return sc.load(TINY / name, dtype=dtype), load_file(TINY / name / "io.safetensors")


def walked(made: Callable[[int, int], Any], io: dict[str, Any], rows: slice = slice(None)) -> torch.Tensor:
    """Logits (B, 20, V): after the prompt, which is padded, then after each of the recorded tokens but the last."""
    ids, mask, wanted = (io[name][rows] for name in ("gen_input_ids", "gen_attention_mask", "expected_ids"))
    session = made(ids.shape[0], ids.shape[1] + 20)
    with torch.inference_mode():
        found = [session.prefill(ids, mask)]
        found += [session.step(wanted[:, ids.shape[1] + i]) for i in range(19)]
    return torch.stack(found, 1)


@pytest.mark.parametrize("name", KNOWN)
def test_steps_give_the_recorded_logits(name: str) -> None:
    lm, io = loaded(name)
    assert not bool(io["gen_attention_mask"].all())
    made = Uncompiled()
    found = walked(lambda rows, capacity: made.session(lm, rows, capacity), io)
    torch.testing.assert_close(found, io["gen_logits"], **CLOSE)


# 1 to 3 s each on an idle core, 60 s together.
@pytest.mark.slow
@pytest.mark.parametrize("name", KNOWN)
def test_what_is_exported_gives_the_recorded_logits(name: str) -> None:
    lm, io = loaded(name)
    made = Exported()
    found = walked(lambda rows, capacity: made.session(lm, rows, capacity), io)
    torch.testing.assert_close(found, io["gen_logits"], **CLOSE)


# About 20 s each on an idle core. Between them: latent attention and experts, soft caps and windows, penalties; rows,
# and one row of 16-bit weights, whose products are written out as sums.
@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("name", "rows"), [("deepseek-v3", 2), ("gemma2", 1), ("bloom", 2)])
def test_what_is_compiled_gives_the_recorded_logits_and_is_not_compiled_again(
    name: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCANTLING_CACHE", str(tmp_path))
    lm, io = loaded(name)
    lm.compile(rows)
    (file,) = (tmp_path / "steps").iterdir()
    with zipfile.ZipFile(file) as package:
        # Code alone: neither weights nor anything pickled.
        assert not any(entry.filename.endswith((".pkl", ".pt", ".bin")) for entry in package.infolist())
    monkeypatch.setattr(kept, "_compile", None)
    lm.compile(rows)
    assert lm.compiled is not None
    found = walked(lambda count, capacity: lm.compiled.session(lm, count, capacity), io, slice(rows))  # type: ignore[union-attr]
    torch.testing.assert_close(found, io["gen_logits"][:rows], **CLOSE)
    assert torch.equal(found.argmax(-1), io["gen_logits"][:rows].argmax(-1))


@needs_compiler
@pytest.mark.slow
def test_one_row_in_bfloat16_is_as_near_to_float32_as_the_net_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCANTLING_CACHE", str(tmp_path))
    lm, io = loaded("llama-gqa", "bfloat16")
    plain = walked(lambda rows, capacity: Session(lm, rows, capacity), io, slice(1))
    lm.compile()
    assert lm.compiled is not None
    found = walked(lambda rows, capacity: lm.compiled.session(lm, rows, capacity), io, slice(1))  # type: ignore[union-attr]
    exact = io["gen_logits"][:1]
    assert found.dtype == torch.bfloat16
    assert float((found - exact).norm()) < 1.1 * float((plain - exact).norm())


def test_products_of_one_row_in_16_bits_are_sums() -> None:
    lm, io = loaded("llama-mha-tied-bias", "bfloat16")
    program = room._export(lm, 1)
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert "aten.sum.dim_IntList" in called
    assert not {"aten.linear.default", "aten.matmul.default"} & called
    made = Exported()
    found = walked(lambda rows, capacity: made.session(lm, rows, capacity), io, slice(1))
    plain = walked(lambda rows, capacity: Session(lm, rows, capacity), io, slice(1))
    exact = io["gen_logits"][:1]
    assert float((found - exact).norm()) < 1.1 * float((plain - exact).norm())


@pytest.mark.parametrize("name", REFUSED)
def test_what_turns_keys_anew_is_refused_by_name(name: str) -> None:
    lm, io = loaded(name)
    if why_not(lm) is not None:
        with pytest.raises(sc.ScantlingInputError, match=REFUSED[name]):
            lm.compile()
        return
    lm.compiled = Uncompiled()
    with pytest.raises(sc.ScantlingInputError, match=REFUSED[name]):
        lm.generate(io["gen_input_ids"], 20, attention_mask=io["gen_attention_mask"])


def test_longrope_within_the_trained_length_is_not_refused() -> None:
    lm, _ = loaded("phi3-longrope-long")
    wanted = lm.generate([[5, 6, 7]], 5, ignore_eos=True)
    lm.compiled = Uncompiled()
    assert torch.equal(lm.generate([[5, 6, 7]], 5, ignore_eos=True), wanted)


@pytest.mark.parametrize(("name", "why"), [("t5", "is an encoder-decoder"), ("bert", "writes no text")])
def test_what_is_no_decoder_is_refused(name: str, why: str) -> None:
    lm = sc.load(TINY / name)
    assert why in str(why_not(lm))
    with pytest.raises(sc.ScantlingInputError, match=why):
        lm.compile()


@pytest.mark.parametrize("chunk", [1, 3, 50])
@pytest.mark.parametrize("name", ["mistral-swa", "gpt2"])
def test_a_prompt_in_chunks_is_the_whole_prompt(name: str, chunk: int) -> None:
    lm, io = loaded(name)
    ids, mask = io["gen_input_ids"], io["gen_attention_mask"]
    for given in (mask, None):
        with torch.inference_mode():
            whole = Session(lm, ids.shape[0], 20).prefill(ids, given)
            found = Uncompiled().session(lm, ids.shape[0], 20).prefill(ids, given, chunk)
        torch.testing.assert_close(found, whole, **CLOSE)


def test_score_rewind_and_select() -> None:
    lm, io = loaded("qwen2")
    ids, mask = io["gen_input_ids"], io["gen_attention_mask"]
    more = torch.tensor([[7, 8, 9]] * ids.shape[0])
    rows = torch.tensor([1, 0, 1, 1])
    found = []
    for session in (Session(lm, ids.shape[0], 40), Uncompiled().session(lm, ids.shape[0], 40)):
        with torch.inference_mode():
            outs = [session.prefill(ids, mask), session.score(more)]
            session.rewind(2)
            outs += [session.step(more[:, 0]), session.score(more, last_only=True)]
            session.select(rows)
            outs += [session.step(torch.tensor([5, 6, 7, 8])), session.score(more[:1].expand(4, -1))]
        assert session.filled == ids.shape[1] + 3 - 2 + 1 + 3 + 1 + 3
        found.append(outs)
    for plain, made in zip(*found, strict=True):
        torch.testing.assert_close(made, plain, **CLOSE)


def test_every_way_of_making_a_text_is_that_of_the_net() -> None:
    lm, io = loaded("llama-gqa")
    ids = io["gen_input_ids"][:1]
    ways: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "seed": 3},
        {"beams": Beams(3)},
        {"options": Options(ignore_eos=True, drafting=Drafting(lookup=2))},
        {"options": Options(ignore_eos=True, drafting=Drafting(layers=1))},
        {"options": Options(ignore_eos=True, keeping=Keeping("ring"))},
    ]
    wanted = [lm.generate(ids, 12, **way) for way in ways]
    lm.compiled = Uncompiled()
    for way, text in zip(ways, wanted, strict=True):
        assert torch.equal(lm.generate(ids, 12, **way), text)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["llama-gqa", "mistral-swa", "mixtral", "bloom", "deepseek-v2", "phi3-longrope-long"])
def test_batched_requests_give_what_they_give_through_the_net(name: str, rows: int) -> None:
    lm, _ = loaded(name)
    # Some join while others decode, and the cache is too small for all.
    prompts = [[5, 6, 7], [8], [*range(3, 20)], [9, 8, 7, 6, 5, 4]]
    limits = Limits(rows=rows, positions=64, block=4, chunk=5)

    def texts() -> list[list[int]]:
        engine = Engine(lm, limits)
        handles = [engine.submit(Request(ids, 12, options=Options(ignore_eos=True))) for ids in prompts]
        engine.run()
        return [handle.ids for handle in handles]

    wanted = texts()
    lm.compiled = Uncompiled()
    assert texts() == wanted


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3])
def test_blocks_are_exported(rows: int) -> None:
    lm, _ = loaded("mistral-swa")
    made, cache = (
        room._export(lm, rows, 4).module(),
        PagedCache(lm.parts.named_state(Workload(tokens=4)), 9, lm.dtype, "cpu"),
    )
    tables, stores = torch.tensor([[3, 1], [0, 2], [8, 7]])[:rows], [one.values for one in cache.stores.values()]
    ids, session = torch.randint(3, 90, (rows, 8), generator=torch.Generator().manual_seed(0)), Session(lm, rows, 8)
    with torch.inference_mode():
        for i in range(8):
            pasts = torch.full((rows,), i)
            found = made(ids[:, i], pasts, tables, room._weights(lm), stores)
            torch.testing.assert_close(found, session.step(ids[:, i]), **CLOSE)


def test_an_engine_in_8_bits_is_refused() -> None:
    lm, _ = loaded("llama-gqa")
    lm.compiled = Compiled()
    with pytest.raises(sc.ScantlingInputError, match="int8 is asked for"):
        Engine(lm, Limits(numbers="int8"))


def test_positions_are_read_in_pieces_and_no_more_than_there_are() -> None:
    lm, _ = loaded("llama-gqa")
    session = Uncompiled().session(lm, 1, 3)
    with torch.inference_mode():
        session.prefill(lm.ids([[3, 4]]))
        session.step(torch.tensor([5]))
        with pytest.raises(sc.ScantlingInputError, match="the cache holds 3 positions and 4 are needed"):
            session.step(torch.tensor([5]))


@pytest.fixture
def compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A stand-in for the compiler, told apart by how often it ran; packages are zip files as torch writes them."""
    runs: list[str] = []

    def compile_(_: object, target: Path) -> None:
        runs.append(target.name)
        with zipfile.ZipFile(target, "w") as file:
            file.writestr("step/data/aotinductor/model/step.so", bytes(range(256)) * 40)

    monkeypatch.setenv("SCANTLING_CACHE", str(tmp_path))
    monkeypatch.setattr(room, "_export", lambda *_: None)
    monkeypatch.setattr(kept, "_compile", compile_)
    monkeypatch.setattr(kept, "_loaded", lambda path: path.name)
    monkeypatch.setattr(kept, "compiler", lambda: "c++")
    return runs


def test_a_second_start_compiles_nothing(compiling: list[str], tmp_path: Path) -> None:
    lm, _ = loaded("qwen2")
    for _ in range(2):
        lm.compile()
        assert room.is_kept(lm, 1)
    assert len(compiling) == 1
    assert [path.name for path in (tmp_path / "steps").iterdir()] == compiling


def test_another_width_row_count_thread_count_or_card_is_another_package(compiling: list[str]) -> None:
    lm, _ = loaded("qwen2")
    threads = torch.get_num_threads()
    lm.compile()
    lm.compile(2)
    lm.compile(5)
    assert len(compiling) == 2
    torch.set_num_threads(threads + 1)
    try:
        lm.compile()
    finally:
        torch.set_num_threads(threads)
    sc.load(TINY / "qwen2", dtype="bfloat16").compile()
    sc.load(TINY / "qwen3").compile()
    lm.compile(block=4)
    lm.net.decoder.blocks[0].mlp.up.register_buffer("added", torch.zeros(1))
    lm.compile()
    turned = lm.net.decoder.blocks[0].attn.o.weight
    turned.data = turned.data.T.contiguous().T
    lm.compile()
    assert len(set(compiling)) == len(compiling) == 8


@pytest.mark.parametrize("given", [{"rows": 0}, {"rows": True}, {"block": -1}, {"block": 1.5}])
def test_numbers_out_of_range_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(
        sc.ScantlingInputError, match=f"{next(iter(given))} is .* a whole number of at least 1 is needed"
    ):
        loaded("qwen2")[0].compile(**given)


@pytest.mark.parametrize("harm", ["cut", "flipped", "emptied"])
def test_what_is_damaged_is_made_again(harm: str, compiling: list[str], tmp_path: Path) -> None:
    lm, _ = loaded("qwen2")
    lm.compile()
    (file,) = (tmp_path / "steps").iterdir()
    whole = file.read_bytes()
    middle = len(whole) // 2
    harmed = {
        "cut": whole[:-30],
        "flipped": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
        "emptied": b"",
    }
    file.write_bytes(harmed[harm])
    assert not room.is_kept(lm, 1)
    lm.compile()
    assert len(compiling) == 2
    assert room.is_kept(lm, 1)


def test_without_a_compiler_it_is_refused_unless_it_is_kept(
    compiling: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, _ = loaded("qwen2")
    lm.compile()
    monkeypatch.setattr(kept, "compiler", lambda: None)
    lm.compile()
    with pytest.raises(sc.ScantlingInputError, match=r"no C\+\+ compiler was found .* everything runs through PyTorch"):
        lm.compile(2)
    assert len(compiling) == 1


def test_a_folder_that_cannot_be_written_to_is_named(
    compiling: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SCANTLING_CACHE", str(tmp_path / "file"))
    with pytest.raises(sc.ScantlingInputError, match="the compiled step cannot be kept in"):
        loaded("qwen2")[0].compile()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["generate", "a", "--cache", "ring"], "--cache ring goes with --engine torch"),
        (["generate", "a", "--cache-numbers", "int8"], "--cache-numbers int8 goes with --engine torch"),
        (["generate", "a", "--contrastive", "4"], "--contrastive goes with --engine torch"),
    ],
)
def test_options_that_go_another_way_are_refused(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run([*words, "--engine", "compile"]) == 2
    assert why in capsys.readouterr().err
