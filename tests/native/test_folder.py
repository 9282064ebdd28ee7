"""Folders of safetensors through the compiled pass, with neither PyTorch nor a net: the same texts and logits."""

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
from tests.native.test_golden import NAMES, UNKNOWN
from tests.test_translate import write_tokenizer

import scantling as sc
from scantling.loading import load_packed
from scantling.native import library

pytestmark = pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))


def io_of(name: str) -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "tiny" / name / "io.safetensors")


def copied(name: str, to: Path, dtype: torch.dtype | None = None) -> Path:
    """A recorded folder, its weights in another dtype."""
    shutil.copytree(GOLDEN / "tiny" / name, to)
    for path in to.glob("model*.safetensors"):
        path.chmod(0o644)
        save_file({n: x if dtype is None else x.to(dtype) for n, x in load_file(path).items()}, path)
    return to


@pytest.mark.parametrize("name", [name for name in NAMES if name not in UNKNOWN])
def test_every_recorded_folder_decodes_without_a_net(name: str) -> None:
    """Fused, transposed and stacked tensors, tied heads, biases of zero: what `load` makes of them."""
    folder, io = GOLDEN / "tiny" / name, io_of(name)
    lm, whole = load_packed(folder), sc.load(folder)
    for attribute in ("card", "parts", "eos_ids", "start_id", "origin", "labels", "text_rules", "notes"):
        assert getattr(lm, attribute) == getattr(whole, attribute)
    ids, mask = io["gen_input_ids"], io["gen_attention_mask"]
    assert torch.equal(lm.generate(ids, 20, attention_mask=mask, ignore_eos=True), io["expected_ids"])
    assert (lm.is_built, lm.dtype) == (False, whole.dtype)


@pytest.mark.parametrize("name", ["llama-gqa", "gpt2", "mixtral", "gpt-oss"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_are_read_as_they_are(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = copied(name, tmp_path / name, dtype)
    lm, net = load_packed(folder), sc.load(folder)
    assert lm.packed is not None
    text = torch.arange(3, 30)
    net.pack()
    assert net.packed is not None
    found, wanted = (one.packed.session(one, 1, 27).score(text[None]) for one in (lm, net))  # type: ignore[union-attr]
    assert torch.equal(found, wanted)
    assert not lm.is_built
    assert lm.dtype == net.dtype == dtype


def test_a_file_of_two_dtypes_is_float32(tmp_path: Path) -> None:
    folder = copied("llama-gqa", tmp_path / "mixed")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({n: x.bfloat16() if "q_proj" in n else x for n, x in tensors.items()}, path)
    lm, whole = load_packed(folder), sc.load(folder)
    assert lm.notes == whole.notes
    assert "mixes" in lm.notes[-1]
    assert lm.generate([[5, 9, 11]], 12).tolist() == whole.generate([[5, 9, 11]], 12).tolist()
    assert lm.dtype == torch.float32


def test_a_whole_process_without_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copied("qwen3-moe", tmp_path / "qwen", torch.bfloat16)
    write_tokenizer(folder)
    code = "import sys; sys.modules['torch'] = None; from scantling.cli.main import main; main()"
    given = ["generate", "w5 w6 w7", "-m", str(folder), "--engine", "packed", "--max-new-tokens", "9", "--json"]
    done = subprocess.run([sys.executable, "-c", code, *given], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    made: dict[str, Any] = json.loads(done.stdout)
    assert (made["engine"], made["cache_bytes"]) == ("packed", made["predicted"]["cache_bytes"])
    whole = sc.load(folder)
    whole.pack()
    assert made["text"] == whole.generate("w5 w6 w7", 9)


def test_a_head_that_contradicts_its_config_is_refused(tmp_path: Path) -> None:
    folder = copied("llama-mha-tied-bias", tmp_path / "tied")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, path)
    for load in (load_packed, sc.load):
        with pytest.raises(sc.ScantlingInputError, match="differ; set tie_word_embeddings to false"):
            load(folder)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path)
    assert load_packed(folder).notes == sc.load(folder).notes
