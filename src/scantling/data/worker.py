"""The child process that tokenises: run with the folder as its argument, it answers a task per line of standard input.

The folder has the tokenizer's files. A task is a `Task` as JSON; an answer on standard output is {"shard": ...},
{"error": ...} for bad input, or {"disk": ...} where the shard cannot be written. A program of its own, and not a fork
or a spawned copy of the caller, is safe from threads that hold locks and runs no user's script a second time.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from scantling.data.encoding import encode_parts
from scantling.data.reading import Part
from scantling.data.shards import ShardRecord
from scantling.data.sources import Sources
from scantling.errors import ScantlingError
from scantling.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Task:
    """One shard to be made: its name, what is read for it and how, and the dtype of its ids."""

    name: str
    parts: tuple[Part, ...]
    sources: Sources
    dtype: str


@dataclass(frozen=True)
class Reply:
    """What came of it: a shard, or a sentence on bad input, or the system's words on a disk that does not take it."""

    shard: ShardRecord | None = None
    error: str | None = None
    disk: str | None = None


def answer(folder: Path, tokenizer: Tokenizer, task: Task) -> Reply:
    """Do a task."""
    try:
        return Reply(encode_parts(tokenizer, task.parts, task.sources, folder, task.name, task.dtype))
    except ScantlingError as error:
        return Reply(error=str(error))
    except OSError as error:
        return Reply(disk=error.strerror or str(error))


def main() -> None:
    """Answer tasks until there are no more."""
    # A terminal sends the interruption to all; the parent decides what becomes of its children.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder = Path(sys.argv[1])
    tokenizer = Tokenizer.from_folder(folder)
    for line in sys.stdin.buffer:
        reply = answer(folder, tokenizer, msgspec.json.decode(line, type=Task))
        try:
            sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            # The parent was killed; what is left in the buffer has nowhere to go.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return


if __name__ == "__main__":
    main()
