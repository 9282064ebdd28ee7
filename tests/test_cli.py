"""The command line as a user meets it: output, JSON, exit status, and one sentence for every wrong input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.commands import answer, call
from tests.conftest import DATA, GOLDEN

from scantling.cards import presets
from scantling.cli.main import VERBS


def test_count(capsys: pytest.CaptureFixture[str]) -> None:
    (gpt2,) = answer(capsys, "count", "gpt2-small")
    assert gpt2["total_params"] == gpt2["active_params"] == 124439808
    assert gpt2["non_embedding_params"] == 85056000
    assert sum(gpt2["by_part"].values()) == 124439808
    pair = answer(capsys, "count", "mixtral-8x7b", "mistral-7b")
    assert [m["name"] for m in pair] == ["mixtral-8x7b-v0.1", "mistral-7b-v0.1"]
    assert (pair[0]["total_params"], pair[0]["active_params"]) == (46702792704, 12879925248)
    assert pair[1]["total_params"] == 7241732096
    assert len(answer(capsys, "count", "--all")) == len(answer(capsys, "cards"))


def test_count_explains_the_shortcut(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, "count", "llama-2-70b")
    assert status == 0
    assert "68,976,648,192" in out
    assert "-5.84 %" in out
    assert "13,421,772,800" in out
    assert "-9,395,240,960" in out


def test_cards(capsys: pytest.CaptureFixture[str]) -> None:
    assert {"gpt2", "walk-5.9b", "tiny", "llama-3-70b"} <= set(answer(capsys, "cards"))
    _, out, _ = call(capsys, "cards")
    row = next(line.split() for line in out.splitlines() if "llama-3-70b" in line)
    assert row == ["llama-3-70b", "70.554", "B", "80", "8,192", "64", "8", "28,672", "8,192", "128,256"]
    assert "46.703 B / 12.880 B" in out


def test_a_printed_card_is_a_card(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, out, _ = call(capsys, "card", "mixtral-8x7b")
    path = tmp_path / "mine.yaml"
    path.write_text(out)
    assert answer(capsys, "count", str(path))[0]["total_params"] == 46702792704
    assert answer(capsys, "card", str(path))["mlp"]["n_experts"] == 8


def test_flops(capsys: pytest.CaptureFixture[str]) -> None:
    f = answer(capsys, "flops", "llama-2-7b", "--tokens", "4096")
    assert (f["forward_flops"], f["training_flops"]) == (62921270886400, 188763812659200)
    assert f["forward_flops_causal"] < f["forward_flops"]
    assert f["attention_half_at_tokens"] == 24704
    assert f["attention_share"] == pytest.approx(8796093022208 / (62921270886400 - 1073741824000))
    assert f["attention_share_of_total"] == pytest.approx(8796093022208 / 62921270886400)
    decode = answer(capsys, "flops", "llama-2-7b", "--tokens", "1", "--past", "4095")
    assert decode["forward_flops"] * 4096 == f["forward_flops"]


def test_memory(capsys: pytest.CaptureFixture[str]) -> None:
    m = answer(capsys, "memory", "llama-3-8b", "--batch", "2", "--tokens", "1024")
    assert m["kv_cache_bytes_per_token"] == 131072
    assert m["kv_cache_bytes"] == 2 * 1024 * 131072
    assert m["weights_bytes"] == 2 * 8030261248
    assert m["logits_bytes"] == 2 * 1024 * 128256 * 4
    assert m["total_bytes"] == m["weights_bytes"] + m["kv_cache_bytes"] + m["logits_bytes"]
    assert answer(capsys, "memory", "llama-3-8b", "--dtype", "fp32")["weights_bytes"] == 4 * 8030261248


def test_the_score_matrix_of_eight_heads(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "eight.yaml"
    _, out, _ = call(capsys, "card", "tiny")
    path.write_text(
        out.replace("n_heads: 4, n_kv_heads: 2, d_head: 32", "n_heads: 8, d_head: 16").replace(
            "d_rotary: 32", "d_rotary: 16"
        )
    )
    assert answer(capsys, "memory", str(path), "--tokens", "4096", "--dtype", "fp16")["scores_bytes"] == 256 * 2**20


def test_trace(capsys: pytest.CaptureFixture[str]) -> None:
    t = answer(capsys, "trace", "walk-5.9b", "--batch", "2", "--tokens", "1024")
    assert t["total_params"] == 5933109248 == sum(s["params"] * s["repeat"] for s in t["steps"])
    assert t["total_flops"] == sum(s["flops"] * s["repeat"] for s in t["steps"])
    assert {"path", "op", "shape", "params", "flops", "saved_bytes", "repeat"} <= set(t["steps"][0])
    unrolled = answer(capsys, "trace", "walk-5.9b", "--batch", "2", "--tokens", "1024", "--unroll")
    assert {s["repeat"] for s in unrolled["steps"]} == {1}
    assert unrolled["total_flops"] == t["total_flops"]
    steps = answer(capsys, "trace", "tiny", "--train", "--kernel", "reference")["steps"]
    kinds = [s["op"] for s in steps if s["stage"] == "forward"]
    assert "scores" in kinds
    assert "keys in the cache" not in kinds
    assert kinds[-1] == "cross-entropy"
    assert steps[-1]["op"] == "gradient of E"


def test_parts(capsys: pytest.CaptureFixture[str]) -> None:
    parts = answer(capsys, "parts", "gpt2")
    assert sum(p["params"] * p["repeat"] for p in parts["parts"]) == parts["total_params"] == 124439808
    _, out, _ = call(capsys, "parts", "gpt2")
    assert "(x - mean) / sqrt(var + 1e-05) * w + b" in out
    assert "(B, T, H*d_head)" in out
    assert "total: 124,439,808 parameters" in out


def test_verify(capsys: pytest.CaptureFixture[str]) -> None:
    v = answer(capsys, "verify", "tiny")
    assert v["equal"] is True
    assert all(row["equal"] for row in v["rows"])
    assert next(r for r in v["rows"] if r["what"] == "parameters")["counted"] == 1049728


def test_verify_fails_on_a_planted_drift(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scantling.parts.leaf.RMSNorm.steps", lambda self, w: iter(()))
    status, out, _ = call(capsys, "verify", "tiny")
    assert status == 1
    assert "NOT equal" in out


@pytest.mark.slow
@pytest.mark.parametrize("name", presets())
def test_verify_every_preset(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert answer(capsys, "verify", name)["equal"] is True


def test_tokenize(capsys: pytest.CaptureFixture[str]) -> None:
    t = answer(capsys, "tokenize", "The capital of France is")
    assert t == {"ids": [504, 3575, 282, 4649, 314], "tokens": ["The", " capital", " of", " France", " is"], "count": 5}


def test_generate(capsys: pytest.CaptureFixture[str]) -> None:
    g = answer_with_notes(capsys, "generate", "The capital of France is", "--max-new-tokens", "6")
    assert g["text"].startswith(" Paris.")
    assert (g["prompt_tokens"], g["new_tokens"], g["finish_reason"]) == (5, 6, "length")
    assert g["cache_bytes"] == g["predicted"]["cache_bytes"] == 16 * 30 * 2 * 3 * 64 * 4
    assert g["engine"] == "packed"
    assert g["prefill_seconds"] > 0
    assert g["decode_seconds"] > 0


def answer_with_notes(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    status, out, _ = call(capsys, *args, "--json")
    assert status == 0
    return json.loads(out)


def test_generate_writes_text_to_stdout_and_figures_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(capsys, "generate", "The capital of France is", "--max-new-tokens", "4", "--dtype", "bf16")
    assert status == 0
    assert out.startswith(" Paris.")
    assert out.endswith("\n")
    lines = [line for line in err.splitlines() if not line.startswith("note: ")]
    assert [line.partition(":")[0] for line in lines] == ["engine", "prefill", "decode", "cache"]
    assert lines[0] == "engine: torch: --dtype bf16"
    assert "as predicted" in lines[3]
    assert "ended by length" in lines[3]


def test_chat_puts_the_prompt_into_the_template(capsys: pytest.CaptureFixture[str]) -> None:
    g = answer_with_notes(capsys, "generate", "Say hello.", "--chat", "--max-new-tokens", "3")
    assert g["prompt_tokens"] > 10


TINY = str(GOLDEN / "tiny" / "llama-gqa")

WRONG = [
    (["count", "gpt5"], "no model 'gpt5'; did you mean 'gpt2'?"),
    (["count"], "name at least one MODEL"),
    (["cuont", "gpt2"], "no command 'cuont'; did you mean 'count'?"),
    (["count", "gpt2", "--jsn"], "--jsn"),
    (["flops", "gpt2", "--tokens", "0"], "0 is not in the range"),
    (["flops", "gpt2", "--tokens", "many"], "'many' is not a valid integer"),
    (["flops", "gpt2", "--batch", "-1"], "-1 is not in the range"),
    (["flops"], "Missing argument 'MODEL'"),
    (["memory", "gpt2", "--dtype", "fp12"], "unknown dtype 'fp12'"),
    (["trace", "gpt2", "--train", "--past", "3"], "--past is for decoding"),
    (["trace", "gpt2", "--kernel", "fast"], "'fast' is not one of"),
    (["card", "missing.yaml"], "missing.yaml: no such file"),
    (["card", str(GOLDEN / "params.json")], "model_type is None"),
    (["card", str(DATA)], "no config.json"),
    (["card", __file__], "not a model"),
    (["generate", ""], "the prompt is empty"),
    (["generate", "hi", "-m", "gpt2"], "is a card without weights"),
    (["generate", "hi", "-m", TINY], "no tokenizer"),
    (["generate", "hi", "--temperature", "-1"], "temperature is -1.0"),
    (["generate", "hi", "--temperature", "nan"], "temperature is nan"),
    (["generate", "hi", "--top-p", "2"], "top_p is 2.0"),
    (["generate", "hi", "--max-new-tokens", "0"], "0 is not in the range"),
    (["generate", "hi", "--stop", ""], "a stop string is empty"),
    (["generate", "hi", "--dtype", "int8"], "int8"),
    (["generate", "hi", "--device", "gpu"], "gpu"),
    (["generate", "word " * 9000, "--max-new-tokens", "1"], "the context holds 8192"),
    (["tokenize", ""], "the text is empty"),
    (["tokenize", "hi", "-m", TINY], "no tokenizer"),
    (["verify", "nothing-like-it"], "no model 'nothing-like-it'"),
]


@pytest.mark.parametrize(("args", "words"), WRONG, ids=[" ".join(args)[:40] for args, _ in WRONG])
def test_wrong_input_gets_one_sentence_and_status_2(
    capsys: pytest.CaptureFixture[str], args: list[str], words: str
) -> None:
    status, out, err = call(capsys, *args)
    lines = [line for line in err.splitlines() if not line.startswith("note: ")]
    assert (status, out) == (2, "")
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert words in lines[0]
    assert len(lines[0]) < 700


def test_help_names_every_verb_and_imports_nothing_heavy(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, "--help")
    assert status == 0
    assert all(verb in out for verb in VERBS)
    for verb in VERBS:
        status, out, _ = call(capsys, verb, "--help")
        assert status == 0
        assert "Usage: scantling " + verb in out


def test_no_arguments_print_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(capsys)
    assert status == 0
    assert "Commands:" in out + err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    from scantling import __version__

    assert call(capsys, "--version")[1].strip() == f"scantling {__version__}"


def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"{sys.executable} -m scantling trace llama-2-70b --unroll | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert "llama-2-70b" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("args", [["--help"], ["count", "--help"], ["trace", "tiny"]])
def test_the_status_of_a_command_whose_reader_left_is_that_of_success(args: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as gone:
        done = subprocess.run([sys.executable, "-m", "scantling", *args], stdout=gone, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")


def test_standard_output_that_lacks_a_character() -> None:
    table = [sys.executable, "-m", "scantling", "parts", "tiny"]
    wide, ascii_ = (
        subprocess.run(table, capture_output=True, check=True, env={**os.environ, "PYTHONIOENCODING": name}).stdout
        for name in ("utf-8", "ascii")
    )
    assert not wide.isascii()
    assert ascii_.isascii()
    assert b"attention" in ascii_
