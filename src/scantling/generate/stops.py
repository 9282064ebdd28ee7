"""Stop strings over a stream: nothing that could still become one is let out."""

from __future__ import annotations

from collections.abc import Sequence

from scantling.errors import ScantlingInputError


class StopFilter:
    """Passes text on until one of the stop strings appears; the text is cut just before the first match.

    Attributes:
        hit: a stop string has appeared.
        text: everything let out so far.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise ScantlingInputError("a stop string is empty: at least one character is needed")
        self._stops = tuple(stops)
        self._held = ""
        self._out: list[str] = []
        self.hit = False

    @property
    def text(self) -> str:
        return "".join(self._out)

    def push(self, piece: str) -> str:
        """Take a piece of text, give back what is certain."""
        if self.hit:
            return ""
        self._held += piece
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.hit = True
            return self._let_out(min(found))
        return self._let_out(len(self._held) - self._pending())

    def finish(self, piece: str = "") -> str:
        """Take the last piece and give back the rest: nothing more can become a stop string."""
        out = self.push(piece)
        return out if self.hit else out + self._let_out(len(self._held))

    def _let_out(self, length: int) -> str:
        out, self._held = self._held[:length], self._held[length:]
        self._out.append(out)
        return out

    def _pending(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
