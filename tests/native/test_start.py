"""The first token without PyTorch, and which engine is taken where none is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.native.test_pass import BASE
from tests.native.test_session import built

import scantling as sc
from scantling.checkpoint.gguf_write import write_gguf
from scantling.cli.engines import file_for_packed
from scantling.cli.main import _run
from scantling.generate.settings import Options
from scantling.loading import load_packed
from scantling.native import library

pytestmark = pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))
PROMPT = ["generate", "The three primary colours are", "--max-new-tokens", "10", "--json"]


def test_the_default_engine_needs_no_torch_and_writes_the_same_text(capsys: pytest.CaptureFixture[str]) -> None:
    """A whole process, in which an import of torch fails."""
    code = "import sys; sys.modules['torch'] = None; from scantling.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *PROMPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["engine"] == "packed"
    assert "engine: packed, exact" in done.stderr
    assert _run([*PROMPT, "--engine", "torch"]) == 0
    wanted = json.loads(capsys.readouterr().out)
    assert wanted["engine"] == "torch"
    assert found["text"] == wanted["text"]
    assert found["new_tokens"] == wanted["new_tokens"] == 10


@pytest.mark.parametrize("options", ["--temperature 1", "--beams 2", "--draft-lookup 2", "--regex a"])
def test_what_needs_torch_says_so(options: str) -> None:
    code = "import sys; sys.modules['torch'] = None; from scantling.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *PROMPT, *options.split()], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: torch is needed to ")


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A GGUF file of quantised weights, by seed; with a cache folder of its own."""
    pytest.importorskip("gguf")
    monkeypatch.setenv("SCANTLING_CACHE", str(tmp_path / "cache"))
    card = {**BASE, "d_model": 64, "vocab_size": 96, "mlp": BASE["mlp"] | {"d_ff": 96}, "tied": True}
    path = tmp_path / "small.gguf"

    def write(seed: int, dtype: str = "q8_0") -> Path:
        from scantling.cards.read import from_dict

        path.unlink(missing_ok=True)
        write_gguf(sc.new(from_dict(card, "small"), seed=seed), path, dtype)
        return path

    return write


def continued(lm: sc.Model) -> list[int]:
    """The likeliest ids behind a fixed prompt."""
    ids: torch.Tensor = lm.generate(torch.tensor([[5, 7, 11]]), 12, options=Options(ignore_eos=True))
    return ids[0].tolist()


def test_a_net_is_loaded_when_it_is_asked_for(small: Any) -> None:
    path = small(1)
    lm, whole = load_packed(path), sc.load(path)
    assert not lm.is_built
    assert lm.device.type == "cpu"
    assert lm.dtype == whole.dtype
    assert lm.card == whole.card
    assert continued(lm) == continued(whole)
    assert not lm.is_built
    assert torch.equal(lm.logits([1, 2, 3]), whole.logits([1, 2, 3]))
    assert lm.is_built
    with pytest.raises(AttributeError, match="a model has no 'nett'"):
        lm.nett  # noqa: B018


def test_a_file_that_changed_is_packed_again(small: Any) -> None:
    """The same name and size, other weights."""
    path = small(1)
    first, size = continued(load_packed(path)), path.stat().st_size
    again = small(2)
    os.utime(again, ns=(0, again.stat().st_mtime_ns + 1))
    assert again.stat().st_size == size
    second = continued(load_packed(path))
    assert second == continued(sc.load(path)) != first


def test_nothing_is_kept_but_the_library(small: Any, tmp_path: Path) -> None:
    continued(load_packed(small(1)))
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.suffix != ".so"]


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q4_0"])
def test_files_of_every_width_are_taken_as_they_are(small: Any, dtype: str) -> None:
    path = small(1, dtype)
    assert not isinstance(file_for_packed(str(path), None), str)
    lm = load_packed(path)
    assert lm.packed is not None
    assert lm.packed.weights.out.kind == {"q4_0": "q4"}.get(dtype, dtype)
    assert continued(lm) == continued(sc.load(path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cache", "ring"], "--cache ring"),
        (["--cache-numbers", "int8"], "--cache-numbers int8"),
        (["--dtype", "bfloat16"], "--dtype bfloat16"),
    ],
)
def test_what_only_pytorch_has(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run([*PROMPT, *options, "--engine", "packed"]) == 2
    assert f"{message} goes with --engine torch" in capsys.readouterr().err
    assert _run([*PROMPT, *options, "--max-new-tokens", "2"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["engine"] == "torch"
    assert f"engine: torch: {message}" in said.err


def test_a_packed_model_draws_what_pytorch_draws() -> None:
    lm = built("llama")
    ids = torch.tensor([[3, 4, 5]])
    wanted = lm.generate(ids, 9, temperature=0.8, seed=4, ignore_eos=True)
    lm.pack()
    assert torch.equal(lm.generate(ids, 9, temperature=0.8, seed=4, ignore_eos=True), wanted)
