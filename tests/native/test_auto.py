"""Folders where no engine is named: the compiled pass where it can, else PyTorch and the reason."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.conftest import GOLDEN
from tests.test_cli import call
from tests.test_translate import write_tokenizer

import scantling as sc
from scantling.cli import engines
from scantling.native import library

pytestmark = pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))
TEMPLATE = "{% for m in messages %}{{ m.content }} w3 {% endfor %}"
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from scantling.cli.main import main; main()"


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    """A recorded folder by name, with words of its own; its weights in another dtype where one is named."""

    def copied(name: str, dtype: torch.dtype | None = None) -> Path:
        to = tmp_path / name
        shutil.copytree(GOLDEN / "tiny" / name, to)
        path = to / "model.safetensors"
        path.chmod(0o644)
        if dtype is not None:
            save_file({n: x.to(dtype) for n, x in load_file(path).items()}, path)
        write_tokenizer(to)
        (to / "chat_template.jinja").write_text(TEMPLATE)
        return to

    return copied


def generated(capsys: pytest.CaptureFixture[str], model: Path, *more: str) -> tuple[dict[str, Any], str]:
    """What is printed, and the line about the engine."""
    status, out, err = call(capsys, "generate", "w5 w6 w7", "-m", str(model), "--max-new-tokens", "9", "--json", *more)
    assert status == 0, err
    said = [line for line in err.splitlines() if line.startswith("engine: ")]
    return json.loads(out), said[0] if said else ""


@pytest.mark.parametrize(
    "name",
    ["llama-gqa", "gpt2", "gemma2", "mpt", "bloom", "gptj", "phi3", "olmo2", "mistral-swa", "mixtral", "gpt-oss"],
)
def test_a_folder_gives_the_text_of_the_net(name: str, folder: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder(name)
    made, said = generated(capsys, path)
    lm = sc.load(path)
    assert made["text"] == lm.generate("w5 w6 w7", 9)
    assert (made["engine"], said) == ("packed", "engine: packed, exact, on the file's own float32")
    assert made["cache_bytes"] == made["predicted"]["cache_bytes"] > 0
    plain, said = generated(capsys, path, "--engine", "torch")
    assert (plain["text"], plain["engine"], said) == (made["text"], "torch", "")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("named", [None, "own", "float32"])
def test_half_precision_is_computed_in_float32(
    dtype: torch.dtype, named: str | None, folder: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half the bytes of weights, and the text of their values in float32."""
    path, name = folder("llama-gqa", dtype), str(dtype).removeprefix("torch.")
    options = [] if named is None else ["--dtype", name if named == "own" else named]
    made, said = generated(capsys, path, *options)
    assert said == f"engine: packed, exact, on the file's own {name}"
    whole = sc.load(path, dtype="float32")
    assert made["text"] == whole.generate("w5 w6 w7", 9)
    shutil.rmtree(path)
    wide, _ = generated(capsys, folder("llama-gqa"))
    full, half = (one["predicted"]["weights_bytes"] for one in (wide, made))
    # Gains are float32 in both, in whole lines of 64 bytes; the rest is half as large.
    gains = sum(-(-4 * p.numel() // 64) * 64 for p in whole.net.parameters() if p.dim() == 1)
    assert full - half == half - gains > 0


def test_a_safetensors_file_is_taken_too(folder: Any, capsys: pytest.CaptureFixture[str]) -> None:
    made, _ = generated(capsys, folder("llama-gqa") / "model.safetensors")
    assert made["engine"] == "packed"


def test_greedy_text_of_a_folder_needs_no_torch(folder: Any) -> None:
    path = folder("qwen3", torch.bfloat16)
    given = ["generate", "w5 w6 w7", "-m", str(path), "--max-new-tokens", "9", "--json"]
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *given], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["text"] == sc.load(path, dtype="float32").generate("w5 w6 w7", 9)
    assert "engine: packed, exact, on the file's own bfloat16" in done.stderr


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("--cache ring", "--cache ring"),
        ("--cache-numbers int8", "--cache-numbers int8"),
        ("--contrastive 4", "--contrastive"),
        ("--draft-layers 1", "--draft-layers"),
        ("--dtype bf16", "--dtype bf16"),
        ("--dtype float64", "--dtype float64"),
    ],
)
def test_what_only_the_net_has(options: str, why: str, folder: Any, capsys: pytest.CaptureFixture[str]) -> None:
    made, said = generated(capsys, folder("llama-gqa"), *options.split())
    assert (made["engine"], said) == ("torch", f"engine: torch: {why}")


@pytest.mark.parametrize("options", ["--beams 3", "--draft-lookup 2", "--prefill-chunk 2", "--no-repeat-ngram 2"])
def test_what_both_have(options: str, folder: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder("llama-gqa")
    made, _ = generated(capsys, path, *options.split())
    plain, _ = generated(capsys, path, *options.split(), "--engine", "torch")
    assert (made["engine"], plain["engine"]) == ("packed", "torch")
    assert made["text"] == plain["text"]
    assert made["cache_bytes"] == made["predicted"]["cache_bytes"]


def test_why_a_folder_goes_through_pytorch(
    folder: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "does not know" in generated(capsys, folder("deepseek-v2"))[1]
    assert "it runs decoders that stand alone" in generated(capsys, folder("t5"))[1]
    assert "the weights are float64" in generated(capsys, folder("gpt2", torch.float64))[1]
    path = folder("llama-gqa")
    monkeypatch.setattr(library, "missing", lambda: "no C++ compiler was found")
    made, said = generated(capsys, path)
    assert (made["engine"], said) == ("torch", "engine: torch: no C++ compiler was found")


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_another_device_is_never_exchanged(device: str, folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What loading is asked for; the device need not be there."""
    from scantling import loading

    asked: dict[str, Any] = {}
    monkeypatch.setattr(loading, "load", lambda model, **more: asked.update(more))
    given = {"engine": "auto", "model": str(folder("llama-gqa")), "revision": None, "dtype": None, "device": device}
    assert engines.with_engine(given)[1] == f"engine: torch: --device {device}"
    assert asked["device"] == device


def test_a_conversation_and_many_prompts(
    folder: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import io

    path = folder("qwen2", torch.bfloat16)
    (tmp_path / "in.jsonl").write_text('"w5 w6"\n"w7 w8 w9"\n')
    given = ["--prompts", str(tmp_path / "in.jsonl"), "--max-new-tokens", "7", "-m", str(path)]
    said, texts = [], []
    for engine in ("auto", "torch"):
        out = tmp_path / f"{engine}.jsonl"
        status, _, err = call(capsys, "generate", *given, "--out", str(out), "--engine", engine, "--dtype", "float32")
        assert status == 0, err
        texts.append([json.loads(line)["text"] for line in out.read_text().splitlines()])
        monkeypatch.setattr("sys.stdin", io.StringIO("w5 w6\nw7\n"))
        more = ("--max-new-tokens", "5", "--context", "64", "--engine", engine, "--dtype", "float32")
        status, text, err = call(capsys, "chat", "-m", str(path), *more)
        assert status == 0, err
        texts.append(text.splitlines())
        said.append("engine: packed, exact" in err)
    assert texts[:2] == texts[2:]
    assert said == [True, False]
    # The lines that the net writes in bfloat16 are others, and are not mixed with these.
    status, _, err = call(capsys, "generate", *given, "--out", str(tmp_path / "auto.jsonl"), "--engine", "torch")
    assert status == 2
    assert "auto.jsonl" in err


def test_eight_bit_activations_without_blocks_are_said(folder: Any, capsys: pytest.CaptureFixture[str]) -> None:
    if not library.library().sc_integer_dot():
        pytest.skip("no integer products here")
    _, _, err = call(capsys, "generate", "w5", "-m", str(folder("llama-gqa")), "--engine", "packed-int8")
    assert "note: no matrix is in blocks of 8 or 4 bits, so activations stay float32" in err
