"""Packed weights in the cache folder, so that a second start does not pack again."""

from __future__ import annotations

import hashlib
import os
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from scantling.native.library import cache_folder
from scantling.native.program import Outline
from scantling.native.weights import Weights

if TYPE_CHECKING:
    from numpy.typing import NDArray

_CODE = ("tiles.py", "packed.py")
_CHECK = 4


@dataclass(frozen=True)
class Kept:
    """A file whose name tells the weights, the model and the layout apart: the bytes, then their CRC-32.

    The file can be deleted at any time, and one that is damaged is written again.
    """

    path: Path

    @classmethod
    def of(cls, weights: Weights, outline: Outline) -> Kept | None:
        """The file for these weights; None where nothing tells them from others."""
        if weights.key is None:
            return None
        layout = [Path(__file__).with_name(name).read_text() for name in _CODE]
        told = "\0".join([weights.key, repr(outline.model), *layout])
        return cls(cache_folder() / "native" / f"tiles-{hashlib.sha256(told.encode()).hexdigest()[:16]}")

    def read(self, into: NDArray[np.uint8]) -> bool:
        """Whether the file was there and whole; its bytes are then in `into`."""
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size != into.nbytes + _CHECK:
                    return False
                file.readinto(into.data)
                return file.read() == _crc(into)
        except OSError:
            return False

    def write(self, packed: NDArray[np.uint8]) -> None:
        """Keep the bytes; where the folder cannot be written to, they are packed again next time."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.path.parent, delete=False) as file:
                try:
                    file.write(packed.data)
                    file.write(_crc(packed))
                    file.close()
                    Path(file.name).replace(self.path)
                except OSError:
                    Path(file.name).unlink(missing_ok=True)
        except OSError:
            return


def _crc(values: NDArray[np.uint8]) -> bytes:
    return zlib.crc32(values.data).to_bytes(_CHECK, "little")
