"""Cost, MFU, the table of devices and the roofline, against arithmetic written out here and published figures."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.commands import answer, call

import scantling as sc
from scantling.errors import ScantlingInputError
from scantling.numbers import mfu
from scantling.numbers.cost import run, work
from scantling.numbers.hardware import ARITHMETIC, arithmetic, device, devices, read_devices
from scantling.units import parse_count

H100 = 989.4e12


def test_seven_billion_on_two_trillion_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    """6 * 7e9 * 2e12 = 8.4e22; over 1,024 * 400e12 FLOP/s 205,078 s = 2.374 days; 58,333 hours at $2: $116,667."""
    args = ["--train-tokens", "2T", "--devices", "1024", "--device", "h100"]
    a = answer(capsys, "cost", "--params", "7B", *args, "--tflops", "400", "--price", "2")
    assert a["total_flops"] == 84 * 10**21
    assert a["seconds"] == pytest.approx(205078.125)
    assert a["days"] == pytest.approx(205078.125 / 86400)
    assert a["device_hours"] == pytest.approx(205078.125 * 1024 / 3600)
    assert round(a["money"]) == 116667
    assert a["mfu"] == pytest.approx(400 / 989.4)
    assert a["verdict"].startswith("good")
    assert a["kwh"] == pytest.approx(a["device_hours"] * 0.7)
    back = answer(capsys, "cost", "--params", "7B", *args, "--seconds", "205078.125")
    assert back["tflops"] == pytest.approx(400)
    share = answer(capsys, "cost", "--params", "7B", *args, "--mfu", str(a["mfu"]))
    assert share["days"] == pytest.approx(a["days"])


@pytest.mark.parametrize(
    ("name", "tokens", "published", "within"),
    [
        # Llama 3 herd (arXiv:2407.21783), section 1: 3.8e25 FLOPs on 15.6T tokens.
        ("llama-3.1-405b", "15.6T", 3.8e25, 0.005),
        # GPT-3 (arXiv:2005.14165), table D.1: 3.14e23 FLOPs on 300 B tokens, of 174.6 B parameters.
        ("gpt3-175b", "300B", 3.14e23, 0.002),
        # Chinchilla (arXiv:2203.15556): 70 B on 1.4 T tokens, as many FLOPs as Gopher's 5.76e23, by 6 N D 5.88e23.
        ("70B", "1.4T", 5.88e23, 1e-9),
    ],
)
def test_published_training_flops(
    capsys: pytest.CaptureFixture[str], name: str, tokens: str, published: float, within: float
) -> None:
    which = [name] if "-" in name else ["--params", name]
    a = answer(capsys, "cost", *which, "--train-tokens", tokens, "--device", "h100")
    assert a["convention"] == "6nd"
    assert a["total_flops"] == pytest.approx(published, rel=within)


def test_conventions_of_llama_2_7b() -> None:
    """From the shapes: products of 2 per weight but the table, and 4 L T d (full) or 4 L (T + 1) / 2 d (causal)."""
    layers, d, ff, vocab, t, tokens = 32, 4096, 11008, 32000, 4096, 2 * 10**12
    products = layers * (4 * d * d + 3 * d * ff) + vocab * d
    full = 3 * (2 * products + layers * 4 * t * d)
    causal = 3 * (2 * products + layers * 4 * (t + 1) // 2 * d)
    found = work(sc.assemble(sc.card("llama-2-7b")), tokens, t)
    seen = {"causal": causal * tokens, "visible": causal * tokens}
    assert found.flops == {"6nd": 6 * 6738415616 * tokens, "full": full * tokens, **seen}
    assert found.total("6nd") == 80860987392 * 10**12
    # Seed erratum B8: 46.1 GFLOP per token against 6 N = 40.4.
    assert found.total("full") / tokens == pytest.approx(46.1e9, rel=1e-3)


def test_a_mixture_pays_for_active_parameters() -> None:
    found = work(sc.assemble(sc.card("mixtral-8x7b")), 10**12, 4096)
    assert (found.params, found.active) == (46702792704, 12879925248)
    assert found.total("6nd") == 6 * 12879925248 * 10**12


@given(
    flops=st.integers(10**18, 10**26),
    share=st.floats(1e-4, 1.0),
    n=st.integers(1, 10**5),
    peak=st.sampled_from([125e12, 312e12, H100]),
)
def test_share_and_time_are_inverse(flops: int, share: float, n: int, peak: float) -> None:
    share *= 1 - 1e-12
    seconds = mfu.seconds(flops, share, n, peak)
    assert mfu.mfu(flops, seconds, n, peak) == pytest.approx(share)
    by_time, by_share = run(flops, n, peak, seconds=seconds), run(flops, n, peak, share=share)
    assert by_time.mfu == pytest.approx(by_share.mfu)
    assert by_time.device_hours == pytest.approx(by_share.device_hours)
    assert run(flops, n, peak, tflops=by_time.rate / 1e12).seconds == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("share", "word"), [(0.02, "low"), (0.2999, "low"), (0.3, "fair"), (0.4, "good"), (0.55, "good"), (0.7, "high")]
)
def test_verdict(share: float, word: str) -> None:
    assert mfu.verdict(share).startswith(word)


def test_nothing_exceeds_the_peak() -> None:
    with pytest.raises(ScantlingInputError, match=r"MFU would be 121\.2 % of a dense peak of 312 TFLOP/s.*sparsity"):
        run(10**22, 8, 312e12, tflops=378)
    with pytest.raises(ScantlingInputError, match="active"):
        mfu.mfu(2e12, 1.0, 1, 1e12)


@pytest.mark.parametrize(
    ("name", "dtype", "peak", "meaning"),
    [
        ("h100", "bf16", 1979e12, "that of h100 in bf16 with sparsity"),
        ("a100-80gb", "bf16", 624e12, "with sparsity"),
        ("a100-80gb", "bf16", 156e12, "that of a100-80gb in tf32, not in bf16"),
        (None, "bf16", 1979e12, "with sparsity"),
        (None, "fp8", 3958e12, "with sparsity"),
    ],
)
def test_a_denominator_that_means_something_else_is_refused(
    name: str | None, dtype: str, peak: float, meaning: str
) -> None:
    row = None if name is None else device(name)
    with pytest.raises(ScantlingInputError, match=meaning):
        mfu.checked_peak(peak, dtype, row, devices())


@pytest.mark.parametrize(("name", "dtype", "peak"), [("h100", "fp8", 1979e12), ("h100", "bf16", 900e12)])
def test_a_denominator_of_ones_own(name: str, dtype: str, peak: float) -> None:
    assert mfu.checked_peak(peak, dtype, device(name), devices()) == peak


def test_the_table_of_devices() -> None:
    table = devices()
    wanted = "h100 h100-pcie h200 b200 a100-80gb a100-40gb v100 l4 l40s a10g rtx-4090 rtx-3090 mi250x mi300x"
    assert {*wanted.split(), "tpu-v4", "tpu-v5e", "tpu-v5p"} <= set(table)
    for row in table.values():
        assert len(row.source) > 20
        assert set(row.dense_tflops) <= set(ARITHMETIC)
    # Two FLOPs for each product: clock in MHz, matrix units, products per unit and clock.
    for name, dtype, mhz, units, per_clock in [
        ("h100", "bf16", 1830, 528, 512),
        ("a100-80gb", "bf16", 1410, 432, 256),
        ("mi300x", "bf16", 2100, 1216, 256),
        ("v100", "fp16", 1530, 640, 64),
        ("mi250x", "bf16", 1700, 880, 128),
        ("tpu-v4", "bf16", 1050, 8, 128 * 128),
    ]:
        assert table[name].peak(dtype) == pytest.approx(2e6 * mhz * units * per_clock, rel=3e-3), name
    for row in table.values():
        for half, whole in (("tf32", "bf16"), ("bf16", "fp8")):
            if row.sparsity and {half, whole} <= set(row.dense_tflops):
                assert row.dense_tflops[whole] == pytest.approx(2 * row.dense_tflops[half], rel=0.02), row.name


OWN = """\
mine:
  about: a test
  source: this file
  dense_tflops: {bf16: 100}
  memory_gb: 10
  memory_gb_per_s: 1000
"""


def test_a_users_own_devices(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(OWN)
    args = ["cost", "--params", "1B", "--train-tokens", "1B", "--tflops", "50"]
    assert answer(capsys, *args, "--device", str(path))["mfu"] == pytest.approx(0.5)
    assert answer(capsys, *args, "--device", "mine", "--device-file", str(path))["mfu"] == pytest.approx(0.5)
    assert answer(capsys, *args, "--device", "h100", "--device-file", str(path))["mfu"] == pytest.approx(50 / 989.4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1", "a mapping of device names to rows is needed"),
        ("{}", "a mapping of device names to rows is needed"),
        ("mine: 3", "mine is 3; a mapping with about, source"),
        ("mine: {about: a}", "mine.source is None; a text is needed"),
        (OWN + "  memory: 3\n", "unknown key 'mine.memory'.*did you mean 'memory_gb'"),
        (OWN.replace("bf16: 100", "bfloat: 100"), "unknown key 'mine.dense_tflops.bfloat'"),
        (OWN.replace("bf16: 100", "bf16: -1"), "mine.dense_tflops.bf16 is -1; a number above 0 is needed"),
        (OWN.replace("memory_gb: 10", "memory_gb: .inf"), "mine.memory_gb is inf"),
        (OWN.replace("memory_gb: 10", "memory_gb: yes"), "mine.memory_gb is 'yes'"),
        (OWN + "  sparsity: 2\n", "mine.sparsity is 2; true or false"),
        (OWN + "  memory_mib: -1\n", "mine.memory_mib is -1"),
        (OWN + "  reached_tflops: {bf16: 0}\n", "mine.reached_tflops.bf16 is 0; a number above 0 is needed"),
        (OWN + "  reached_tflops: {bf16: 101}\n", "mine.reached_tflops.bf16 is 101"),
        (OWN + "  devices_per_node: 2.5\n", "mine.devices_per_node is 2.5"),
        (OWN + "  devices_per_node: 0\n", "mine.devices_per_node is 0"),
        (OWN.replace("{bf16: 100}", "[1]"), "a mapping is needed"),
        ("3: {}", "the device name 3 is not a text"),
        ("a: &b {}", "uses an anchor or alias"),
        ("a: [", "not valid YAML at line 1"),
        ("a: !!python/object:os.system {}", "a table of devices has plain values only"),
    ],
)
def test_a_bad_table_is_refused_in_one_sentence(text: str, message: str) -> None:
    with pytest.raises(ScantlingInputError, match=f"own.yaml: .*{message}"):
        read_devices(text, "own.yaml")


def test_what_the_driver_reports_comes_before_what_the_vendor_prints() -> None:
    """81,559 MiB of an H100's 80 GB (https://thundergolfer.com/blog/nvidia-gpu-memory-capacity)."""
    assert device("h100").memory_bytes == 81559 * 2**20
    assert read_devices(OWN, "own.yaml")["mine"].memory_bytes == 10**10


BASE = ["cost", "--params", "7B", "--train-tokens", "2T"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["cost", "--train-tokens", "2T"], "give either MODEL or --params"),
        (["cost", "gpt2", "--params", "7B", "--train-tokens", "2T"], "give either MODEL or --params"),
        (["cost", "gpt2"], "--train-tokens"),
        (["cost", "--params", "7 bn", "--train-tokens", "2T"], "--params is '7 bn': give a number"),
        (["cost", "--params", "7B", "--train-tokens", "0"], "--train-tokens is '0'; a whole number"),
        (BASE, "the time needs a speed"),
        ([*BASE, "--device", "h10"], "no device 'h10'; did you mean 'h100'"),
        ([*BASE, "--device", "h100", "--dtype", "fp3"], "no peak is tabled for 'fp3'"),
        ([*BASE, "--device", "v100"], "device v100 has no dense peak in bf16; known: fp32, fp16"),
        ([*BASE, "--device", "a10g"], "no peak of it is known"),
        ([*BASE, "--device", "h100", "--tflops", "400", "--mfu", "0.4"], "tflops and mfu are given"),
        ([*BASE, "--device", "h100", "--mfu", "40"], "0.4 or 40%"),
        ([*BASE, "--device", "h100", "--mfu", "x"], "0.4 or 40%"),
        ([*BASE, "--device", "h100", "--mfu", "nan"], "0.4 or 40%"),
        ([*BASE, "--device", "h100", "--days", "1", "--hours", "2"], "given twice"),
        ([*BASE, "--device", "h100", "--days", "0"], "--days"),
        ([*BASE, "--device", "h100", "--tflops", "1200"], "nothing exceeds 100 %"),
        ([*BASE, "--device", "h100", "--peak", "1979"], "with sparsity"),
        ([*BASE, "--device", "h100", "--devices", "0"], "--devices"),
        ([*BASE, "--device", "h100", "--convention", "causal"], "causal FLOPs need a model"),
        ([*BASE, "--device", "h100", "--context", "8"], "--context needs a MODEL"),
        ([*BASE, "--device", "nowhere.yaml"], "nowhere.yaml: cannot be read"),
        (
            ["cost", "naive", "--train-tokens", "1T", "--device", "h100", "--convention", "full"],
            "no FLOPs take any time",
        ),
        (["roofline", "gpt2", "--device", "h100", "--batch", "0"], "--batch"),
        (["roofline", "gpt2", "--device", "h100", "--context", "1025"], "1024 learned positions"),
        (["roofline", "gpt2", "--device", "tpu-v7x"], "has no memory_gb_per_s"),
        (["roofline", "gpt2", "--device", "h100", "--source-tokens", "8"], "reads no source"),
        (["roofline", "gpt2", "--device", "h100", "--dtype", "q4_9"], "unknown dtype 'q4_9'"),
    ],
)
def test_wrong_usage_is_one_sentence(capsys: pytest.CaptureFixture[str], args: list[str], message: str) -> None:
    status, out, err = call(capsys, *args)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2T", 2 * 10**12),
        ("15.6t", 15_600 * 10**9),
        ("7B", 7 * 10**9),
        ("1e12", 10**12),
        ("1,024", 1024),
        ("1.5k", 1500),
    ],
)
def test_counts_as_people_write_them(text: str, value: int) -> None:
    assert parse_count(text, "it") == value


@pytest.mark.parametrize(("name", "plain"), [("bfloat16", "bf16"), ("float8_e4m3fn", "fp8"), ("torch.float32", "fp32")])
def test_names_of_arithmetic(name: str, plain: str) -> None:
    assert arithmetic(name) == plain


def test_the_commands_print_tables(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--train-tokens", "2T", "--devices", "1024", "--device", "h100", "--price", "2"]
    status, out, err = call(capsys, "cost", "llama-2-7b", *args, "--days", "2.5")
    assert (status, err) == (0, "")
    assert "80,860,987,392,000,000,000,000" in out
    assert "36.9 % of the dense peak in bf16, 989.4 TFLOP/s; fair" in out
    status, out, err = call(capsys, "roofline", "llama-3-8b", "--device", "H100", "--batch", "8")
    assert (status, err) == (0, "")
    assert "memory" in out
    assert "fit into 85.5 GB" in out
    data = answer(capsys, "roofline", "gpt2", "--device", "l4", "--dtype", "fp8")
    assert (data["context"], data["dense_peak_tflops"], data["fits"]) == (1024, 242.5, True)
