"""Memory of one's own for the compiled pass: laid out first, allocated once, then filled."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from scantling.errors import ScantlingInputError
from scantling.native.library import usable_cores
from scantling.native.tiles import padded

if TYPE_CHECKING:
    from numpy.typing import NDArray

LINE = 64
MOST_MAKERS = 4
"""Things that are made at once: more would hold more in memory, which is what they wait for."""


@dataclass(frozen=True)
class Place:
    """Where something lies in an arena: bytes from its start."""

    start: int
    nbytes: int


class Arena:
    """One block of memory, on huge pages where the system gives them.

    Attributes:
        nbytes: laid out so far.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._filled: list[tuple[Place, Callable[[NDArray[np.uint8]], None]]] = []
        self._start: int | None = None
        self.nbytes = 0

    def reserve(self, size: int) -> Place:
        """Room for so many bytes, which are 0 at first."""
        place = Place(self.nbytes, size)
        self.nbytes = padded(self.nbytes + size, LINE)
        return place

    def fill(self, size: int, make: Callable[[], Any]) -> Place:
        """Room for an array of so many bytes, which is made when the arena is filled."""

        def copy(to: NDArray[np.uint8]) -> None:
            to[:] = np.ascontiguousarray(make()).view(np.uint8).reshape(-1)

        return self.written(size, copy)

    def written(self, size: int, write: Callable[[NDArray[np.uint8]], None]) -> Place:
        """Room for so many bytes, which are written there when the arena is filled."""
        place = self.reserve(size)
        self._filled.append((place, write))
        return place

    def allocate(self) -> None:
        """Get the memory.

        Raises:
            ScantlingInputError: there is not enough.
        """
        self._start = self._library.sc_arena(self.nbytes)
        if not self._start:
            raise ScantlingInputError(f"{self.nbytes:,} bytes for the compiled pass cannot be allocated")
        self._freed = weakref.finalize(self, self._library.sc_free, self._start, self.nbytes)

    def write(self) -> None:
        """Bring everything to its place; what it was made of is let go as soon as it is there."""
        filled, self._filled = sorted(self._filled, key=lambda one: -one[0].nbytes), []
        with ThreadPoolExecutor(min(usable_cores(), MOST_MAKERS)) as cores:
            # The largest first, so that no core is left with it at the end.
            for done in [cores.submit(write, self.bytes(place)) for place, write in filled]:
                done.result()

    def at(self, place: Place | None) -> int | None:
        """The address of a place."""
        return None if place is None or self._start is None else self._start + place.start

    def bytes(self, place: Place) -> NDArray[np.uint8]:
        """The memory of a place, to be read and written; it is gone with the arena."""
        assert self._start is not None
        memory = (ctypes.c_uint8 * place.nbytes).from_address(self._start + place.start)
        found: NDArray[np.uint8] = np.ctypeslib.as_array(memory)
        return found
