"""Measuring: the rounds, the account beside the measurement, and what is refused. No time is judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import GOLDEN
from tests.test_cli import call

import scantling as sc
from scantling.benches import account
from scantling.benches.child import Child
from scantling.benches.plan import Contender, Load, prompts
from scantling.benches.timing import Spread, interleaved
from scantling.checkpoint.find import card_of
from scantling.errors import ScantlingError, ScantlingInputError

TINY = GOLDEN / "tiny"
FLOAT32 = Contender("torch", "float32")


def parts(name: str) -> Any:
    return sc.assemble(card_of(TINY / name))


def test_every_contender_runs_once_a_round_and_the_first_round_is_not_counted() -> None:
    order: list[str] = []

    def run(name: str) -> int:
        order.append(name)
        return len(order)

    figures = interleaved({"a": lambda: run("a"), "b": lambda: run("b")}, 2)
    assert order == ["a", "b"] * 3
    assert figures == {"a": [3, 5], "b": [4, 6]}


def test_a_spread_turns_into_rates() -> None:
    seconds = Spread.of([0.5, 0.25, 1.0])
    assert seconds == Spread(0.5, 0.25, 1.0)
    assert seconds.rate(10) == Spread(20.0, 10.0, 40.0)
    assert seconds.over(5) == Spread(0.1, 0.05, 0.2)


def test_rows_of_a_batch_begin_differently_and_are_the_same_for_all() -> None:
    rows = prompts(Load(4, 16, 8), 131)
    assert rows == prompts(Load(4, 16, 8, "paged"), 131)
    assert len({tuple(row[:4]) for row in rows}) == 4
    assert all(3 <= token < 131 for row in rows for token in row)


def test_the_account_of_a_decoder_by_hand() -> None:
    """llama-gqa: d 48, 2 layers, 6 and 2 heads of 10, d_ff 76, V 131, untied; of its table a step reads a row."""
    model = parts("llama-gqa")
    d, layers, d_q, d_kv, d_ff, vocab = 48, 2, 60, 20, 76, 131
    layer = 2 * d * d_q + 2 * d * d_kv + 3 * d * d_ff
    weights = layers * (layer + 2 * d) + d + vocab * d + d
    load = Load(batch=3, prompt=8, tokens=4)
    step = account.step(model, FLOAT32, load, None)
    assert step is not None
    assert step.nbytes == 4 * weights + 4 * 3 * layers * 2 * d_kv * 11
    products = layers * 2 * layer + 2 * vocab * d + layers * 2 * 2 * d_q * 11
    assert step.flops == 3 * products
    first = account.prefill(model, FLOAT32, load, None)
    pairs = 8 * 9 // 2
    assert first.flops == 3 * (8 * layers * 2 * layer + 2 * vocab * d + layers * 2 * 2 * d_q * pairs)
    assert account.step(model, Contender("packed", "stored"), load, 1000) == account.Account(
        1000 + 4 * 3 * layers * 2 * d_kv * 11, step.flops
    )


def test_an_encoder_takes_no_steps() -> None:
    load = Load(2, 8, 0)
    assert account.step(parts("bert"), FLOAT32, load, None) is None
    assert account.allocated(parts("bert"), FLOAT32, load) is None
    assert account.prefill(parts("bert"), FLOAT32, load, None).flops > 0


def bench(capsys: pytest.CaptureFixture[str], *given: str) -> Any:
    settings = ("--dtype", "float32", "--tokens", "3", "--rounds", "1", "--prompt", "8", "--json")
    status, out, err = call(capsys, "bench", *given, *settings)
    assert status == 0, err
    return json.loads(out), err


def test_a_cache_has_as_many_bytes_as_predicted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "rates.png"
    caches = ("full", "ring", "int8", "ring-int8", "paged", "paged-int8")
    found, err = bench(
        capsys, str(TINY / "mistral-swa"), "--engine", "torch", "--cache", ",".join(caches), "--png", str(picture)
    )
    assert [row["cache"] for row in found["rows"]] == list(caches)
    for row in found["rows"]:
        assert row["cache_bytes"] == row["cache_bytes_predicted"] > 0
        assert row["decode_tokens_per_second"]["median"] == pytest.approx(1 / row["seconds_per_token"]["median"])
        assert row["seconds_per_step"]["median"] == pytest.approx(row["batch"] * row["seconds_per_token"]["median"])
        assert row["resident_bytes"] > row["cache_bytes"]
        assert row["decode_roofline_share"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "round 1 of 1, torch float32" in err


def test_batches_of_the_compiled_pass(capsys: pytest.CaptureFixture[str]) -> None:
    """Heads of 12 channels, which it keeps in 16."""
    from scantling.native.library import missing

    if missing() is not None:
        pytest.skip(str(missing()))
    found, _ = bench(capsys, str(TINY / "phi-qknorm"), "--engine", "packed", "--batch", "1,3")
    one, three = found["rows"]
    assert 3 * one["cache_bytes"] == three["cache_bytes"] == three["cache_bytes_predicted"] > 0
    assert 3 * one["decode_flops_per_step"] == three["decode_flops_per_step"]
    assert three["bytes_read_per_token"] < one["bytes_read_per_token"]


def test_eight_bit_activations_run_where_there_are_blocks() -> None:
    from scantling.checkpoint.find import default_model
    from scantling.cli.bench import _subject, contenders

    asked: dict[str, Any] = {"engines": None, "dtypes": "float32", "against": ""}
    names = {
        model: [one.name for one in contenders(_subject(model, None, width), asked)[0]]
        for model, width in ((str(TINY / "llama-gqa"), "stored"), ("tiny", "q8_0"), (str(default_model()), "stored"))
    }
    assert list(names.values()) == [
        ["torch float32", "packed stored"],
        ["torch float32", "packed q8_0", "packed-int8 q8_0"],
        ["torch float32", "packed stored", "packed-int8 stored"],
    ]
    _, missing = contenders(_subject(str(TINY / "llama-gqa"), None, "stored"), asked)
    assert "nothing would be rounded" in missing[0]
    with pytest.raises(ScantlingInputError, match="nothing would be rounded"):
        contenders(_subject(str(TINY / "llama-gqa"), None, "stored"), asked | {"engines": "packed-int8"})


@pytest.mark.parametrize("name", ["t5-v1_1", "bert", "gpt2"])
def test_every_family_is_measured(capsys: pytest.CaptureFixture[str], name: str) -> None:
    found, err = bench(capsys, str(TINY / name), "--batch", "2", "--engine", "torch", "--against", "llama.cpp")
    (row,) = found["rows"]
    decodes = name != "bert"
    assert (row["decode_tokens_per_second"] is not None) == decodes
    assert (row["texts_per_second"] is None) == decodes
    assert row["cache_bytes"] == row["cache_bytes_predicted"]
    why = "tokenizer" if name == "gpt2" else f"raced on decoders, and this is an enc{'oder' * (name == 'bert')}"
    assert why in err or "xllamacpp is not installed" in err


@pytest.mark.slow
def test_transformers_runs_the_same_weights(capsys: pytest.CaptureFixture[str]) -> None:
    """30 s idle: imports of torch in six processes and of transformers in two."""
    pytest.importorskip("transformers")
    for name in ("llama-gqa", "t5-v1_1"):
        found, _ = bench(capsys, str(TINY / name), "--engine", "torch", "--against", "transformers")
        ours, theirs = found["rows"]
        assert (ours["engine"], theirs["engine"]) == ("torch", "transformers")
        assert ours["decode_flops_per_step"] == theirs["decode_flops_per_step"]
        assert ours["bytes_read_per_token"] == theirs["bytes_read_per_token"]


def test_a_worker_that_ends_leaves_its_last_words() -> None:
    with Child() as child:
        child._process.kill()
        with pytest.raises(ScantlingError, match="its process ended with status -9"):
            child.ask("memory")


def test_a_worker_says_what_it_cannot_do(tmp_path: Path) -> None:
    asked = {"engine": "torch", "dtype": "float32", "model": str(tmp_path), "initial": False, "revision": None}
    with Child() as child, pytest.raises(ScantlingError, match=r"no config\.json"):
        child.ask("open", **asked)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["--engine", "tochr"],
            "--engine names 'tochr'; use some of torch, packed, packed-int8, compile; did you mean 'torch'?",
        ),
        (["--against", "vllm"], "--against names 'vllm'; use some of transformers, llama.cpp"),
        (["--cache", "round"], "--cache names 'round'; use some of full, ring"),
        (["--batch", "0"], "--batch is '0'; whole numbers from 1 on are needed"),
        (["--prompt", "8,x"], "--prompt is '8,x'; whole numbers"),
        (["--prompt", ","], "--prompt is empty"),
        (["--width", "q9"], "--width is 'q9'; use one of stored"),
        (["--dtype", "int8"], "weights cannot be loaded as int8"),
        (["--prompt", "8192"], "positions are asked for"),
        (["--png", "rates.jpg"], "a .png file in a folder that exists is needed"),
    ],
)
def test_what_cannot_be_measured_is_refused(capsys: pytest.CaptureFixture[str], given: list[str], message: str) -> None:
    status, out, err = call(capsys, "bench", str(TINY / "llama-gqa"), *given)
    assert (status, out) == (2, "")
    assert message in err


def test_an_engine_that_cannot_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = call(capsys, "bench", str(TINY / "t5-v1_1"), "--engine", "packed", "--prompt", "8")
    assert (status, "packed: the compiled pass does not know this model" in err) == (2, True)


def test_blocks_of_an_encoder_decoder_have_as_many_bytes_as_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    """t5-v1_1: 2 layers of 5 heads of 10. 3 rows of 5 positions of the target and 8 of the source, a block each."""
    caches = ("full", "paged", "paged-int8")
    found, _ = bench(capsys, str(TINY / "t5-v1_1"), "--engine", "torch", "--cache", ",".join(caches), "--batch", "3")
    assert [row["cache"] for row in found["rows"]] == list(caches)
    vectors = 3 * (16 + 16) * 2 * 2 * 5
    for row, wanted in zip(found["rows"][1:], (vectors * 40, vectors * 14), strict=True):
        assert row["cache_bytes"] == row["cache_bytes_predicted"] == wanted
        assert row["decode_tokens_per_second"]["median"] > 0


def test_more_than_the_memory_holds_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = call(capsys, "bench", "llama-2-70b", "--engine", "torch")
    assert status == 2
    assert "2 contenders need about" in err
