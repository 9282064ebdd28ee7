"""Many prompts from a file to a file, a line of JSON each; what was written survives a kill and is not done again."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from scantling.errors import ScantlingError, ScantlingInputError
from scantling.generate.batching import Engine
from scantling.generate.limits import Limits
from scantling.generate.prompt_lines import Line
from scantling.generate.room import encoded, needed
from scantling.generate.settings import Generation

if TYPE_CHECKING:
    from scantling.model import Model

T = TypeVar("T")


def limits_for(model: Model, lines: list[Line], rows: int) -> Limits:
    """A cache that holds as many of these prompts as are decoded together, up to 16,384 positions, or the longest.

    Raises:
        ScantlingInputError: a prompt is empty or leaves no room in the context.
    """
    return Limits.for_all([_needed(model, line) for line in lines], rows, Limits().positions)


def _needed(model: Model, line: Line) -> tuple[int, int]:
    request = line.request
    assert isinstance(request.prompt, str)
    try:
        read = encoded(model, request.prompt, request.max_new_tokens)
        return needed(model, len(read), request.max_new_tokens)
    except ScantlingInputError as error:
        raise ScantlingInputError(f"{line.place}: {error}") from None


def done_already(out: Path, lines: list[Line]) -> set[int]:
    """The lines that are in the output; a last line that a kill cut off is taken out of the file.

    Raises:
        ScantlingInputError: the file holds something else: other prompts, other settings, or no such output.
    """
    if not out.exists():
        return set()
    try:
        data = out.read_bytes()
    except OSError as error:
        raise ScantlingInputError(f"{out}: cannot be read: {error.strerror}") from None
    whole = data[: data.rfind(b"\n") + 1]
    wanted, found = {line.index: line for line in lines}, set[int]()
    for number, row in enumerate(whole.splitlines(), 1):
        try:
            said = json.loads(row)
            index, mark, name = said["index"], said["mark"], said.get("id")
        except (ValueError, TypeError, KeyError, RecursionError):
            raise ScantlingInputError(
                f"{out}, line {number}: not an output of this command; name another file"
            ) from None
        line = wanted.get(index) if isinstance(index, int) else None
        if line is None or index in found or (line.mark, line.id) != (mark, name):
            raise ScantlingInputError(
                f"{out}, line {number}: made of another prompt, model or setting than now asked for; name another file"
            )
        found.add(index)
    if cut := data[len(whole) :]:
        if not any(_may_begin(line, cut) for line in lines if line.index not in found):
            raise ScantlingInputError(f"{out}: ends in what is not an output of this command; name another file")
        os.truncate(out, len(whole))
    return found


def _may_begin(line: Line, cut: bytes) -> bool:
    """Whether these bytes may be the beginning of what is written of a line."""
    begins = (json.dumps(_named(line), ensure_ascii=False)[:-1] + ', "text": "').encode()
    return cut.startswith(begins) or begins.startswith(cut)


def _named(line: Line) -> dict[str, Any]:
    return {"index": line.index, **({} if line.id is None else {"id": line.id})}


def run_prompts(
    model: Model,
    lines: list[Line],
    out: Path,
    limits: Limits | None = None,
    progress: Callable[[int, int, int], Any] | None = None,
) -> tuple[int, int]:
    """Write an output line for each prompt that has none yet, as they finish; how many were written and were there.

    Args:
        progress: called with lines done, lines in all and new tokens so far.

    Raises:
        ScantlingInputError: the output is not this input's, or a prompt cannot be done; all others are then written.
    """
    with _appending(out) as file:
        done = done_already(out, lines)
        left, tokens, failed = [line for line in lines if line.index not in done], 0, list[str]()
        for count, (line, made) in enumerate(_made(model, left, limits), 1):
            if isinstance(made, ScantlingError):
                failed.append(f"{line.place}: {made}")
            else:
                _write(file, line, made)
                tokens += made.new_tokens
            if progress:
                progress(len(done) + count, len(lines), tokens)
    if failed:
        raise ScantlingInputError(f"{failed[0]} ({len(failed)} of {len(lines)} prompts failed; {out} has the others)")
    return len(left), len(done)


@contextmanager
def _appending(out: Path) -> Iterator[IO[bytes]]:
    """The output, open for this process alone where the system can tell."""
    if out.exists() and not out.is_file():
        raise ScantlingInputError(f"{out}: cannot be written: a file is needed, which a later run can go on with")
    try:
        # Without a buffer, so that nothing is written twice when the disk is full.
        file = out.open("ab", buffering=0)
    except OSError as error:
        raise ScantlingInputError(f"{out}: cannot be written: {error.strerror}") from None
    with file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            pass
        except BlockingIOError:
            raise ScantlingInputError(f"{out}: another run writes it; wait for it, or name another file") from None
        yield file


def _made(model: Model, lines: list[Line], limits: Limits | None) -> Iterator[tuple[Line, Generation | ScantlingError]]:
    """Each line with its text or what went wrong, in the order in which they end."""
    engine, pending = Engine(model, limits), dict[int, Line]()
    waiting = iter(lines)
    more = True
    while more or engine.busy:
        # No more than a batch is looked at ahead of time.
        while more and len(engine.waiting) < engine.limits.rows:
            following = next(waiting, None)
            if following is None:
                more = False
                break
            sent = _tried(partial(engine.submit, following.request))
            if isinstance(sent, ScantlingError):
                yield following, sent
            else:
                pending[sent.number] = following
        for handle in engine.step():
            yield pending.pop(handle.number), _tried(handle.result)


def _tried(make: Callable[[], T]) -> T | ScantlingError:
    try:
        return make()
    except ScantlingError as error:
        return error


def _write(file: IO[bytes], line: Line, made: Generation) -> None:
    row = {
        **_named(line),
        "text": made.text,
        "prompt_tokens": made.prompt_tokens,
        "new_tokens": made.new_tokens,
        "finish_reason": made.finish_reason,
        "mark": line.mark,
    }
    left = memoryview((json.dumps(row, ensure_ascii=False) + "\n").encode())
    try:
        while left:
            left = left[file.write(left) :]
        os.fsync(file.fileno())
    except OSError as error:
        raise ScantlingInputError(
            f"{file.name}: cannot be written: {error.strerror}; its lines stay, and the same command goes on from them"
        ) from None
