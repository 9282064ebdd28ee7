"""Turn token ids back into text, one id at a time, with the same result as all at once."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from scantling.errors import ScantlingInputError, need

_EACH_BYTE = "scantling.replace-each-byte"
_KEEPS_PIECES = ("Replace", "Metaspace", "WordPiece", "Strip")


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (the table published with GPT-2).

    Printable Latin-1 stands for itself; the other 68 bytes follow in order from U+0100.
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


BYTE_OF = _byte_alphabet()
"""The byte that each character of a byte-level vocabulary stands for."""


class _Stage(Protocol):
    def push(self, piece: str) -> str: ...

    def flush(self) -> str: ...


class _ByteLevel:
    """Pieces spelt in the byte alphabet; added tokens and pieces outside it are plain text."""

    def __init__(self, added: frozenset[str]) -> None:
        self._added = added
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, piece: str) -> str:
        if piece not in self._added:
            try:
                return self._utf8.decode(bytes([BYTE_OF[char] for char in piece]))
            except KeyError:
                pass
        return self._utf8.decode(piece.encode())

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _ByteFallback:
    """Pieces like <0xE2> are bytes; a character is out as soon as it is complete."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(_EACH_BYTE)

    def push(self, piece: str) -> str:
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            try:
                return self._utf8.decode(bytes.fromhex(piece[3:5]))
            except ValueError:
                pass
        return self.flush() + piece

    def flush(self) -> str:
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest


class _PerPiece:
    """A decoder of the library that looks at one piece and at whether it is the first."""

    def __init__(self, decoder: Any) -> None:
        self._decode = decoder.decode
        self._first = True

    def push(self, piece: str) -> str:
        pieces = [piece] if self._first else ["", piece]
        self._first = False
        return str(self._decode(pieces))

    def flush(self) -> str:
        return ""


class _StripStart:
    """Take up to `count` characters `content` from the front of the whole text."""

    def __init__(self, content: str, count: int) -> None:
        self._content = content
        self._left = count

    def push(self, piece: str) -> str:
        while piece and self._left:
            if not piece.startswith(self._content):
                self._left = 0
                break
            piece = piece[len(self._content) :]
            self._left -= 1
        return piece

    def flush(self) -> str:
        return ""


class _WordEnd:
    """Pieces that end a word carry a suffix: a blank between words, nothing after the last."""

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix
        self._held: str | None = None

    def push(self, piece: str) -> str:
        held, self._held = self._held, piece
        return "" if held is None else held.replace(self._suffix, " ")

    def flush(self) -> str:
        return "" if self._held is None else self._held.replace(self._suffix, "")


class _Blanks:
    """No decoder at all: the library puts one blank between pieces."""

    def __init__(self) -> None:
        self._first = True

    def push(self, piece: str) -> str:
        blank = "" if self._first else " "
        self._first = False
        return blank + piece

    def flush(self) -> str:
        return ""


def stage_makers(decoder: Any, added: frozenset[str]) -> list[Callable[[], _Stage]]:
    """The stages that do, piece by piece, what a decoder of the `tokenizers` library does to the whole.

    Args:
        decoder: the decoder of a `tokenizers.Tokenizer`, or None.
        added: texts of the added tokens, which stand for themselves.

    Raises:
        ScantlingInputError: the decoder cannot be followed piece by piece.
    """
    if decoder is None:
        return [_Blanks]
    makers: list[Callable[[], _Stage]] = []
    whole = False
    for spec in _flat(json.loads(decoder.__getstate__())):
        if spec["type"] != "Fuse":
            makers.append(_maker(spec, whole, added))
        whole = whole or spec["type"] in ("Fuse", "ByteLevel")
    return makers


def _maker(spec: Mapping[str, Any], whole: bool, added: frozenset[str]) -> Callable[[], _Stage]:
    """One stage; `whole` says that those before have made one text of the pieces."""
    kind = spec["type"]
    if kind == "ByteLevel" and not whole:
        return partial(_ByteLevel, added)
    if kind == "ByteFallback" and not whole:
        return _ByteFallback
    if kind == "BPEDecoder" and not whole:
        return partial(_WordEnd, spec["suffix"])
    if kind == "Strip" and whole and spec["stop"] == 0:
        return partial(_StripStart, spec["content"], spec["start"])
    if kind in _KEEPS_PIECES and spec.get("stop", 0) == 0 and (not whole or _one_character(spec)):
        return partial(_PerPiece, _library_decoder(spec))
    raise ScantlingInputError(
        f"tokenizer.json: the decoder {json.dumps(spec, ensure_ascii=False)[:200]} cannot be streamed here; supported "
        "are ByteLevel, ByteFallback, BPEDecoder, Fuse, Metaspace, Replace, Strip at the start, and WordPiece"
    )


def _flat(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if spec["type"] != "Sequence":
        return [spec]
    return [leaf for part in spec["decoders"] for leaf in _flat(part)]


def _one_character(spec: Mapping[str, Any]) -> bool:
    """Whether a replacement cannot straddle two pieces of text."""
    return spec["type"] == "Replace" and len(spec["pattern"].get("String", "")) == 1


def _library_decoder(spec: Mapping[str, Any]) -> Any:
    part = need("tokenizers.decoders", "decode text").Fuse()
    part.__setstate__(json.dumps(spec).encode())
    return part


class TokenStream:
    """Decodes ids as they come: each call returns the text that has become complete.

    The pieces of one stream, joined, are what `Tokenizer.decode` returns for the same ids. A character spread over
    several tokens comes out with its last token; bytes that never become a character come out as U+FFFD. The cost
    of a push does not depend on what went before.
    """

    def __init__(self, stages: list[_Stage], piece_of: Callable[[int], str | None]) -> None:
        """`piece_of` gives the token of an id, or None for one to leave out; it raises for unknown ids."""
        self._stages = stages
        self._piece_of = piece_of

    def push(self, token_id: int) -> str:
        """The text that this id completes, often the empty string.

        Raises:
            ScantlingInputError: the tokenizer has no such id.
        """
        piece = self._piece_of(token_id)
        return "" if piece is None else self._through(self._stages, piece)

    def flush(self) -> str:
        """What was held back, at the end of the ids; nothing may be pushed afterwards."""
        text = ""
        for place, stage in enumerate(self._stages):
            rest = stage.flush()
            if rest:
                text += self._through(self._stages[place + 1 :], rest)
        return text

    @staticmethod
    def _through(stages: list[_Stage], piece: str) -> str:
        for stage in stages:
            piece = stage.push(piece)
        return piece
