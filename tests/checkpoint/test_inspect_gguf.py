"""Inspecting GGUF: files that were written here, and numbers of the metadata changed in place."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest
from tests.checkpoint.gguf_tiny import ARCHITECTURE, tiny
from tests.conftest import DATA

import scantling as sc
from scantling.checkpoint.gguf_write import write_gguf
from scantling.inspection import Inspection, inspect

FIXTURE = DATA / "checkpoints" / "gguf-llama-gqa" / "model.gguf"


def codes(found: Inspection) -> list[str]:
    return [finding.code for finding in found.findings]


@pytest.mark.parametrize("name", sorted(ARCHITECTURE))
def test_every_architecture_is_read_from_its_names_and_from_its_metadata(name: str, tmp_path: Path) -> None:
    lm = tiny(name)
    path = tmp_path / "model.gguf"
    write_gguf(lm, path)
    found = inspect(path)
    assert codes(found) == []
    assert ARCHITECTURE[name] in found.families
    assert all(line.agree is not False for line in found.lines)
    card = found.card
    assert card is not None
    assert sc.assemble(card).params == lm.parts.params
    facts = found.comparison.file
    assert (facts.value("layers"), facts.value("d_model"), facts.value("rows")) == (
        lm.card.n_layers,
        lm.card.d_model,
        lm.card.vocab_size,
    )
    assert facts.value("tied") is lm.card.tied


def patched(folder: Path, key: str, value: int) -> Path:
    """The recorded file with another number behind a key; both are 32-bit."""
    raw = FIXTURE.read_bytes()
    at = raw.index(key.encode()) + len(key)
    (kind,) = struct.unpack_from("<I", raw, at)
    assert kind in (4, 5)
    path = folder / "model.gguf"
    path.write_bytes(raw[: at + 4] + struct.pack("<I", value) + raw[at + 8 :])
    return path


@pytest.mark.parametrize(
    ("key", "value", "code", "words"),
    [
        ("llama.block_count", 3, "layer_count", "2 by the tensors, 3 by the metadata"),
        ("llama.embedding_length", 96, "config_refused", "rope.dimension_count is 16"),
        ("llama.feed_forward_length", 64, "mlp_width", "128 by the tensors, 64 by the metadata"),
        ("llama.attention.head_count_kv", 4, "kv_heads", "32 by the tensors, 64 by the metadata"),
        ("llama.attention.head_count", 4, "config_refused", "rope.dimension_count is 16"),
        ("llama.attention.head_count", 0, "config_refused", "head_count is 0"),
        ("llama.vocab_size", 60, "config_refused", "has 64 rows"),
    ],
)
def test_metadata_that_is_not_true_of_the_tensors(key: str, value: int, code: str, words: str, tmp_path: Path) -> None:
    try:
        path = patched(tmp_path, key, value)
    except ValueError:
        pytest.skip(f"the recorded file has no {key}")
    found = inspect(path)
    assert code in codes(found)
    assert any(words in finding.message for finding in found.findings)
    assert not found.ok


def test_the_only_gguf_of_a_folder(tmp_path: Path) -> None:
    shutil.copyfile(FIXTURE, tmp_path / "a.gguf")
    assert inspect(tmp_path).total == inspect(FIXTURE).total
    shutil.copyfile(FIXTURE, tmp_path / "b.gguf")
    with pytest.raises(sc.ScantlingInputError, match=r"several GGUF files \('a.gguf', 'b.gguf'\)"):
        inspect(tmp_path)


def test_a_gguf_under_another_name(tmp_path: Path) -> None:
    """Known by its first bytes."""
    shutil.copyfile(FIXTURE, tmp_path / "weights")
    assert inspect(tmp_path / "weights").gathered.form == "gguf"


def test_an_architecture_that_is_not_known_is_shown_all_the_same(tmp_path: Path) -> None:
    raw = FIXTURE.read_bytes()
    value = struct.pack("<Q", 5) + b"llama"
    at = raw.index(value, raw.index(b"general.architecture"))
    path = tmp_path / "model.gguf"
    path.write_bytes(raw[:at] + struct.pack("<Q", 5) + b"drama" + raw[at + len(value) :])
    found = inspect(path)
    assert codes(found) == ["config_refused"]
    assert "general.architecture is 'drama'" in found.findings[0].message
    assert found.comparison.file.value("d_model") == 128
    assert found.comparison.file.value("group") == 4
    assert found.total == inspect(FIXTURE).total
