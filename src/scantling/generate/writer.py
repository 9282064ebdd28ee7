"""Tokens to text as they come: decoded, cut at a stop string, ended at end-of-text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scantling.generate.stops import StopFilter

if TYPE_CHECKING:
    from scantling.generate.settings import Options
    from scantling.model import Model


class Writer:
    """One text as its tokens come: decoded, cut at a stop string, ended at end-of-text.

    Attributes:
        ids: the tokens so far.
        reason: why the text ended, or None while it goes on.
    """

    def __init__(self, model: Model, options: Options) -> None:
        assert model.tokenizer is not None
        self._eos = frozenset[int]() if options.ignore_eos else model.eos_ids
        self._stream, self._stops = model.tokenizer.stream(), StopFilter(options.stop)
        self.ids: list[int] = []
        self.reason: str | None = None

    @property
    def text(self) -> str:
        """What is certain."""
        return self._stops.text

    def push(self, token: int) -> str:
        """Take a token; the text that it makes certain. `reason` tells whether it was the last."""
        self.ids.append(token)
        if token in self._eos:
            self.reason = "stop"
            return ""
        return self._passed(self._stops.push(self._stream.push(token)))

    def finish(self, reason: str) -> str:
        """No token comes any more, for `reason` if there was none yet; the rest of the text."""
        rest = self._passed(self._stops.finish(self._stream.flush()))
        self.reason = self.reason or reason
        return rest

    def _passed(self, piece: str) -> str:
        if self._stops.hit:
            self.reason = "stop"
        return piece
