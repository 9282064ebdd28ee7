"""A few child processes that answer tasks; where none can be started, this process does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType

import msgspec

from scantling.data.worker import Reply, Task, answer
from scantling.errors import ScantlingError
from scantling.text.tokenizer import Tokenizer

CODE = "from scantling.data.worker import main; main()"
"""What a child runs."""

_Child = subprocess.Popen[bytes]


@dataclass(frozen=True)
class Crew:
    """How many processes there may be, and what they hold open.

    Attributes:
        processes: at most.
        held: descriptors that children inherit: the lock of a folder that they write into, which then outlasts a parent
            that is killed until they, too, have ended.
    """

    processes: int
    held: tuple[int, ...] = ()


class Pool:
    """Children that tokenise into one folder; a context manager, which ends them.

    Args:
        tasks: that will be asked for: there are never more children.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, crew: Crew, tasks: int) -> None:
        self._folder, self._tokenizer, self._held = folder, tokenizer, crew.held
        processes = min(crew.processes, tasks)
        self._children: list[_Child] = []
        self._free: SimpleQueue[_Child] = SimpleQueue()
        # One child would only repeat what this process can do itself.
        for _ in range(processes if processes > 1 else 0):
            try:
                self._children.append(self._start())
            except OSError as error:
                print(f"note: no more processes can be started ({error.strerror})", file=sys.stderr)
                break
        for child in self._children:
            self._free.put(child)

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._kill()
        for child in self._children:
            child.communicate()

    def answers(self, tasks: Sequence[Task]) -> Iterator[Reply]:
        """What comes of each task, in the order in which they are done.

        Raises:
            ScantlingError: a child died.
        """
        if not self._children:
            yield from (answer(self._folder, self._tokenizer, task) for task in tasks)
            return
        with ThreadPoolExecutor(len(self._children)) as threads:
            running: set[Future[Reply]] = {threads.submit(self._ask, task) for task in tasks}
            try:
                while running:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    yield from (future.result() for future in done)
            except BaseException:
                # The threads wait for their children, and this one for the threads.
                for future in running:
                    future.cancel()
                self._kill()
                raise

    def _kill(self) -> None:
        for child in self._children:
            child.kill()

    def _start(self) -> _Child:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        environment["TOKENIZERS_PARALLELISM"] = "false"
        command = [sys.executable, "-c", CODE, str(self._folder)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, pass_fds=self._held)

    def _ask(self, task: Task) -> Reply:
        child = self._free.get()
        try:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write(msgspec.json.encode(task) + b"\n")
            child.stdin.flush()
            line = child.stdout.readline()
        except OSError:
            line = b""
        finally:
            self._free.put(child)
        if not line:
            raise ScantlingError("a process that tokenises died; run again with fewer workers, or look for free memory")
        return msgspec.json.decode(line, type=Reply)
