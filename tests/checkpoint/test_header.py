"""Headers of safetensors files and sharded folders: good ones equal the library's view, bad ones get one sentence."""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from scantling.checkpoint.files import foreign_kind
from scantling.checkpoint.header import TensorInfo, read_safetensors
from scantling.checkpoint.sharded import CheckpointHeader, read_checkpoint
from scantling.errors import ScantlingInputError


def packed(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else (header if isinstance(header, str) else json.dumps(header)).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(dtype: Any = "F32", shape: Any = (4,), offsets: Any = (0, 16), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def one(dtype: Any = "F32", shape: Any = (4,), offsets: Any = (0, 16), **more: Any) -> bytes:
    return packed({"a": entry(dtype, shape, offsets, **more)}, bytes(16))


def two(first: tuple[int, int], second: tuple[int, int], size: int = 32) -> bytes:
    shapes = [[(end - begin) // 4] for begin, end in (first, second)]
    return packed({"a": entry("F32", shapes[0], first), "b": entry("F32", shapes[1], second)}, bytes(size))


ENTRY = json.dumps(entry())
PICKLE = b"\x80\x04\x95\x20\x00\x00\x00\x00\x00\x00\x00" + bytes(40)
GOOD = two((0, 16), (16, 32))

MALFORMED: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "empty"),
    "seven bytes": (GOOD[:7], "fewer than the 8"),
    "truncated header": (GOOD[:40], "bytes are missing"),
    "truncated data": (GOOD[:-12], "12 bytes are missing"),
    "no data at all": (GOOD[:-32], "32 bytes are missing"),
    "one byte too many": (GOOD + b"\0", "1 bytes follow"),
    "header of 132 MB declared": (
        packed("{}", length=132_095_296),
        "132095296 bytes in its first 8 bytes, over the lim",
    ),
    "header of 2^63 declared": (packed("{}", length=2**63), "9223372036854775808"),
    "header of 2^64-1 declared": (packed("{}", length=2**64 - 1), "over the limit of 16777216"),
    "git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 5\n", "git-lfs pointer"),
    "HTML page": (b"<!DOCTYPE html><html><body>Sign in</body></html>", "HTML"),
    "HTML after white space": (b"\n  <html lang=en><body>404 not found</body>", "HTML"),
    "HTML after a byte order mark": (b"\xef\xbb\xbf<html><body>nothing</body>", "HTML"),
    "GGUF": (b"GGUF\x03\0\0\0" + bytes(40), "GGUF file"),
    "zip, as torch.save writes": (b"PK\x03\x04\0\0\x08\x08" + bytes(40), "zip archive"),
    "pickle protocol 4": (PICKLE, "pickle"),
    "pickle protocol 2": (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.", "pickle"),
    "gzip": (b"\x1f\x8b\x08\0\x12\x34\x56\x78" + bytes(20), "gzip"),
    "NumPy": (b"\x93NUMPY\x01\0" + bytes(40), "NumPy"),
    "HDF5": (b"\x89HDF\r\n\x1a\n" + bytes(40), "HDF5"),
    "JSON text": (b'{"error": "Repository not found"}', "JSON text"),
    "empty header": (packed(b"", bytes(4)), "begins with '{'"),
    "header is an array": (packed("[]"), "begins with '{'"),
    "white space first": (packed(" {}"), "begins with '{'"),
    "byte order mark first": (packed(b"\xef\xbb\xbf{}"), "begins with '{'"),
    "not UTF-8": (packed(b'{"\xff":1}'), "not UTF-8"),
    "UTF-8 surrogate": (packed(b'{"\xed\xa0\x80":1}'), "not UTF-8"),
    "escaped lone surrogate": (packed(r'{"\ud800":{}}'), "surrogate"),
    "header does not close": (packed(f'{{"a":{ENTRY}', bytes(16)), "needs ',' or '}'"),
    "text after the object": (packed("{}x"), "after the end"),
    "NUL padding": (packed(b"{}\0\0\0\0\0\0"), "after the end"),
    "key is a number": (packed("{1:{}}"), "string in double quotes"),
    "key does not end": (packed('{"a'), "not a JSON string"),
    "bad escape in a key": (packed(r'{"\q":{}}'), "not a JSON string"),
    "control character in a key": (packed(b'{"a\x01":{}}'), "not a JSON string"),
    "no colon": (packed('{"a" {}}'), "':'"),
    "comma at the end": (packed('{"__metadata__":{},}'), "string in double quotes"),
    "duplicate tensor": (packed(f'{{"a":{ENTRY},"a":{ENTRY}}}', bytes(16)), "duplicate tensor name"),
    "same name, escaped": (
        packed(f'{{"a":{ENTRY},"\\u0061":{ENTRY}}}'),
        "duplicate tensor name",
    ),
    "duplicate field": (packed('{"a":{"dtype":"F32","dtype":"F32","shape":[],"data_offsets":[0,4]}}'), "duplicate key"),
    "duplicate metadata": (packed('{"__metadata__":{"k":"1","k":"2"}}'), "duplicate key 'k'"),
    "two metadata": (packed('{"__metadata__":{},"__metadata__":{}}'), "duplicate tensor name '__metadata__'"),
    "metadata is a string": (packed({"__metadata__": "pt"}), "__metadata__ must be a JSON object"),
    "metadata value is a number": (packed({"__metadata__": {"step": 1}}), "string in double quotes"),
    "metadata is nested": (packed({"__metadata__": {"a": {"b": "c"}}}), "string in double quotes"),
    "metadata of 65,537 keys": (packed({"__metadata__": {str(i): "" for i in range(65_537)}}), "65536 keys"),
    "entry is a number": (packed({"a": 1}), "an object with dtype"),
    "entry is null": (packed({"a": None}), "an object with dtype"),
    "entry is too long": (packed({"a": entry(shape=[1] * 3000)}), "longer than 4096"),
    "nested 100,000 deep": (packed('{"a":' + "[" * 100_000), "not valid JSON"),
    "an integer of 5,000 digits": (packed('{"a":{"shape":[' + "1" * 5000 + "]}}"), "not valid JSON"),
    "no dtype": (packed({"a": {"shape": [4], "data_offsets": [0, 16]}}, bytes(16)), "lacks the field 'dtype'"),
    "no shape": (packed({"a": {"dtype": "F32", "data_offsets": [0, 16]}}, bytes(16)), "lacks the field 'shape'"),
    "no data_offsets": (packed({"a": {"dtype": "F32", "shape": [4]}}, bytes(16)), "lacks the field 'data_offsets'"),
    "unknown field": (one(strides=[1]), "unknown field 'strides'"),
    "unknown dtype": (one("F33"), "did you mean 'F32'"),
    "dtype in lower case": (one("f32"), "dtype 'f32'"),
    "dtype of packed half bytes": (one("F4"), "dtype 'F4'"),
    "dtype is a number": (one(32), "dtype 32"),
    "dtype is null": (one(None), "dtype None"),
    "shape is a number": (one(shape=4), "shape 4"),
    "shape holds a string": (one(shape=["4"]), "shape ['4']"),
    "shape holds a float": (one(shape=[4.0]), "shape [4.0]"),
    "shape holds a bool": (one(shape=[True, 4]), "shape [True, 4]"),
    "shape holds NaN": (one(shape=[float("nan")]), "NaN is not JSON"),
    "negative shape": (one(shape=[-1, -4]), "shape [-1, -4]"),
    "shape of 2^63": (one(shape=[2**63]), "shape [9223372036854775808]"),
    "shape of 65 dimensions": (one(shape=[1] * 65), "at most 64"),
    "product overflows 64 bits": (one(shape=[2**32, 2**32]), "needs 73786976294838206464"),
    "product of 64 dimensions": (one(shape=[2**62] * 64), "needs"),
    "shape needs more than the range": (one(shape=[5]), "needs 20"),
    "shape needs less than the range": (one(shape=[3]), "needs 12"),
    "dtype needs less than the range": (one("F16"), "needs 8"),
    "offsets is a number": (one(offsets=16), "data_offsets 16"),
    "one offset": (one(offsets=[16]), "two integers"),
    "three offsets": (one(offsets=[0, 16, 16]), "two integers"),
    "offset is NaN": (one(offsets=[float("nan"), 16]), "NaN is not JSON"),
    "offset is infinite": (one(offsets=[0, float("inf")]), "Infinity is not JSON"),
    "offset is a float": (one(offsets=[0, 16.0]), "two integers"),
    "offset is a bool": (one("U8", [1], [False, True]), "two integers"),
    "offset is negative": (one(offsets=[-16, 0]), "two integers"),
    "offset is a string": (one(offsets=["0", "16"]), "two integers"),
    "offsets run backwards": (one(offsets=[16, 0]), "-16 bytes"),
    "range outside the file": (one(offsets=[16, 32]), "16 bytes are missing"),
    "range at 2^62": (one(offsets=[2**62, 2**62 + 16]), "bytes are missing"),
    "overlap": (two((0, 16), (12, 28), 28), "overlaps tensor 'a'"),
    "the same range twice": (two((0, 16), (0, 16), 16), "overlaps tensor 'a'"),
    "one range inside another": (two((0, 32), (8, 16), 32), "overlaps tensor 'a'"),
    "gap": (two((0, 12), (16, 32)), "leaves a gap after tensor 'a'"),
    "gap at the start": (two((4, 16), (16, 32)), "leaves a gap after the header"),
    "gap at the end": (two((0, 16), (16, 28)), "4 bytes follow"),
    "data without tensors": (packed({}, bytes(4)), "4 bytes follow"),
}


@pytest.mark.parametrize(("raw", "word"), MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_file_is_refused_in_one_sentence(tmp_path: Path, raw: bytes, word: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    with pytest.raises(ScantlingInputError) as caught:
        read_safetensors(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert word in message
    assert "\n" not in message
    assert len(message) < len(str(path)) + 700


def test_there_are_enough_malformed_kinds() -> None:
    assert len(MALFORMED) >= 40


def test_good_bytes_of_the_table_are_good(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(GOOD)
    assert read_safetensors(path).tensors == {
        "a": TensorInfo("a", "float32", (4,), path, len(GOOD) - 32, 16),
        "b": TensorInfo("b", "float32", (4,), path, len(GOOD) - 16, 16),
    }


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.PT", "vocab.pkl", "last.ckpt"])
def test_pickle_names_are_refused_unread(tmp_path: Path, name: str) -> None:
    with pytest.raises(ScantlingInputError, match="Python pickles"):
        read_checkpoint(tmp_path / name)


@pytest.mark.parametrize("length", [0x80, 0x0280, 0x8B1F, 0x088B1F, 0x3C20, 0x3C09, 0x7B])
def test_a_header_length_is_not_taken_for_a_magic(length: int) -> None:
    assert foreign_kind(struct.pack("<Q", length) + b"{}") is None


def test_special_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "loop.safetensors").symlink_to("loop.safetensors")
    cases = {
        tmp_path / "pipe.safetensors": "not a regular file",
        tmp_path: "not a regular file",
        tmp_path / "absent.safetensors": "No such file",
        tmp_path / "loop.safetensors": "cannot be read",
        tmp_path / "nul\0.safetensors": "null byte",
    }
    for path, word in cases.items():
        with pytest.raises(ScantlingInputError, match=word):
            read_safetensors(path)


def test_nothing_is_allocated_from_a_declared_size(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(packed("{}", length=100_000_000))
    tracemalloc.start()
    with pytest.raises(ScantlingInputError, match="only 2 follow"):
        read_safetensors(path, limit=100_000_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


def test_the_limit_can_be_raised_up_to_the_format(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(packed("{}" + " " * (17 * 2**20)))
    with pytest.raises(ScantlingInputError, match="over the limit of 16777216"):
        read_safetensors(path)
    assert read_safetensors(path, limit=2**40).tensors == {}
    path.write_bytes(packed("{}", length=100_000_001))
    with pytest.raises(ScantlingInputError, match="over the limit of 100000000"):
        read_safetensors(path, limit=2**40)


TORCH = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")}
TORCH |= {name: getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8")}
TORCH |= {name: getattr(torch, name) for name in ("uint8", "bool")}


def assert_same_as_library(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    header = read_safetensors(path)
    assert header.metadata == metadata
    assert header.tensors.keys() == tensors.keys()
    raw = path.read_bytes()
    with safetensors.safe_open(path, "pt") as theirs:
        assert set(theirs.keys()) == header.tensors.keys()
        for name, info in header.tensors.items():
            value = theirs.get_tensor(name)
            assert info.shape == tuple(value.shape) == tuple(theirs.get_slice(name).get_shape())
            assert info.dtype == str(value.dtype).removeprefix("torch.")
            assert info.numel == value.numel()
            kept = raw[info.start : info.start + info.nbytes]
            assert kept == bytes(value.reshape(-1).view(torch.uint8).tolist())


def test_every_dtype_equals_the_library(tmp_path: Path) -> None:
    tensors = {name: (torch.arange(6) % 2).reshape(2, 3).to(dtype) for name, dtype in TORCH.items()}
    tensors |= {"scalar": torch.tensor(3.0), "none": torch.zeros(0, 5), 'quote"\\é\n': torch.ones(2)}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, {"format": "pt", "note": '{"k": [1, "}"]}\n'})
    assert_same_as_library(path, tensors, {"format": "pt", "note": '{"k": [1, "}"]}\n'})


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tensors=st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(sorted(TORCH)), st.lists(st.integers(0, 4), max_size=4)),
        max_size=6,
    ),
    metadata=st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), st.text(max_size=9), max_size=3),
)
def test_any_file_of_the_library_is_read_as_it_reads_it(
    tmp_path: Path, tensors: dict[str, tuple[str, list[int]]], metadata: dict[str, str]
) -> None:
    path = tmp_path / "model.safetensors"
    built = {name: torch.zeros(shape).to(TORCH[dtype]) for name, (dtype, shape) in tensors.items()}
    save_file(built, path, metadata or None)
    assert_same_as_library(path, built, metadata)


def mutated(raw: bytes, rng: random.Random) -> bytes:
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(data)) if data else 0
        match rng.randrange(6):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                data[at : at + 1] = bytes([data[at] ^ 1 << rng.randrange(8)]) if data else b""
            case 2:
                del data[at : at + rng.randrange(1, 20)]
            case 3:
                data[at:at] = rng.choice(
                    (b"0", b"9", b"-", b'"', b"[", b"{", b"}", b",", b"\0", b"1e9", b"NaN", b"true")
                )
            case 4:
                end = rng.randrange(len(data) + 1)
                data[at:at] = data[end : end + 16]
            case _:
                del data[at:]
    return bytes(data)


def test_5000_mutated_files_parse_or_raise_the_one_error(tmp_path: Path) -> None:
    rng = random.Random(20240611)
    base = packed(
        {
            "__metadata__": {"format": "pt"},
            "model.embed.weight": entry("BF16", [4, 3], [0, 24]),
            "norm": entry("F32", [3], [24, 36]),
            "step": entry("I64", [], [36, 44]),
            "mask": entry("BOOL", [2, 2], [44, 48]),
        },
        bytes(range(48)),
    )
    path = tmp_path / "model.safetensors"
    parsed, messages = 0, []
    for _ in range(5000):
        raw = mutated(base, rng)
        # The length is made to fit again in half of the files, or most would be refused for it alone.
        if rng.random() < 0.5 and len(raw) > 56:
            raw = struct.pack("<Q", len(raw) - 56) + raw[8:]
        path.write_bytes(raw)
        try:
            read_safetensors(path)
        except ScantlingInputError as error:
            messages.append(str(error))
        else:
            safetensors.deserialize(raw)  # type: ignore[no-untyped-call]
            parsed += 1
    assert 125 < parsed < 3750
    assert all(message.startswith(f"{path}: ") for message in messages)


def plainly(path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The header, or the message, without the one pass that reads the library's own spelling."""
    with monkeypatch.context() as patch:
        patch.setattr("scantling.checkpoint.header._usual", lambda *_: (None, {}))
        return told(path)


def told(path: Path) -> Any:
    try:
        return read_safetensors(path)
    except ScantlingInputError as error:
        return str(error)


EMPTY = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
HALF = '{"dtype":"F32","shape":[2],"data_offsets":[%d,%d]}'
USUAL: dict[str, tuple[bytes, str]] = {
    "good": (packed(f'{{"a":{HALF % (0, 8)},"b":{HALF % (8, 16)}}}  ', bytes(16)), ""),
    "metadata first": (packed(f'{{"__metadata__":{{"format":"pt"}},"a":{HALF % (0, 8)}}}', bytes(8)), ""),
    "metadata last": (packed(f'{{"a":{HALF % (0, 8)},"__metadata__":{{"format":"pt"}}}}', bytes(8)), ""),
    "the later one first": (packed(f'{{"b":{HALF % (8, 16)},"a":{HALF % (0, 8)}}}', bytes(16)), ""),
    "escapes": (packed(f'{{"\\u0061":{HALF % (0, 8)}}}', bytes(8)), ""),
    "no tensor": (packed('{"__metadata__":{"format":"pt"}}'), ""),
    "the same empty tensor twice": (packed(f'{{"a":{EMPTY},"a":{EMPTY}}}'), "duplicate tensor name 'a'"),
    "the same one, escaped": (packed(f'{{"a":{EMPTY},"\\u0061":{EMPTY}}}'), "duplicate tensor name 'a'"),
    "two metadata": (packed(f'{{"__metadata__":{{}},"__metadata__":{EMPTY}}}'), "duplicate tensor name '__metadata"),
    "a tensor as metadata": (packed(f'{{"a":{EMPTY},"__metadata__":{EMPTY}}}'), "string in double quotes"),
    "overlap": (packed(f'{{"a":{HALF % (0, 8)},"b":{HALF % (4, 12)}}}', bytes(12)), "overlaps tensor 'a'"),
    "gap": (packed(f'{{"a":{HALF % (0, 8)},"b":{HALF % (12, 20)}}}', bytes(20)), "leaves a gap after tensor 'a'"),
    "more data": (packed(f'{{"a":{HALF % (0, 8)}}}', bytes(9)), "1 bytes follow"),
    "less data": (packed(f'{{"a":{HALF % (0, 8)}}}', bytes(7)), "1 bytes are missing"),
    "a range of another size": (packed(f'{{"a":{HALF % (0, 4)}}}', bytes(4)), "needs 8"),
    "an unknown dtype": (packed('{"a":{"dtype":"F33","shape":[],"data_offsets":[0,0]}}'), "did you mean 'F32'"),
    "a leading zero": (packed('{"a":{"dtype":"F32","shape":[02],"data_offsets":[0,8]}}', bytes(8)), "not valid JSON"),
    "2^63 nothings": (packed(f'{{"a":{EMPTY.replace("[0]", "[0,9223372036854775808]")}}}'), "from 0 to 2^63-1"),
    "65 dimensions": (packed(f'{{"a":{EMPTY.replace("[0]", str([0] * 65).replace(" ", ""))}}}'), "at most 64"),
    "a comma at the end": (packed(f'{{"a":{EMPTY},}}'), "string in double quotes"),
    "text after the end": (packed(f'{{"a":{EMPTY}}}x'), "after the end"),
    "two ends": (packed(f'{{"a":{EMPTY}}}}}'), "after the end"),
    "no end": (packed(f'{{"a":{EMPTY}'), "needs ',' or '}'"),
    "a control character": (packed(f'{{"a\x01":{EMPTY}}}'), "not a JSON string"),
}
"""Headers in the library's own spelling, without blanks."""


@pytest.mark.parametrize(("raw", "word"), USUAL.values(), ids=USUAL.keys())
def test_the_usual_spelling_is_held_to_the_same(
    tmp_path: Path, raw: bytes, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    found = told(path)
    assert isinstance(found, str) == bool(word)
    assert word in str(found)
    assert found == plainly(path, monkeypatch)


def test_800_mutated_files_in_the_usual_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass and reading key by key give the same header, or the same message."""
    rng = random.Random(7)
    tensors = {"a": entry("BF16", [4, 3], [0, 24]), "b": entry("F32", [0], [24, 24]), "c": entry("I8", [4], [24, 28])}
    raw = json.dumps({"__metadata__": {"format": "pt"}} | tensors, separators=(",", ":"))
    base, path, read = packed(raw, bytes(28)), tmp_path / "model.safetensors", 0
    for _ in range(800):
        changed = mutated(base, rng)
        path.write_bytes(struct.pack("<Q", max(len(changed) - 36, 0)) + changed[8:])
        found = told(path)
        assert found == plainly(path, monkeypatch)
        read += not isinstance(found, str)
    assert 20 < read < 500


def shard(folder: Path, name: str, *tensors: str, metadata: dict[str, str] | None = None) -> None:
    built = {tensor: torch.full((3,), float(index)) for index, tensor in enumerate(tensors)}
    save_file(built, folder / name, metadata)


def index(folder: Path, weight_map: Any, **more: Any) -> None:
    text = weight_map if isinstance(weight_map, str) else json.dumps({**more, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def good_shards(folder: Path) -> None:
    shard(folder, A, "x", "y", metadata={"format": "pt"})
    shard(folder, B, "z", metadata={"format": "pt", "made": "by hand"})
    index(folder, {"x": A, "y": A, "z": B}, metadata={"total_size": 36})


def test_good_shards(tmp_path: Path) -> None:
    good_shards(tmp_path)
    header = read_checkpoint(tmp_path)
    assert header.files == (tmp_path / A, tmp_path / B)
    assert {name: info.file.name for name, info in header.tensors.items()} == {"x": A, "y": A, "z": B}
    assert header.metadata == {"format": "pt", "made": "by hand"}
    assert header.notes == ()


def test_shards_may_be_links(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    good_shards(tmp_path / "blobs")
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(f"../blobs/{file.name}")
    assert read_checkpoint(tmp_path / "snapshot").tensors.keys() == {"x", "y", "z"}


def test_same_name_in_two_shards_goes_by_the_index_with_a_note(tmp_path: Path) -> None:
    good_shards(tmp_path)
    shard(tmp_path, B, "z", "x")
    header = read_checkpoint(tmp_path)
    assert header.tensors["x"].file == tmp_path / A
    (note,) = header.notes
    assert str(tmp_path / B) in note
    assert "'x'" in note
    assert A in note


def test_single_file_and_folder_are_the_same(tmp_path: Path) -> None:
    shard(tmp_path, "model.safetensors", "x", "y")
    folder, file = read_checkpoint(tmp_path), read_checkpoint(str(tmp_path / "model.safetensors"))
    assert folder == file
    assert folder == CheckpointHeader((tmp_path / "model.safetensors",), folder.tensors, {}, ())


def test_an_index_beside_a_single_file_is_noted(tmp_path: Path) -> None:
    shard(tmp_path, "model.safetensors", "x")
    index(tmp_path, {"x": "model.safetensors"})
    header = read_checkpoint(tmp_path)
    assert header.tensors.keys() == {"x"}
    assert "index is passed over" in header.notes[0]


def missing_shard(folder: Path) -> None:
    good_shards(folder)
    (folder / B).unlink()


def extra_tensor(folder: Path) -> None:
    good_shards(folder)
    shard(folder, B, "z", "extra.weight")


def absent_tensor(folder: Path) -> None:
    good_shards(folder)
    index(folder, {"x": A, "y": A, "z": B, "gone.weight": B})


def broken_shard(folder: Path) -> None:
    good_shards(folder)
    (folder / B).write_bytes((folder / B).read_bytes()[:-4])


def named(name: str) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        good_shards(folder)
        index(folder, {"x": A, "y": A, "z": name})

    return build


def text(value: str) -> Callable[[Path], None]:
    return lambda folder: index(folder, value)


def files(*names: str) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        for name in names:
            (folder / name).write_bytes(GOOD)

    return build


def large_index(folder: Path) -> None:
    with (folder / "model.safetensors.index.json").open("wb") as file:
        file.truncate(16 * 2**20 + 1)


BAD_FOLDERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing shard": (missing_shard, "model-00002-of-00002.safetensors'), with 1 of the 3 tensors, 12 bytes"),
    "missing shard, parameters": (missing_shard, "3 parameters if they are float32"),
    "extra tensor": (extra_tensor, "'extra.weight (model-00002"),
    "absent tensor": (absent_tensor, "'gone.weight (model-00002"),
    "broken shard": (broken_shard, "4 bytes are missing"),
    "shard above": (named("../other.safetensors"), "plain file name"),
    "shard at an absolute path": (named("/etc/model.safetensors"), "plain file name"),
    "shard in a folder": (named("sub/model.safetensors"), "plain file name"),
    "shard with a backslash": (named("..\\model.safetensors"), "plain file name"),
    "shard with a drive": (named("C:model.safetensors"), "plain file name"),
    "shard with a NUL": (named("a\0.safetensors"), "plain file name"),
    "shard with no name": (named(""), "plain file name"),
    "shard is the folder above": (named(".."), "plain file name"),
    "shard is a pickle": (named("pytorch_model-00002-of-00002.bin"), "ends in .safetensors"),
    "too many shards": (
        text(json.dumps({"weight_map": {str(i): f"{i}.safetensors" for i in range(4097)}})),
        "4097 shards",
    ),
    "too large an index": (large_index, "16777217 bytes, over the limit"),
    "empty index": (text(""), "empty"),
    "index without a map": (text('{"metadata": {}}'), "no weight_map"),
    "empty map": (text('{"weight_map": {}}'), "no weight_map, or an empty one"),
    "map is a list": (text('{"weight_map": []}'), "weight_map must be a JSON object"),
    "shard is a number": (text('{"weight_map": {"x": 1}}'), "string in double quotes"),
    "index is a list": (text("[]"), "the index must be a JSON object"),
    "index is cut short": (text('{"weight_map": {"x": "a.safetensors"'), "needs ',' or '}'"),
    "duplicate tensor in the index": (
        text('{"weight_map": {"x": "a.safetensors", "x": "b.safetensors"}}'),
        "duplicate",
    ),
    "shard of a tensor in the second place": (
        text('{"weight_map": {"x": "a.safetensors", "y": "../b.safetensors"}}'),
        "tensor 'y' is in '../b.safetensors'",
    ),
    "a number among the shards": (
        text('{"weight_map": {"x": "a.safetensors", "y": 1}}'),
        "the shard of a tensor must be a string in double quotes",
    ),
    "a control character in a shard": (text('{"weight_map": {"x": "a\n.safetensors"}}'), "not a JSON string"),
    "a surrogate in a shard": (text('{"weight_map": {"x": "\\ud800.safetensors"}}'), "surrogate"),
    "two maps": (text('{"weight_map": {"x": "a.safetensors"}, "weight_map": {}}'), "duplicate key 'weight_map'"),
    "NaN in the index": (text('{"metadata": {"total_size": NaN}, "weight_map": {}}'), "NaN is not JSON"),
    "nested metadata": (text('{"metadata": ' + "[" * 5000), "not valid JSON"),
    "endless metadata": (text('{"metadata": [' + "[]," * 40_000), "longer than 65536"),
    "index is a git-lfs pointer": (text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n"), "git-lfs"),
    "index is a web page": (text("<html><body>Not found</body></html>"), "HTML"),
    "only pickles": (files("pytorch_model.bin", "config.json"), "must be converted to safetensors"),
    "only .pth": (files("consolidated.00.pth"), "must be converted to safetensors"),
    "only GGUF": (files("model.Q4_1.gguf"), "path of the GGUF file"),
    "shards without an index": (files(A, B), "give the path of one file, or fetch the index"),
    "no weights": (files("config.json"), "holds no weights"),
}


@pytest.mark.parametrize(("build", "word"), BAD_FOLDERS.values(), ids=BAD_FOLDERS.keys())
def test_bad_folder_is_refused_in_one_sentence(tmp_path: Path, build: Callable[[Path], None], word: str) -> None:
    build(tmp_path)
    with pytest.raises(ScantlingInputError) as caught:
        read_checkpoint(tmp_path)
    message = str(caught.value)
    assert str(tmp_path) in message
    assert word in message
    assert "\n" not in message


def test_a_broken_link_is_not_a_missing_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ScantlingInputError, match="No such file"):
        read_checkpoint(tmp_path)


def test_reading_headers_needs_no_torch() -> None:
    code = (
        "import sys, scantling.checkpoint.sharded, scantling.checkpoint.gguf; "
        "print([m for m in ('torch', 'numpy', 'safetensors', 'gguf') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
