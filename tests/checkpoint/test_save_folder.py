"""The folder that is saved: whole or not at all, nothing lost, and everything that belongs to a model goes along."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace as changed
from safetensors.torch import load_file
from tests.conftest import DATA, GOLDEN

import scantling as sc
from scantling.checkpoint import save as saving
from scantling.checkpoint import whole_folder
from scantling.checkpoint.save import check_folder

TINY = GOLDEN / "tiny"


@pytest.fixture
def lm() -> sc.Model:
    return sc.load(TINY / "llama-gqa")


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def assert_refused(lm: sc.Model, folder: Path, *words: str, **options: Any) -> None:
    with pytest.raises(sc.ScantlingInputError) as error:
        sc.save(lm, folder, **options)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert "\n" not in str(error.value)


def test_what_save_says_of_itself_is_so(lm: sc.Model, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    saved = sc.save(lm, tmp_path / "a" / "b", max_shard_bytes=100_000, progress=lambda *said: seen.append(said))
    assert saved.files == {name: len(data) for name, data in contents(tmp_path / "a" / "b").items()}
    assert (saved.model_type, saved.dtype, saved.notes) == ("llama", "float32", ())
    assert [name for name, _, _ in seen] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert seen[-1][1] == seen[-1][2] == 4 * lm.parts.params
    assert os.listdir(tmp_path / "a") == ["b"]


def test_a_folder_that_is_not_empty_is_not_touched(lm: sc.Model, tmp_path: Path) -> None:
    (tmp_path / "diary.txt").write_text("dear diary")
    before = contents(tmp_path)
    assert_refused(lm, tmp_path, "exists and is not empty", "choose another folder")
    assert_refused(lm, tmp_path, "holds 'diary.txt'", "would be lost", overwrite=True)
    assert_refused(lm, tmp_path / "diary.txt", "is a file")
    assert contents(tmp_path) == before


def test_a_folder_of_things_that_a_checkpoint_never_has_is_not_replaced(lm: sc.Model, tmp_path: Path) -> None:
    sc.save(lm, tmp_path / "m")
    (tmp_path / "m" / "runs").mkdir()
    (tmp_path / "m" / "runs" / "config.json").write_text("{}")
    (tmp_path / "m" / "optimizer.pt").write_bytes(b"state")
    assert_refused(lm, tmp_path / "m", "'optimizer.pt' and 1 more", overwrite=True)
    (tmp_path / "m" / "optimizer.pt").unlink()
    (tmp_path / "m" / "runs" / "config.json").unlink()
    (tmp_path / "m" / "runs").rmdir()
    (tmp_path / "m" / "data").symlink_to(tmp_path)
    assert_refused(lm, tmp_path / "m", "'data'", overwrite=True)


def test_an_empty_folder_is_filled_and_an_old_checkpoint_is_replaced(lm: sc.Model, tmp_path: Path) -> None:
    place = tmp_path / "m"
    place.mkdir()
    sc.save(lm, place, max_shard_bytes=50_000)
    assert (place / "model.safetensors.index.json").exists()
    assert_refused(lm, place, "exists and is not empty")
    place.chmod(0o750)
    other = sc.load(TINY / "gpt2")
    sc.save(other, place, overwrite=True)
    assert set(contents(place)) == {"config.json", "card.yaml", "model.safetensors"}
    assert sc.load(place).parts == other.parts
    assert place.stat().st_mode & 0o777 == 0o750
    assert os.listdir(tmp_path) == ["m"]


def test_a_model_can_be_saved_over_the_folder_that_it_was_loaded_from(tmp_path: Path) -> None:
    place = tmp_path / "m"
    shutil.copytree(TINY / "llama-gqa", place, ignore=shutil.ignore_patterns("io*", "meta*", "config_hub*"))
    (place / "tokenizer.json").write_bytes((DATA / "tok-metaspace" / "tokenizer.json").read_bytes())
    lm = sc.load(place)
    with torch.no_grad():
        lm.net.get_parameter("embed.weight").mul_(2)
    wanted = {name: tensor.clone() for name, tensor in lm.net.state_dict().items()}
    sc.save(lm, place, overwrite=True)
    sc.save(lm, place, overwrite=True)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in sc.load(place).net.state_dict().items())
    assert contents(place)["tokenizer.json"] == (DATA / "tok-metaspace" / "tokenizer.json").read_bytes()


def test_a_link_stays_a_link(lm: sc.Model, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    sc.save(lm, tmp_path / "link")
    sc.save(lm, tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert sc.load(tmp_path / "real").parts == lm.parts


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two renames"])
def test_both_ways_of_taking_the_place(
    lm: sc.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr(whole_folder, "_exchanged", lambda one, other: False)
    sc.save(sc.load(TINY / "gpt2"), tmp_path / "m")
    sc.save(lm, tmp_path / "m", overwrite=True)
    assert sc.load(tmp_path / "m").parts == lm.parts
    assert os.listdir(tmp_path) == ["m"]


KILLED = """
import os, signal, sys
import scantling as sc
lm = sc.load(sys.argv[1])
sc.save(lm, sys.argv[2], overwrite=True, max_shard_bytes=100_000,
        progress=lambda name, done, total: os.kill(os.getpid(), signal.SIGKILL) if done > total / 2 else None)
"""


def test_a_kill_in_the_middle_leaves_the_old_folder_whole(lm: sc.Model, tmp_path: Path) -> None:
    sc.save(sc.load(TINY / "gpt2"), tmp_path / "m")
    before = contents(tmp_path / "m")
    command = [sys.executable, "-c", KILLED, str(TINY / "llama-gqa"), str(tmp_path / "m")]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert contents(tmp_path / "m") == before
    (left,) = (name for name in os.listdir(tmp_path) if name != "m")
    assert left.startswith(".m.saving-")
    saved = sc.save(lm, tmp_path / "m", overwrite=True)
    assert saved.notes == (f"'{left}' beside it is left from a save that was cut off; delete it",)


@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()])
def test_a_save_that_fails_leaves_nothing_behind(
    lm: sc.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: BaseException
) -> None:
    sc.save(sc.load(TINY / "gpt2"), tmp_path / "m")
    before = contents(tmp_path)

    def fail(*_: Any) -> None:
        raise fault

    monkeypatch.setattr(saving, "write_safetensors", fail)
    with pytest.raises((sc.ScantlingInputError, KeyboardInterrupt)) as error:
        sc.save(lm, tmp_path / "m", overwrite=True)
    if isinstance(fault, OSError):
        assert str(error.value) == f"{tmp_path / 'm'}: cannot be written: No space left on device"
    assert contents(tmp_path) == before


def test_the_disk_is_asked_before_anything_is_written(
    lm: sc.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=200_000))
    assert_refused(lm, tmp_path / "deep" / "m", "the files need 2", "the disk has 200.0 kB", "smaller dtype")
    assert os.listdir(tmp_path) == []
    sc.save(lm, tmp_path / "m", dtype="bf16")


def test_a_place_that_cannot_be(lm: sc.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    assert_refused(lm, tmp_path / "file" / "m", "cannot be made", "file is a file")
    assert_refused(lm, tmp_path / ("x" * 300), "File name too long")

    def deny(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", deny)
    assert_refused(lm, tmp_path / "m", "cannot be written: Permission denied")


ALONG = {
    "tokenizer.json": (DATA / "tok-bytelevel" / "tokenizer.json").read_bytes(),
    "tokenizer_config.json": (DATA / "tok-bytelevel" / "tokenizer_config.json").read_bytes(),
    "special_tokens_map.json": b'{ "eos_token":"<|endoftext|>" }',
    "generation_config.json": b'{"eos_token_id": [2, 5],  "do_sample": true}',
    "chat_template.jinja": "{{ messages }} \u00e9\r\n".encode(),
    "additional_chat_templates/rag.jinja": b"{{ x }}",
    "merges.txt": b"#version: 0.2\r\na b\r\n",
    "vocab.json": b"{}",
    "LICENSE": b"Apache",
}
NOT_ALONG = {"README.md": b"old", "pytorch_model.bin": b"\x80\x04", "modeling_x.py": b"raise SystemExit"}


@pytest.fixture
def dressed(tmp_path: Path) -> Path:
    """A folder with all that a published one has beside its weights."""
    source = tmp_path / "source"
    shutil.copytree(TINY / "llama-gqa", source, ignore=shutil.ignore_patterns("io*", "meta*"))
    (source / "additional_chat_templates").mkdir()
    for name, data in (ALONG | NOT_ALONG).items():
        (source / name).write_bytes(data)
    return source


def test_all_that_belongs_to_the_model_goes_along_byte_for_byte(dressed: Path, tmp_path: Path) -> None:
    lm = sc.load(dressed)
    sc.save(lm, tmp_path / "out", max_shard_bytes=100_000)
    written = {"config.json", "card.yaml", "model.safetensors.index.json"}
    found = {n: d for n, d in contents(tmp_path / "out").items() if n not in written and "model-0" not in n}
    assert found == ALONG
    again = sc.load(tmp_path / "out")
    assert again.tokenizer is not None
    assert lm.tokenizer is not None
    assert again.tokenizer.encode("Hello there") == lm.tokenizer.encode("Hello there")
    assert again.eos_ids == lm.eos_ids
    sc.save(again, tmp_path / "out", overwrite=True)
    check_folder(tmp_path / "out", overwrite=True)


def test_when_the_source_is_gone_the_weights_are_not_lost(dressed: Path, tmp_path: Path) -> None:
    lm = sc.load(dressed)
    shutil.rmtree(dressed)
    saved = sc.save(lm, tmp_path / "out")
    assert len(saved.notes) == 1
    assert "is gone" in saved.notes[0]
    again = sc.load(tmp_path / "out")
    assert torch.equal(again.logits([[1, 2, 3]]), lm.logits([[1, 2, 3]]))
    assert again.tokenizer is not None
    assert lm.tokenizer is not None
    assert again.tokenizer.encode("Hello there") == lm.tokenizer.encode("Hello there")
    assert again.tokenizer.chat_template == lm.tokenizer.chat_template


def test_code_that_is_not_copied_is_not_named(dressed: Path, tmp_path: Path) -> None:
    config = json.loads((dressed / "config.json").read_text())
    local = {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.X"}
    (dressed / "config.json").write_text(json.dumps(config | {"auto_map": local}))
    saved = sc.save(sc.load(dressed), tmp_path / "out")
    assert "auto_map is left out" in saved.notes[0]
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config
    elsewhere = {"auto_map": {"AutoConfig": "someone/repo--configuration_x.X"}}
    (dressed / "config.json").write_text(json.dumps(config | elsewhere))
    sc.save(sc.load(dressed), tmp_path / "other")
    assert json.loads((tmp_path / "other" / "config.json").read_text()) == config | elsewhere


def test_a_config_without_a_dtype_is_told_only_of_sixteen_bits(dressed: Path, tmp_path: Path) -> None:
    config = json.loads((dressed / "config.json").read_text())
    del config["dtype"]
    (dressed / "config.json").write_text(json.dumps(config))
    lm = sc.load(dressed)
    sc.save(lm, tmp_path / "wide")
    sc.save(lm, tmp_path / "narrow", dtype="float16")
    assert json.loads((tmp_path / "wide" / "config.json").read_text()) == config
    assert json.loads((tmp_path / "narrow" / "config.json").read_text()) == config | {"torch_dtype": "float16"}


def test_a_model_whose_config_is_no_longer_true_gets_another(lm: sc.Model, tmp_path: Path) -> None:
    card = changed(lm.card, position=sc.card("gpt2").position)
    other = replace(sc.new(card), origin=lm.origin)
    saved = sc.save(other, tmp_path / "out")
    assert saved.model_type == "scantling"
    assert saved.notes == ("the model is no longer what its config said; saved as scantling, not llama",)
    again = sc.load(tmp_path / "out")
    assert again.card == other.card
    assert torch.equal(again.logits([[1, 2, 3]]), other.logits([[1, 2, 3]]))


def test_our_own_layout(tmp_path: Path) -> None:
    lm = own_model()
    saved = sc.save(lm, tmp_path / "out", dtype="bf16", max_shard_bytes=20_000)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {"model_type": "scantling", "layout": 1, "bos_token_id": None, "eos_token_id": [3, 7]}
    tensors = {n: t for f in (tmp_path / "out").glob("model*.safetensors") for n, t in load_file(f).items()}
    assert {n: tuple(t.shape) for n, t in tensors.items()} == lm.parts.named_weights
    assert saved.model_type == "scantling"
    again = sc.load(tmp_path / "out")
    assert again.eos_ids == {3, 7}
    assert again.card.dtype == "bfloat16"
    assert sc.assemble(sc.card(tmp_path / "out")) == again.parts == lm.parts
    sc.save(again, tmp_path / "again")
    assert contents(tmp_path / "again")["config.json"] == contents(tmp_path / "out")["config.json"]
    (tmp_path / "out" / "config.json").write_text(json.dumps(config | {"layout": 2}))
    with pytest.raises(sc.ScantlingInputError, match="layout is 2, which is not supported"):
        sc.load(tmp_path / "out")
    (tmp_path / "again" / "card.yaml").unlink()
    with pytest.raises(sc.ScantlingInputError, match=r"card\.yaml: cannot be read"):
        sc.load(tmp_path / "again")


def own_model() -> sc.Model:
    """A model that no family's config expresses: gated, with RMSNorm and learned positions."""
    card = sc.load(TINY / "llama-gqa").card
    return replace(sc.new(changed(card, position=sc.card("gpt2").position)), eos_ids=frozenset({7, 3}))


def test_a_new_model(tmp_path: Path) -> None:
    lm = sc.new("tiny", seed=5, dtype="bf16")
    net = sc.assemble(sc.card("tiny")).build(dtype="bfloat16", seed=5)
    assert all(torch.equal(w, net.state_dict()[n]) for n, w in lm.net.state_dict().items())
    assert lm.card.dtype == "bfloat16"
    assert all(p.requires_grad for p in lm.net.parameters())
    sc.save(lm, tmp_path / "m")
    assert torch.equal(sc.load(tmp_path / "m").logits([[1, 2]]), lm.logits([[1, 2]]))
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert (config["eos_token_id"], config["bos_token_id"]) == (None, None)


def test_nets_that_are_not_what_their_card_says(lm: sc.Model, tmp_path: Path) -> None:
    assert_refused(replace(lm, net=lm.parts.build(device="meta")), tmp_path / "m", "'meta'", "holds no values")
    other = sc.load(TINY / "llama-mqa")
    assert_refused(replace(lm, net=other.net), tmp_path / "m", "has shape", "by its card")
    assert_refused(replace(lm, card=other.card), tmp_path / "m", "does not describe the net")
    lm.net.register_parameter("lora", torch.nn.Parameter(torch.zeros(2)))
    assert_refused(lm, tmp_path / "m", "the net has 'lora'")
    assert_refused(replace(other, net=torch.nn.Linear(2, 2)), tmp_path / "m", "the net has no 'embed.weight'")
    assert os.listdir(tmp_path) == []


def test_dtypes(lm: sc.Model, tmp_path: Path) -> None:
    assert_refused(lm, tmp_path / "m", "unknown dtype 'int3'", dtype="int3")
    assert_refused(lm, tmp_path / "m", "cannot be saved as float64", dtype="float64")
    assert_refused(lm, tmp_path / "m", "max_shard_bytes is 0", max_shard_bytes=0)
    with torch.no_grad():
        lm.net.get_parameter("embed.weight")[3, 4] = 1e5
    assert_refused(lm, tmp_path / "m", "'model.embed_tokens.weight' has numbers too large for float16", dtype="fp16")
    assert os.listdir(tmp_path) == []
    lm.net.get_submodule("decoder").bfloat16()
    assert sc.save(lm, tmp_path / "m").notes == ("the net mixes bfloat16, float32; saved as float32",)
