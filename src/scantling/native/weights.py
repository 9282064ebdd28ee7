"""Where the packed weights come from: a file's own blocks or numbers, or the values of a built net."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from scantling.checkpoint.files import here
from scantling.checkpoint.gguf import GGUFHeader, GGUFTensor
from scantling.checkpoint.gguf_values import dequantise
from scantling.checkpoint.load import DescribedFolder, dtype_of
from scantling.checkpoint.names import Link, Row, links
from scantling.checkpoint.stored_values import as_float32, stored
from scantling.errors import ScantlingInputError
from scantling.native.tiles import FORMATS, GROUP, Stored, block_bytes, quantise

if TYPE_CHECKING:
    from numpy.typing import NDArray

WIDTHS = ("stored", "f32", "bf16", "q8_0", "q4_0", "q4_1")
"""How wide matrices are held: as they are stored, or in one format for all."""
_KINDS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_NUMBERS: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


class Weights(Protocol):
    """Matrices and vectors by the names of the state dict."""

    def kind(self, name: str) -> str:
        """How a matrix is held: the kind of what `matrix` gives, without reading it."""

    def matrix(self, name: str) -> Stored:
        """A matrix as it is held; of experts, theirs under one another."""

    def vector(self, name: str) -> NDArray[np.float32]:
        """A gain or a shift."""


@dataclass(frozen=True)
class OfNet:
    """Those of a built net.

    Attributes:
        tensors: the state dict.
        width: see `WIDTHS`.
    """

    tensors: Mapping[str, Any]
    width: str = "stored"

    def kind(self, name: str) -> str:
        tensor = self.tensors[name]
        return kind_of(str(tensor.dtype).removeprefix("torch."), tensor.shape[-1], self.width)

    def matrix(self, name: str) -> Stored:
        tensor, kind = self.tensors[name].detach(), self.kind(name)
        tensor = tensor.reshape(-1, tensor.shape[-1])
        if kind == "BF16":
            import torch

            bits = tensor.to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16)
            return Stored(kind, bits, tensor.shape[1])
        if kind == "F16":
            return Stored(kind, tensor.numpy(), tensor.shape[1])
        return as_asked(tensor.float().numpy(), self.width)

    def vector(self, name: str) -> NDArray[np.float32]:
        values: NDArray[np.float32] = self.tensors[name].detach().float().numpy()
        return values


class OfGGUF:
    """Those of a GGUF file, whose blocks stay as they are.

    Args:
        rows: the architecture's table of names.
        weights: shapes of the model's weights by our names.
        width: see `WIDTHS`.
    """

    def __init__(
        self, header: GGUFHeader, rows: tuple[Row, ...], weights: Mapping[str, tuple[int, ...]], width: str = "stored"
    ) -> None:
        self._tensors, self._width = header.tensors, width
        self._shapes = weights
        self._links: dict[str, Link] = {ours: link for link in links(rows, weights) for ours in link.ours}

    def kind(self, name: str) -> str:
        tensor = self._tensors[self._links[name].theirs[0]]
        if self._width == "stored" and tensor.kind in FORMATS:
            return tensor.kind
        return kind_of("float32", tensor.shape[-1], self._width)

    def matrix(self, name: str) -> Stored:
        tensor, order = self._found(name)
        rows, columns = tensor.numel // tensor.shape[-1], tensor.shape[-1]
        if self._width == "stored" and tensor.kind in FORMATS:
            if (size := block_bytes(tensor.kind)) is not None:
                number, wide = np.dtype(np.uint8), columns // 32 * size
            else:
                number, wide = _NUMBERS[tensor.kind], columns
            where: Any = {"mode": "r", "offset": tensor.start, "shape": (rows, wide)}
            raw = np.memmap(here(tensor.file), number, **where).view(np.ndarray)
            return Stored(tensor.kind, raw if order is None else raw[order], columns)
        values = dequantise(tensor).reshape(rows, columns)
        return as_asked(values if order is None else values[order], self._width)

    def vector(self, name: str) -> NDArray[np.float32]:
        link = self._links[name]
        values = [dequantise(self._tensors[theirs]) for theirs in link.theirs]
        shapes = [self._shapes[ours] for ours in link.ours]
        found: NDArray[np.float32] = np.asarray(link.transform.load(values, shapes)[link.ours.index(name)])
        return found

    def _found(self, name: str) -> tuple[GGUFTensor, NDArray[np.int64] | None]:
        """The tensor that holds a matrix, and which rows of it in which order; None for all as they are.

        The rows of a stack of matrices, those of experts, are numbered through.
        """
        link = self._links[name]
        if len(link.theirs) != 1:
            raise ScantlingInputError(f"{name} is spread over {len(link.theirs)} tensors of the file")
        tensor = self._tensors[link.theirs[0]]
        numbers = np.arange(tensor.numel // tensor.shape[-1])
        # A table of names changes the order of rows or cuts between them, so it can be asked with their numbers.
        asked = numbers.reshape(*tensor.shape[:-1], 1)
        pieces = link.transform.load([asked], [self._shapes[ours] for ours in link.ours])
        order = np.asarray(pieces[link.ours.index(name)]).reshape(-1)
        return tensor, None if np.array_equal(order, numbers) else order


class OfFolder:
    """Those of safetensors, as they are; nothing is built of them first.

    Args:
        width: see `WIDTHS`.
    """

    key: str | None

    def __init__(self, file: DescribedFolder, width: str = "stored") -> None:
        self._file, self._width = file, width
        self._links: dict[str, Link] = {ours: link for link in file.table for ours in link.ours}
        # One dtype for all, as a net has it.
        self._dtype = dtype_of(file.read)[0]

    def kind(self, name: str) -> str:
        return kind_of(self._dtype, self._file.weights[name][-1], self._width)

    def matrix(self, name: str) -> Stored:
        values, kind = self._loaded(name), self.kind(name)
        values = values.reshape(-1, values.shape[-1])
        if kind != "F32" and kind == _KINDS.get(self._dtype):
            return Stored(kind, values, values.shape[1])
        return as_asked(as_float32(values), self._width)

    def vector(self, name: str) -> NDArray[np.float32]:
        return as_float32(self._loaded(name))

    def _loaded(self, name: str) -> NDArray[Any]:
        link, file = self._links[name], self._file
        theirs = [stored(file.tensors[file.names[n]]) if n in file.names else None for n in link.theirs]
        kind = next((values.dtype for values in theirs if values is not None), np.dtype(np.float32))
        found = [
            np.zeros(file.wanted[n], kind) if values is None else values
            for n, values in zip(link.theirs, theirs, strict=True)
        ]
        ours = link.transform.load(found, [file.weights[n] for n in link.ours])
        return np.asarray(ours[link.ours.index(name)])


def kind_of(dtype: str, columns: int, width: str) -> str:
    """How a matrix of that dtype is held in one of `WIDTHS`."""
    if width == "stored":
        return _KINDS.get(dtype, "F32")
    return "F32" if width.startswith("q") and columns % GROUP else width.upper()


def as_asked(values: NDArray[np.float32], width: str) -> Stored:
    """Values (rows, columns) held in one of `WIDTHS`.

    Raises:
        ScantlingInputError: no such width.
    """
    if width in ("f32", "stored"):
        return Stored("F32", values, values.shape[1])
    if width == "bf16":
        bits = np.ascontiguousarray(values).view(np.uint32)
        # To the nearest, ties to even.
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        return Stored("BF16", rounded.astype(np.uint16), values.shape[1])
    if width in ("q8_0", "q4_0", "q4_1"):
        return quantise(values, width.upper())
    raise ScantlingInputError(f"width is {width!r}; use one of {', '.join(WIDTHS)}")
