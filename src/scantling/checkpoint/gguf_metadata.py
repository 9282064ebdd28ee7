"""Metadata of GGUF files: keys and values, checked as they are read.

Source of every format fact: the GGUF specification (ggml, docs/gguf.md, "File Structure"), versions 2 and 3.
"""

from __future__ import annotations

import re
from array import array

from scantling.checkpoint.files import Place, refuse, shown
from scantling.checkpoint.gguf_cursor import Cursor
from scantling.checkpoint.gguf_types import ARRAY, SCALARS, STRING, U32, U64, UINT32, GGUFArray, Scalar

MAX_KEY_BYTES = 65_535
MAX_STRING_BYTES = 16 * 2**20
MAX_ELEMENTS = 4 * 2**20
"""Elements of one metadata array, and strings in all of them together: a vocabulary of 4 Mi fits."""
MAX_LAYERS = 1024
_BYTE_TOKEN = 6


def metadata_of(cursor: Cursor, count: int) -> tuple[dict[str, object], int]:
    """All key-value pairs, and the alignment in bytes."""
    metadata: dict[str, object] = {}
    alignment = 32
    for index in range(count):
        at = cursor.pos
        key = cursor.text(f"key {index}", MAX_KEY_BYTES)
        if not key or not key.isascii():
            cursor.fail(at, f"key {index} is {shown(key)}; a key is 1 to {MAX_KEY_BYTES} ASCII characters")
        if key in metadata:
            cursor.fail(at, f"duplicate key {shown(key)}; each may appear once")
        what = f"the value of {shown(key)}"
        kind = cursor.number(U32, f"the type of {what}")
        at = cursor.pos
        value = metadata[key] = _value(cursor, kind, what)
        if key == "general.alignment":
            if kind != UINT32 or not isinstance(value, int):
                cursor.fail(at - 4, f"{what} has value type {kind}; it must be a uint32 (type {UINT32})")
            if not 8 <= value <= 65_536 or value.bit_count() != 1:
                cursor.fail(at, f"{what} is {value}; the alignment is a power of two from 8 to 65536")
            alignment = value
        _check_known(cursor, key, value, at)
    _check_vocabulary(cursor.path, metadata)
    return metadata, alignment


def _value(cursor: Cursor, kind: int, what: str) -> Scalar | GGUFArray:
    if kind == STRING:
        return cursor.text(what, MAX_STRING_BYTES)
    if kind == ARRAY:
        return _array(cursor, what)
    if kind not in SCALARS:
        cursor.fail(cursor.pos - 4, f"{what} has value type {kind}; the types are 0 to 12")
    name, form = SCALARS[kind]
    at = cursor.room(form.size, what)
    if name == "bool" and cursor.data[at] > 1:
        cursor.fail(at, f"{what} holds the byte {cursor.data[at]} as a bool; only 0 and 1 are")
    value: Scalar = form.unpack_from(cursor.data, at)[0]
    return value


def _array(cursor: Cursor, what: str) -> GGUFArray:
    kind = cursor.number(U32, f"the element type of {what}")
    if kind == ARRAY:
        cursor.fail(cursor.pos - 4, f"{what} is an array of arrays; only one level is read")
    if kind != STRING and kind not in SCALARS:
        cursor.fail(cursor.pos - 4, f"{what} has element type {kind}; the types are 0 to 12")
    name, form = SCALARS.get(kind, ("string", U64))
    count = cursor.count(f"the length of {what}", MAX_ELEMENTS, form.size)
    if kind == STRING:
        return _strings(cursor, what, count)
    at = cursor.room(count * form.size, what)
    raw = bytes(cursor.data[at : cursor.pos])
    if name == "bool" and (bad := raw.translate(None, b"\0\1")):
        cursor.fail(at + raw.index(bad[0]), f"{what} holds the byte {bad[0]} as a bool; only 0 and 1 are")
    return GGUFArray(name, raw, form)


def _strings(cursor: Cursor, what: str, count: int) -> GGUFArray:
    cursor.strings += count
    if cursor.strings > MAX_ELEMENTS:
        cursor.fail(cursor.pos, f"{what} brings the strings in arrays to {cursor.strings}, over {MAX_ELEMENTS}")
    data, unpack, end, have = cursor.data, U64.unpack_from, cursor.end, cursor.have
    start = pos = cursor.pos
    ends: array[int] = array("Q")
    short = True
    for index in range(count):
        if end - pos < 8:
            cursor.fail(pos, f"element {index} of {what} has no length: {end - pos} bytes are left, not 8")
        if pos + 8 > have:
            have = cursor.fetch(pos + 8)
        (length,) = unpack(data, pos)
        if length > 127:
            short = False
            if length > MAX_STRING_BYTES:
                cursor.fail(pos, f"element {index} of {what} declares {length} bytes, over {MAX_STRING_BYTES}")
        pos += 8 + length
        if pos > end:
            cursor.fail(pos - length, f"element {index} of {what} needs {length} bytes, {pos - end} more than are left")
        ends.append(pos - start)
    cursor.pos = pos
    cursor.fetch(pos)
    raw = bytes(data[start:pos])
    if not (short and len(raw) <= MAX_STRING_BYTES and _is_utf8(raw)):
        _check_utf8(cursor, raw, start, ends, what)
    return GGUFArray("string", raw, None, ends)


def _is_utf8(raw: bytes) -> bool:
    """Whether strings with their lengths are all UTF-8, if each is shorter than 128: then each length is ASCII."""
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _check_utf8(cursor: Cursor, raw: bytes, start: int, ends: array[int], what: str) -> None:
    begin = 8
    for index, end in enumerate(ends):
        try:
            raw[begin:end].decode()
        except UnicodeDecodeError as error:
            cursor.fail(start + begin + error.start, f"element {index} of {what} is not UTF-8 ({error.reason})")
        begin = end + 8


def _check_known(cursor: Cursor, key: str, value: object, at: int) -> None:
    """Integers that size or index things elsewhere; other keys are for whoever reads them."""
    if key.startswith("tokenizer.ggml.") and key.endswith("_token_id"):
        limit = 2**32 - 1
    elif key.endswith(".block_count"):
        limit = MAX_LAYERS
    elif key.endswith(".vocab_size"):
        limit = MAX_ELEMENTS
    else:
        return
    if type(value) is not int or not 0 <= value <= limit:
        cursor.fail(at, f"the value of {shown(key)} is {shown(value)}; it must be an integer from 0 to {limit}")


def _check_vocabulary(path: Place, metadata: dict[str, object]) -> None:
    """The tokenizer's arrays agree (specification, "Tokenizer"): one score and one type per token, bytes as <0xNN>."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if tokens is None:
        return
    if not isinstance(tokens, GGUFArray) or tokens.kind != "string":
        refuse(path, f"tokenizer.ggml.tokens is {shown(tokens)}; it must be an array of strings")
    for key in ("tokenizer.ggml.scores", "tokenizer.ggml.token_type"):
        beside = metadata.get(key, tokens)
        if not isinstance(beside, GGUFArray) or len(beside) != len(tokens):
            refuse(
                path, f"{key} is {shown(beside)}; it must be an array with a number for each of {len(tokens)} tokens"
            )
        for index, kind in enumerate(beside if key.endswith("_type") else ()):
            if kind == _BYTE_TOKEN and not re.fullmatch("<0x[0-9A-Fa-f]{2}>", str(tokens[index])):
                refuse(
                    path,
                    f"token {index} of tokenizer.ggml.tokens is {shown(tokens[index])}; as its type in {key} is "
                    f"{_BYTE_TOKEN}, a byte, it must read <0x00> to <0xFF>",
                )
