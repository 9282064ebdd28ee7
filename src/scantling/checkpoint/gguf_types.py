"""Types of GGUF tensors and metadata values (GGUF specification, ggml.h), and the metadata array."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from typing import overload

from scantling.units import BLOCKS

_PLAIN = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    30: ("BF16", 1, 2),
}
_BLOCKS = {
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
    42: "Q2_0",
}
GGML_TYPES: dict[int, tuple[str, int, int]] = _PLAIN | {i: (name, *BLOCKS[name.lower()]) for i, name in _BLOCKS.items()}
"""Tensor type id: name, elements per block, bytes per block (ggml.h `ggml_type`, block structs of ggml-common.h)."""
REMOVED_TYPES = {4, 5, 31, 32, 33, 36, 37, 38}
"""Ids of tensor types that were removed from the format."""

SCALARS = {
    0: ("uint8", struct.Struct("<B")),
    1: ("int8", struct.Struct("<b")),
    2: ("uint16", struct.Struct("<H")),
    3: ("int16", struct.Struct("<h")),
    4: ("uint32", struct.Struct("<I")),
    5: ("int32", struct.Struct("<i")),
    6: ("float32", struct.Struct("<f")),
    7: ("bool", struct.Struct("<?")),
    10: ("uint64", struct.Struct("<Q")),
    11: ("int64", struct.Struct("<q")),
    12: ("float64", struct.Struct("<d")),
}
"""Value type id of a number or bool: name and layout."""
STRING, ARRAY, UINT32 = 8, 9, 4
"""Value type ids (specification, `gguf_metadata_value_type`)."""
U32, U64 = SCALARS[4][1], SCALARS[10][1]

Scalar = str | int | float | bool


class GGUFArray(Sequence[Scalar]):
    """A metadata array, read-only, kept as its bytes: a list of the same strings would take seven times the memory.

    It compares equal to any sequence of the same elements; `kind` is ``string`` or the name of the number type.
    """

    __slots__ = ("_ends", "_item", "_raw", "kind")

    def __init__(self, kind: str, raw: bytes, item: struct.Struct | None, ends: array[int] | None = None) -> None:
        self.kind, self._raw, self._item, self._ends = kind, raw, item, ends

    def __len__(self) -> int:
        return len(self._raw) // self._item.size if self._item else len(self._ends or ())

    @overload
    def __getitem__(self, index: int) -> Scalar: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Scalar]: ...
    def __getitem__(self, index: int | slice) -> Scalar | Sequence[Scalar]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        if self._item:
            value: Scalar = self._item.unpack_from(self._raw, index * self._item.size)[0]
            return value
        assert self._ends is not None
        start = self._ends[index - 1] if index else 0
        return self._raw[start + 8 : self._ends[index]].decode()

    def __iter__(self) -> Iterator[Scalar]:
        if self._item:
            return (value for (value,) in self._item.iter_unpack(self._raw))
        return self._texts()

    def _texts(self) -> Iterator[str]:
        begin = 8
        for end in self._ends or ():
            yield self._raw[begin:end].decode()
            begin = end + 8

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(mine == its for mine, its in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<GGUFArray of {len(self)} {self.kind}>"
