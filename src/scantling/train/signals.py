"""An orderly end on SIGINT and SIGTERM."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class Stop:
    """Whether somebody asked for the end, and by which signal."""

    by: str | None = None


@contextmanager
def stopping() -> Iterator[Stop]:
    """The first signal is noted, for the loop to look at between updates; the second one ends the process at once."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    numbers = (signal.SIGINT, signal.SIGTERM)

    def note(number: int, _: FrameType | None) -> None:
        stop.by = signal.Signals(number).name
        for each in numbers:
            signal.signal(each, signal.SIG_DFL)

    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
