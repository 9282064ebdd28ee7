"""`scantling convert`: what is written, what is said and where, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.conftest import DATA, GOLDEN
from tests.test_cli import call
from tests.text.test_gguf_tokenizer import gpt2_metadata, spm_metadata

import scantling as sc
from scantling.cli.convert import FORMATS
from scantling.text.tokenizer import Tokenizer
from scantling.units import parse_bytes

TINY = str(GOLDEN / "tiny" / "llama-gqa")
GGUF = DATA / "checkpoints" / "gguf-llama-gqa"


def test_a_folder_in_shards_and_another_dtype(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    status, text, err = call(
        capsys, "convert", TINY, str(out), "--to", "hf", "--dtype", "bf16", "--max-shard-size", "50kB", "--json"
    )
    report = json.loads(text)
    assert status == 0
    files = {file["name"]: file["bytes"] for file in report["files"]}
    assert files == {p.name: p.stat().st_size for p in out.iterdir()}
    assert (report["path"], report["model_type"], report["dtype"]) == (str(out), "llama", "bfloat16")
    assert report["total_params"] == 50064
    weights = sorted(name for name in files if name.startswith("model-"))
    assert [line.partition(":")[0] for line in err.splitlines()] == weights
    assert "100.1 kB (97.8 KiB) of 100.1 kB (97.8 KiB)" in err.splitlines()[-1]
    original = load_file(Path(TINY) / "model.safetensors")
    saved = {name: t for file in weights for name, t in load_file(out / file).items()}
    assert all(torch.equal(t.bfloat16(), saved[name]) for name, t in original.items())


def test_for_people(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, text, err = call(capsys, "convert", TINY, str(tmp_path / "out"), "--to", "hf")
    assert status == 0
    assert "model.safetensors" in text
    last = text.splitlines()[-1]
    assert last.startswith(f"{tmp_path / 'out'}: 50,064 parameters, 20")
    assert last.endswith("as llama")
    assert err.startswith("model.safetensors: 200.3 kB")


def test_gguf_becomes_a_folder_that_others_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    out = tmp_path / "out"
    status, _, err = call(capsys, "convert", str(GGUF / "model.gguf"), str(out), "--to", "hf")
    assert status == 0
    assert "note: stored as F32" in err
    wanted = json.loads((GGUF / "expected.json").read_text())
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        logits = model(torch.tensor(wanted["input_ids"])).logits
    torch.testing.assert_close(logits[0, -1], torch.tensor(wanted["last_row"]), atol=5e-6, rtol=1e-5)
    theirs, ours = (json.loads(path.read_text()) for path in (GGUF / "hf-config.json", out / "config.json"))
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers")
    assert {key: ours[key] for key in sizes} == {key: theirs[key] for key in sizes}


TEXTS = [
    "The capital of France is",
    " héllo  wörld\n\n\tx 12 1234567",
    "<|im_start|>user\nhi<|im_end|>\n",
    "你好 🎉",
    "",
]


def test_real_weights_from_gguf_with_their_tokenizer(smollm: sc.Model, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    saved = sc.save(smollm, tmp_path / "m", dtype="bf16")
    assert saved.model_type == "llama"
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    assert smollm.tokenizer is not None
    for text in TEXTS:
        assert theirs(text)["input_ids"] == smollm.tokenizer.encode(text)
    messages = [{"role": "user", "content": "Say hello."}]
    from scantling.text.template import render

    marks = {"bos_token": smollm.tokenizer.bos_token, "eos_token": smollm.tokenizer.eos_token}
    rendered = render(smollm.tokenizer.chat_template or "", messages, **marks)
    assert theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == rendered
    again = sc.load(tmp_path / "m")
    assert again.parts == smollm.parts
    assert again.eos_ids == smollm.eos_ids
    assert again.generate("The capital of France is", 2) == " Paris."
    for name, weight in again.net.state_dict().items():
        assert torch.equal(weight, smollm.net.state_dict()[name].bfloat16())


@pytest.mark.parametrize(
    "metadata",
    [
        spm_metadata(),
        spm_metadata(add_eos_token=True, eot_token_id=260),
        spm_metadata(add_bos_token=False),
        spm_metadata(add_space_prefix=False),
        gpt2_metadata(),
        gpt2_metadata(add_bos_token=True, add_eos_token=True),
        gpt2_metadata(pre="llama-bpe"),
        gpt2_metadata(bos_token_id=None, eos_token_id=None),
        gpt2_metadata(pre="qwen2") | {"tokenizer.chat_template": "{{ messages }}"},
    ],
)
def test_a_tokenizer_from_gguf_is_the_same_in_a_folder(metadata: dict[str, object], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer.from_gguf(metadata)
    for name, text in tokenizer.files().items():
        (tmp_path / name).write_text(text, "utf-8")
    again, theirs = Tokenizer.from_folder(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in ("abcd ab dab", "he the 12", "", " é🙂", "a</s>b", "<s>he"):
        assert again.encode(text) == tokenizer.encode(text)
        assert again.encode(text, add_special=False) == tokenizer.encode(text, add_special=False)
        if not text.startswith("<s>"):  # a second BOS is ours alone to leave out
            assert theirs(text)["input_ids"] == tokenizer.encode(text)
        ids = tokenizer.encode(text)
        assert again.decode(ids) == tokenizer.decode(ids)
    for name in ("bos_id", "eos_ids", "ends", "bos_token", "eos_token", "chat_template", "vocab_size"):
        assert getattr(again, name) == getattr(tokenizer, name)
    assert again.files() == tokenizer.files()


def test_a_folder_whose_config_forbids_the_bos_of_its_post_processor(tmp_path: Path) -> None:
    for name, text in Tokenizer.from_gguf(spm_metadata()).files().items():
        (tmp_path / name).write_text(text, "utf-8")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": False}))
    without = Tokenizer.from_folder(tmp_path)
    assert without.encode("ab")[:1] != [1]
    for name, text in without.files().items():
        (tmp_path / name).write_text(text, "utf-8")
    assert Tokenizer.from_folder(tmp_path).encode("ab") == without.encode("ab")


def test_a_bos_that_only_the_config_asks_for_comes_after_the_other_steps(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transformers import PreTrainedTokenizerFast

    for name, text in Tokenizer.from_gguf(gpt2_metadata()).files().items():
        (tmp_path / name).write_text(text, "utf-8")
    library = json.loads((tmp_path / "tokenizer.json").read_text())
    step = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(library | {"post_processor": step}))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": True}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("he")[:1] == [0]
    (tmp_path / "again").mkdir()
    for name, text in tokenizer.files().items():
        (tmp_path / "again" / name).write_text(text, "utf-8")
    steps = json.loads((tmp_path / "again" / "tokenizer.json").read_text())["post_processor"]["processors"]
    assert [inner["type"] for inner in steps] == ["ByteLevel", "TemplateProcessing"]
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path / "again")
    for text in ("he the", "", " é"):
        assert theirs(text)["input_ids"] == Tokenizer.from_folder(tmp_path / "again").encode(text)
        assert theirs(text)["input_ids"] == tokenizer.encode(text)


def test_overwrite_and_the_source_itself(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    place = tmp_path / "m"
    shutil.copytree(TINY, place, ignore=shutil.ignore_patterns("io*", "meta*", "config_hub*"))
    args = ("convert", str(place), str(place), "--to", "hf", "--dtype", "fp16")
    assert call(capsys, *args)[0] == 2
    assert call(capsys, *args, "--overwrite")[0] == 0
    assert sc.load(place).card.dtype == "float16"
    assert os.listdir(tmp_path) == ["m"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nothing-like-it", "OUT"], "no model 'nothing-like-it'"),
        (["gpt2", "OUT"], "is a card without weights"),
        ([TINY, "FULL"], "exists and is not empty"),
        ([TINY, "FULL", "--overwrite"], "holds 'letter.txt', which would be lost"),
        (["nothing-like-it", "FULL"], "exists and is not empty"),
        ([TINY, "OUT", "--max-shard-size", "5 boxes"], "'5 boxes' is no size"),
        ([TINY, "OUT", "--max-shard-size", "0"], "max_shard_bytes is 0"),
        ([TINY, "OUT", "--dtype", "int8"], "int8"),
        ([TINY, "OUT", "--dtype", "fp64"], "cannot be saved as float64"),
        ([TINY, "OUT", "--to", "onnx"], "'onnx' is not"),
        ([TINY], "Missing argument 'DST'"),
    ],
)
def test_wrong_input(capsys: pytest.CaptureFixture[str], tmp_path: Path, args: list[str], words: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    places = {"OUT": str(tmp_path / "out"), "FULL": str(tmp_path / "full")}
    to = [] if "--to" in args else ["--to", "hf"]
    status, out, err = call(capsys, "convert", *(places.get(arg, arg) for arg in args), *to)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert err.startswith("error: ")
    assert words in err
    assert sorted(os.listdir(tmp_path)) == ["full"]


def test_the_formats_of_the_contract() -> None:
    assert "hf" in FORMATS


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5 * 10**9),
        ("5 gib", 5 * 2**30),
        ("1.5kB", 1500),
        ("2TB", 2 * 10**12),
        ("123", 123),
        ("7b", 7),
        ("3MiB", 3 * 2**20),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "5XB", "1e9", "5GBB", "nan", "5iB"])
def test_what_is_no_size(text: Any) -> None:
    with pytest.raises(sc.ScantlingInputError, match="is no size"):
        parse_bytes(text)
