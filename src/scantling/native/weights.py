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
from scantling.native.tiles import Stored, block_bytes, quantise

if TYPE_CHECKING:
    from numpy.typing import NDArray

WIDTHS = ("stored", "f32", "bf16", "q8_0", "q4_0", "q4_1")
"""How wide matrices are held: as they are stored, or in one format for all."""


class Weights(Protocol):
    """Matrices and vectors by the names of the state dict."""

    @property
    def key(self) -> str | None:
        """Tells these weights from any others; None where nothing does, so that nothing is kept of them."""

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
    key: str | None = None

    def matrix(self, name: str) -> Stored:
        tensor = self.tensors[name].detach()
        tensor = tensor.reshape(-1, tensor.shape[-1])
        stored = self.width if self.width != "stored" else str(tensor.dtype).removeprefix("torch.")
        if stored in ("bf16", "bfloat16"):
            import torch

            bits = tensor.to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16)
            return Stored("BF16", bits, tensor.shape[1])
        values = tensor.float().numpy()
        return as_asked(values, "f32" if self.width == "stored" else self.width)

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

    key: str | None

    def __init__(
        self, header: GGUFHeader, rows: tuple[Row, ...], weights: Mapping[str, tuple[int, ...]], width: str = "stored"
    ) -> None:
        self._tensors, self._width = header.tensors, width
        path = here(header.path)
        state = path.stat()
        self.key = f"{path.resolve()} {state.st_size} {state.st_mtime_ns} {width}"
        self._shapes = weights
        self._links: dict[str, Link] = {ours: link for link in links(rows, weights) for ours in link.ours}

    def matrix(self, name: str) -> Stored:
        tensor, order = self._found(name)
        rows, columns = tensor.numel // tensor.shape[-1], tensor.shape[-1]
        if self._width == "stored" and (size := block_bytes(tensor.kind)) is not None:
            shape = (rows, columns // 32 * size)
            raw = np.memmap(here(tensor.file), np.uint8, mode="r", offset=tensor.start, shape=shape).view(np.ndarray)
            return Stored(tensor.kind, raw if order is None else raw[order], columns)
        values = dequantise(tensor).reshape(rows, columns)
        values = values if order is None else values[order]
        # 16 bits hold what 16 bits held; half precision has no tile of its own.
        return as_asked(values, "f32" if self._width == "stored" else self._width)

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
        self._bf16 = dtype_of(file.read)[0] == "bfloat16"
        paths = sorted({here(info.file).resolve() for info in file.read})
        states = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
        self.key = f"{states} {width}"

    def matrix(self, name: str) -> Stored:
        values = self._loaded(name)
        values = values.reshape(-1, values.shape[-1])
        if self._width in ("stored", "bf16") and self._bf16:
            return Stored("BF16", values, values.shape[1])
        return as_asked(as_float32(values), "f32" if self._width == "stored" else self._width)

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


def as_asked(values: NDArray[np.float32], width: str) -> Stored:
    """Values (rows, columns) held in one of `WIDTHS`.

    Raises:
        ScantlingInputError: no such width.
    """
    if width == "f32":
        return Stored("F32", values, values.shape[1])
    if width == "bf16":
        bits = np.ascontiguousarray(values).view(np.uint32)
        # To the nearest, ties to even.
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        return Stored("BF16", rounded.astype(np.uint16), values.shape[1])
    if width in ("q8_0", "q4_0", "q4_1"):
        return quantise(values, width.upper())
    raise ScantlingInputError(f"width is {width!r}; use one of {', '.join(WIDTHS)}")
