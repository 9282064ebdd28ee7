"""Files that mean harm: one sentence each, nothing executed, nothing followed out of the folder."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint.test_gguf_header import mutated as mutated_gguf
from tests.checkpoint.test_header import BAD_FOLDERS
from tests.checkpoint.test_header import MALFORMED as MALFORMED_SAFETENSORS
from tests.checkpoint.test_header import mutated as mutated_safetensors
from tests.conftest import DATA, GOLDEN

from scantling.errors import ScantlingInputError
from scantling.inspection import inspect

MIB = 2**20


class Harm:
    """What a pickle of it does when it is read: it makes a file."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.place),))


def payload(place: Path, form: str) -> bytes:
    """Bytes that make `place` when a form of pickle is loaded."""
    if form.startswith("protocol"):
        return pickle.dumps(Harm(place), protocol=int(form.removeprefix("protocol ")))
    if form == "zip":
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            archive.writestr("model/data.pkl", pickle.dumps(Harm(place)))
        return out.getvalue()
    # The first formats of torch.save begin with a magic number as a pickle of its own.
    return pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2) + pickle.dumps(Harm(place), protocol=2)


FORMS = ["protocol 0", "protocol 2", "protocol 4", "zip", "old torch"]
NAMES = ["pytorch_model.bin", "model.pt", "model.pth", "vocab.pkl", "last.ckpt", "model.safetensors", "weights"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", FORMS)
def test_pickles_are_refused_unread(name: str, form: str, tmp_path: Path) -> None:
    harm = tmp_path / "harm"
    (tmp_path / name).write_bytes(payload(harm, form))
    with pytest.raises(ScantlingInputError) as caught:
        inspect(tmp_path / name)
    assert not harm.exists()
    assert str(caught.value).startswith(str(tmp_path / name))
    if name not in ("weights", "model.safetensors"):
        assert "named ." in str(caught.value)


@pytest.mark.parametrize("form", FORMS)
def test_a_folder_of_pickles_is_refused_unread(form: str, tmp_path: Path) -> None:
    harm = tmp_path / "harm"
    for name in ("pytorch_model.bin", "tokenizer.pkl", ".metadata"):
        (tmp_path / name).write_bytes(payload(harm, form))
    with pytest.raises(ScantlingInputError, match="must be converted to safetensors"):
        inspect(tmp_path)
    (tmp_path / "config.json").write_bytes((GOLDEN / "tiny" / "llama-gqa" / "config.json").read_bytes())
    found = inspect(tmp_path)
    assert [finding.code for finding in found.findings] == ["no_weights"]
    assert "'pytorch_model.bin' cannot be read" in found.findings[0].message
    assert not harm.exists()


def test_pickles_do_harm_where_they_are_loaded(tmp_path: Path) -> None:
    """The payloads of these tests are real ones."""
    pickle.loads(payload(tmp_path / "harm", "protocol 4"))
    assert (tmp_path / "harm").exists()


@pytest.mark.parametrize(("raw", "word"), MALFORMED_SAFETENSORS.values(), ids=MALFORMED_SAFETENSORS.keys())
def test_malformed_safetensors(raw: bytes, word: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    tracemalloc.start()
    with pytest.raises(ScantlingInputError, match=r".") as caught:
        inspect(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert word in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    assert peak < 2 * len(raw) + 64 * MIB


REPORTED = {"missing shard", "missing shard, parameters", "extra tensor", "absent tensor", "shards without an index"}
"""Folders that contradict themselves: for loading they are refused, here each is a finding."""


@pytest.mark.parametrize(("build", "word"), BAD_FOLDERS.values(), ids=BAD_FOLDERS.keys())
def test_bad_folders(build: Callable[[Path], None], word: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    build(tmp_path)
    name = request.node.callspec.id
    if name in REPORTED:
        found = inspect(tmp_path)
        assert not found.ok
        return
    # Beside these lies a config that is none.
    word = {"only GGUF": "GGUF", "only pickles": "not JSON", "no weights": "not JSON"}.get(name, word)
    with pytest.raises(ScantlingInputError) as caught:
        inspect(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert word in str(caught.value) or "are all missing" in str(caught.value)
    assert "\n" not in str(caught.value)


def links_to(target: str, name: str = "model.safetensors") -> Callable[[Path], None]:
    return lambda folder: (folder / name).symlink_to(target)


def pipe(name: str) -> Callable[[Path], None]:
    return lambda folder: os.mkfifo(folder / name)


SPECIAL: dict[str, Callable[[Path], None]] = {
    "weights are a pipe": pipe("model.safetensors"),
    "weights are a device": links_to("/dev/zero"),
    "weights are a terminal": links_to("/dev/tty"),
    "weights link to themselves": links_to("model.safetensors"),
    "weights link to nowhere": links_to("absent"),
    "weights link to a folder": links_to("."),
    "weights link to text": links_to("/etc/passwd"),
    "the index is a pipe": pipe("model.safetensors.index.json"),
    "the index is a device": links_to("/dev/zero", "model.safetensors.index.json"),
    "the index links to itself": links_to("model.safetensors.index.json", "model.safetensors.index.json"),
    "a shard is a pipe": lambda folder: (
        os.mkfifo(folder / "a.safetensors"),
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "a.safetensors"}}'),
    )[0],
    "the config alone is a pipe": pipe("config.json"),
    "the config alone is a device": links_to("/dev/zero", "config.json"),
    "the config links to itself": links_to("config.json", "config.json"),
    "a GGUF file is a pipe": pipe("model.gguf"),
}


@pytest.mark.parametrize("build", SPECIAL.values(), ids=SPECIAL.keys())
def test_pipes_devices_and_links(build: Callable[[Path], None], tmp_path: Path) -> None:
    """Opening a pipe would wait for its writer, and a device has no end."""
    build(tmp_path)
    with pytest.raises(ScantlingInputError) as caught:
        inspect(tmp_path)
    assert str(caught.value).startswith(str(tmp_path))
    assert len(str(caught.value)) < 700


def test_a_tokenizer_that_is_a_pipe(tmp_path: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_bytes((GOLDEN / "tiny" / "llama-gqa" / name).read_bytes())
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(ScantlingInputError, match=r"tokenizer\.json: is not a regular file"):
        inspect(tmp_path)


CONFIGS: dict[str, tuple[str, str]] = {
    "empty": ("", "is empty"),
    "no JSON": ("{", "not JSON"),
    "a list": ("[]", "a JSON object is needed"),
    "NaN": ('{"a": NaN}', "NaN is no number"),
    "Infinity": ('{"a": -Infinity}', "-Infinity is no number"),
    "a key twice": ('{"a": 1, "a": 2}', "stands twice"),
    "deep": ("[" * 100_000, "nested too deeply"),
    "long digits": ('{"a": ' + "1" * 5000 + "}", "too many digits"),
}


@pytest.mark.parametrize(("text", "word"), CONFIGS.values(), ids=CONFIGS.keys())
def test_configs_that_are_no_json_object(text: str, word: str, tmp_path: Path) -> None:
    source = GOLDEN / "tiny" / "llama-gqa"
    (tmp_path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ScantlingInputError, match=word):
        inspect(tmp_path)


BAD_VALUES: dict[str, Any] = {
    "num_hidden_layers": [0, -1, 2**31, True, "2", 1.0],
    "hidden_size": [0, -48, 2**40, 2**63],
    "num_attention_heads": [0, 7, 2**40],
    "num_key_value_heads": [0, 5],
    "vocab_size": [0, -1, 2**62],
    "intermediate_size": [0, 2**40],
    "rms_norm_eps": [-1.0, "1e-5"],
    "head_dim": [0, 2**40, 3],
    "unknown_key": [1],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in BAD_VALUES.items() for value in values])
def test_values_that_no_model_has_are_a_finding(key: str, value: Any, tmp_path: Path) -> None:
    """The tensors are shown all the same."""
    source = GOLDEN / "tiny" / "llama-gqa"
    (tmp_path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    config = json.loads((source / "config.json").read_text()) | {key: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = inspect(tmp_path)
    assert [finding.code for finding in found.findings] == ["config_refused"]
    assert found.findings[0].message.startswith((f"{tmp_path}/config.json: ", "card "))
    assert found.comparison.file.value("d_model") == 48
    assert found.total == 50_064


def mutations(form: str, count: int, seed: int, folder: Path) -> tuple[int, int]:
    """Inspect mutated files of a real small model; returns how many were read and how many refused."""
    rng = random.Random(seed)
    if form == "gguf":
        raw = (DATA / "checkpoints" / "gguf-llama-gqa" / "model.gguf").read_bytes()
        path, head = folder / "model.gguf", 4096
    else:
        source = GOLDEN / "tiny" / "mistral-full"
        raw = (source / "model.safetensors").read_bytes()
        path, head = folder / "model.safetensors", 8 + struct.unpack("<Q", raw[:8])[0]
        (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    change = mutated_gguf if form == "gguf" else mutated_safetensors
    read, refused = 0, []
    for _ in range(count):
        front = change(raw[:head], rng)
        if form == "safetensors" and rng.random() < 0.7 and len(front) > 8:
            front = struct.pack("<Q", len(front) - 8) + front[8:]
        path.write_bytes(front + raw[head:])
        try:
            found = inspect(path)
        except ScantlingInputError as error:
            refused.append(str(error))
        else:
            assert found.card_yaml() if found.card is not None else found.partial()
            read += 1
    assert all(message.startswith(f"{path}: ") and "\n" not in message for message in refused)
    return read, len(refused)


@pytest.mark.parametrize("form", ["gguf", "safetensors"])
def test_mutated_files_of_a_real_model(form: str, tmp_path: Path) -> None:
    read, refused = mutations(form, 150, 7, tmp_path)
    assert read + refused == 150
    assert min(read, refused) > 5


@pytest.mark.slow
@pytest.mark.parametrize("form", ["gguf", "safetensors"])
def test_5000_mutated_files_of_a_real_model(form: str, tmp_path: Path) -> None:
    read, refused = mutations(form, 5000, 11, tmp_path)
    assert read + refused == 5000
    assert min(read, refused) > 200
