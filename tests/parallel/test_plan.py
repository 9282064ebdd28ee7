"""`scantling plan`: layouts ranked, why the others lose, and what is said where nothing fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.commands import answer, call
from tests.parallel.conftest import MakeJob

from scantling.numbers.parallel.assumptions import TEXT
from scantling.numbers.parallel.layouts import Layout, Mesh, limits
from scantling.numbers.parallel.step import Simulator
from scantling.study.plan import Choices, _variants, described, plan

LLAMA = ["plan", "llama-3.1-405b", "--devices", "16384", "--device", "h100"]


def test_llama_on_16384_devices(capsys: pytest.CaptureFixture[str]) -> None:
    """arXiv:2407.21783, table 4: 8 tensor, 16 pipeline, 128 data ranks, 16 M tokens a step, 400 TFLOP/s of 989.4."""
    a = answer(capsys, *LLAMA, "--context", "8192", "--tokens-per-step", str(2048 * 8192), "--zero", "2")
    shares = [x["mfu"]["full"] for x in a["layouts"]]
    assert shares == sorted(shares, reverse=True)
    mesh = {"data": 128, "tensor": 8, "pipeline": 16, "context": 1, "expert": 1}
    own = next(i for i, x in enumerate(a["layouts"]) if {name: x[name] for name in mesh} == mesh)
    assert own < 5
    assert a["layouts"][own]["mfu"]["full"] == pytest.approx(400 / 989.4, abs=0.05)
    assert (a["rows_per_step"], a["tokens_per_step"]) == (2048, 2**24)
    for x in a["layouts"]:
        assert x["data"] * x["tensor"] * x["pipeline"] * x["context"] == 16384
        assert x["fits"]
        assert x["memory_bytes"]["total"] <= a["memory_bytes"]
        assert sum(v for k, v in x["seconds"].items() if k != "total") == pytest.approx(x["seconds"]["total"])
        assert x["tokens_per_second"] * x["seconds"]["total"] == pytest.approx(2**24)
        rate = a["model_flops_per_step"]["full"] / x["seconds"]["total"] / 16384
        assert x["mfu"]["full"] == pytest.approx(rate / 989.4e12)
        assert x["mfu"]["causal"] < x["mfu"]["full"]
        collectives = {(t["what"], t["kind"]) for t in x["traffic"]}
        assert ("gradients", "reduce-scatter") in collectives
        assert all(t["inside"] for t in x["traffic"] if t["what"] == "tensor")
        assert all(t["sent_bytes"] > 0 for t in x["traffic"])
    assert a["assumptions"] == list(TEXT)


def test_the_table_says_what_it_takes_for_granted_and_why_others_lose(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(capsys, *LLAMA, "--top", "3")
    assert (status, err) == (0, "")
    assert "131,072 positions a step" in out, "the model's own context"
    assert all(line in out for line in TEXT)
    assert [line.split()[0] for line in out.splitlines() if line.startswith((" 1 ", " 2 ", " 3 "))] == ["1", "2", "3"]
    for words in ("does not fit by", "% slower:", "126 blocks are fewer than", "do not divide among", "reduce-scatter"):
        assert words in out


def test_nothing_left_out_is_faster(job: MakeJob) -> None:
    """What the search skips is no faster than what it finds: every layout of a small job, one by one."""
    for name, kernel, devices in (
        ("llama-3-8b", "fused", 16),
        ("gpt2-xl", "reference", 8),
        ("mixtral-8x7b-v0.1", "fused", 16),
    ):
        j = job(name, devices, 4096 if name != "gpt2-xl" else 1024, 16, kernel=kernel)
        found, simulator, has = plan(j, Choices()), Simulator(j), limits(j.model)
        assert found.ranked
        for best in found.ranked:
            every = (x for same in _variants(j, best.layout.mesh, Choices(), has) for x in same)
            estimates = [simulator.estimate(x) for x in every]
            fitting = [e.times.total for e in estimates if e.memory.total <= j.memory]
            assert best.times.total <= min(fitting) * (1 + 1e-9)


def test_losers_are_told_apart(job: MakeJob) -> None:
    found = plan(job("llama-3-8b", 64, 8192, 48), Choices(recompute=("none",)))
    by_reason = {lost.why: lost for lost in found.lost}
    assert by_reason["batch"].clause == "48 rows a step do not divide among 32 replicas"
    assert by_reason["layers"].clause == "32 blocks are fewer than 64 pipeline stages"
    named = (("bubble", "pipeline bubble"), ("tensor", "exchange of tensor ranks"), ("compute", "of the fullest stage"))
    for why, words in named:
        lost = by_reason[why]
        assert lost.estimate is not None
        assert words in lost.clause
        share = 100 * (lost.estimate.times.total / found.ranked[0].times.total - 1)
        assert lost.clause.startswith(f"{share:.1f} % slower")
    illegal = sum(lost.estimate is None for lost in found.lost)
    every = {lost.mesh for lost in found.lost} | {e.layout.mesh for e in found.ranked}
    assert len(found.ranked) + illegal == len(every)


def test_what_does_not_fit_says_by_how_much(job: MakeJob) -> None:
    found = plan(job("llama-3-8b", 4, 8192, 48), Choices(recompute=("none",)))
    (lost,) = (lost for lost in found.lost if lost.why == "fit")
    assert lost.estimate is not None
    over = lost.estimate.memory.total - found.job.memory
    assert over > 0
    assert lost.clause == f"does not fit by {over / 1e9:.1f} GB ({over / 2**30:.1f} GiB)"


def test_choices_are_kept(job: MakeJob) -> None:
    j = job("llama-3-8b", 32, 8192, 64)
    some = Choices(
        tensor=(2, 4), pipeline=(2,), zero=(0,), micro_batch=(1,), virtual=(1, 2), recompute=("block",), sequence=False
    )
    found = plan(j, some)
    assert {e.layout.mesh.tensor for e in found.ranked} == {2, 4}
    for e in found.ranked:
        layout = e.layout
        assert (layout.mesh.pipeline, layout.zero, layout.micro_batch, layout.recompute) == (2, 0, 1, "block")
        assert layout.virtual in (1, 2)
        assert not layout.sequence
        assert e.micro_batches == 64 // layout.mesh.data


def test_tensor_ranks_stay_within_nodes(job: MakeJob) -> None:
    found = plan(job("llama-3-8b", 48, 8192, 48), Choices(context=(1,), tensor=(3, 6, 2)))
    assert {e.layout.mesh.tensor for e in found.ranked} == {2}
    wide = plan(job("llama-3-8b", 16, 8192, 16), Choices(tensor=(16,)))
    assert [described(e.layout).partition(",")[0] for e in wide.ranked] == ["data 1 (ZeRO-1) x tensor 16"]
    words = {lost.clause for lost in found.lost if lost.why == "node"}
    assert "groups of 6 tensor ranks do not divide nodes of 8" in words


def test_rank_and_words(job: MakeJob) -> None:
    found = plan(job("llama-3-8b", 16, 8192, 64), Choices())
    second = found.ranked[1].layout.mesh
    assert (found.rank(second), found.rank(Mesh(5))) == (2, None)
    layout = Layout(Mesh(16, 8, 4, 2), 3, 8, 2, 4, recompute="block")
    assert described(layout) == (
        "data 16 (ZeRO-3 over 8) x tensor 8 x pipeline 4 (4 chunks) x context 2, micro-batch 2, recompute block"
    )
    assert described(replace(layout, mesh=Mesh(16), zero=0, shards=None, recompute="none")) == "data 16, micro-batch 2"


@pytest.mark.parametrize(
    "name", ["bert-base-uncased", "t5-small", "gemma-2-2b", "gpt-oss-20b", "deepseek-v2-lite", "falcon-7b"]
)
def test_every_family_is_planned(capsys: pytest.CaptureFixture[str], name: str) -> None:
    a = answer(
        capsys, "plan", name, "--devices", "8", "--device", "h200", "--context", "512", "--tokens-per-step", "65536"
    )
    assert a["layouts"]
    assert all(0 < x["mfu"]["causal"] <= x["mfu"]["full"] < 1 for x in a["layouts"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["llama-3.1-405b", "--devices", "8", "--device", "h100", "--context", "8192"],
            "no layout of 8 devices fits: the closest, data 1 (ZeRO-1) x tensor 8, micro-batch 1, recompute block,",
        ),
        (
            ["llama-3-8b", "--devices", "7", "--device", "h100", "--tensor", "3"],
            "no legal layout of 7 devices: none that was allowed",
        ),
        (
            ["gpt2", "--devices", "13", "--device", "h100", "--data", "1"],
            "no legal layout of 13 devices: data 1 x tensor 1 x pipeline 13: 12 blocks are fewer than 13",
        ),
        (
            ["gpt2", "--devices", "8", "--device", "h100", "--precision", "half"],
            "no precision 'half'; use one of mixed",
        ),
        (["gpt2", "--devices", "8", "--device", "h1000"], "no device 'h1000'; did you mean 'h100'?"),
        (["gpt2", "--devices", "8", "--device", "rtx-4090"], "device rtx-4090 has no devices_per_node: --per-node or"),
        (
            ["gpt2", "--devices", "8", "--device", "h100", "--context", "2000"],
            "2,000 positions (past + tokens) are asked for",
        ),
        (
            ["gpt2", "--devices", "8", "--device", "h100", "--tokens-per-step", "100"],
            "100 tokens a step are less than a row of 1,024",
        ),
        (["gpt2", "--devices", "8", "--device", "h100", "--tokens-per-step", "many"], "--tokens-per-step"),
        (["gpt2", "--devices", "8", "--device", "h100", "--zero", "4"], "'4': whole numbers from 0 to 3 are needed"),
        (["gpt2", "--devices", "8", "--device", "h100", "--tensor", "2,"], "'2,': whole numbers from 1 to"),
        (["gpt2", "--devices", "8", "--device", "a10g"], "device a10g has no dense peak in bf16"),
        (
            ["gpt2", "--devices", "8", "--device", "h100", "--data", "8", "--micro-batch", "7"],
            "data 8 x tensor 1 x pipeline 1: no allowed micro-batch and number of chunks divide the 512 rows",
        ),
        (["gpt2", "--devices", "8"], "MODEL, --devices and --device are needed"),
    ],
)
def test_bad_input_is_one_sentence(capsys: pytest.CaptureFixture[str], args: list[str], message: str) -> None:
    status, out, err = call(capsys, "plan", *args)
    assert (status, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_what_is_missing_is_the_difference(capsys: pytest.CaptureFixture[str], job: MakeJob) -> None:
    """The smallest of all layouts, its need and the device's 85.5 GB; what is missing is the difference."""
    found = plan(replace(job("llama-3.1-405b", 8, 8192, 512)), Choices())
    smallest = min(lost.estimate.memory.total for lost in found.lost if lost.estimate)
    assert f"so {(smallest - found.job.memory) / 1e9:.1f} GB" in found.missing()


def test_rows_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    """Exact where the tokens are whole rows; else near, with many factors of two, and said."""
    base = ["plan", "gpt2", "--devices", "8", "--device", "h100", "--context", "1000", "--tokens-per-step"]
    assert answer(capsys, *base, "96000")["rows_per_step"] == 96
    a = answer(capsys, *base, "100500")
    assert (a["rows_per_step"], a["tokens_per_step_asked"]) == (96, 100500)
    assert "96,000 tokens, for the 100,500 asked for" in call(capsys, *base, "100500")[1]
    default = answer(capsys, "plan", "gpt2", "--devices", "8192", "--device", "h100", "--top", "1")
    assert default["tokens_per_step"] == 2**23


def test_a_users_own_device(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A machine of one's own needs its figures; --per-node and --network take the place of two of them."""
    path = tmp_path / "own.yaml"
    figures = "dense_tflops: {bf16: 100}, memory_gb: 48, memory_gb_per_s: 1000, link_gb_per_s: 50"
    row = f"mine: {{about: a, source: b, {figures}}}"
    path.write_text(row)
    base = ["plan", "gpt2-xl", "--devices", "8", "--device", str(path), "--tokens-per-step", "262144"]
    a = answer(capsys, *base, "--per-node", "4", "--network", "12.5")
    assert (a["devices_per_node"], a["network_bytes_per_second"], a["product_tflops"]) == (4, 12.5e9, 80)
    slow = answer(capsys, *base, "--per-node", "4", "--network", "1.25")
    assert slow["layouts"][0]["seconds"]["total"] > a["layouts"][0]["seconds"]["total"]
    path.write_text(row.replace(" memory_gb: 48,", ""))
    assert "device mine has no memory_gb" in call(capsys, *base, "--per-node", "8")[2]
