"""Many prompts from a file to a file, a line of JSON each; what was written survives a kill and is not done again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from scantling.errors import ScantlingError, ScantlingInputError
from scantling.generate.batching import Engine
from scantling.generate.limits import Limits
from scantling.generate.request import Handle, Request
from scantling.generate.room import encoded, needed
from scantling.generate.sampling import Sampling
from scantling.generate.settings import Generation

if TYPE_CHECKING:
    from scantling.model import Model

OF_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")
OF_LINE = ("prompt", "id", "max_new_tokens", "stop", *OF_SAMPLING)


@dataclass(frozen=True)
class Line:
    """One prompt of a file.

    Attributes:
        index: its number, from 0; empty lines have none.
        mark: what it and its settings are known by.
        id: what the file calls it, or None.
    """

    index: int
    mark: str
    request: Request
    id: Any = None


def read_prompts(
    path: Path, default: Request, model_name: str, prepared: Callable[[str], str] | None = None
) -> list[Line]:
    """The prompts of a JSONL file: each line a JSON string, or an object with `prompt` and settings of its own.

    Args:
        default: the settings of lines that say nothing else.
        model_name: part of every mark, so that no output of another model is taken for done.
        prepared: what becomes of a prompt before it is read, such as a chat template.

    Raises:
        ScantlingInputError: the file cannot be read, a line is no such thing, or there is none.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScantlingInputError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ScantlingInputError(f"{path}: no prompt: a line of JSON for each is needed")
    found = []
    for index, (number, line) in enumerate(lines):
        where = f"{path}, line {number}"
        said = _said(where, line)
        try:
            request = _request(said, default, prepared)
        except ScantlingInputError as error:
            raise ScantlingInputError(f"{where}: {error}") from None
        found.append(Line(index, _mark(model_name, request), request, said.get("id")))
    return found


def _mark(model_name: str, request: Request) -> str:
    options = request.options
    settings = (request.prompt, request.max_new_tokens, request.sampling, options.stop, options.shape)
    return hashlib.sha256(repr((model_name, settings, options.ignore_eos)).encode()).hexdigest()[:16]


def _said(where: str, text: str) -> dict[str, Any]:
    try:
        said = json.loads(text)
    except ValueError as error:
        raise ScantlingInputError(f"{where}: no JSON: {error}") from None
    said = {"prompt": said} if isinstance(said, str) else said
    if not isinstance(said, dict) or not isinstance(said.get("prompt"), str):
        raise ScantlingInputError(f'{where}: a JSON string, or an object such as {{"prompt": "..."}}, is needed')
    if unknown := set(said) - set(OF_LINE):
        raise ScantlingInputError(f"{where}: unknown key {min(unknown)!r}; known are {', '.join(OF_LINE)}")
    return said


def _request(said: Mapping[str, Any], default: Request, prepared: Callable[[str], str] | None) -> Request:
    sampling: Sampling = replace(default.sampling, **{name: said[name] for name in OF_SAMPLING if name in said})
    options = default.options
    if "stop" in said:
        stop = said["stop"]
        listed = [stop] if isinstance(stop, str) else stop
        if not isinstance(listed, list) or not all(isinstance(one, str) and one for one in listed):
            raise ScantlingInputError(f"stop is {stop!r}; a string or a list of strings is needed, none empty")
        options = replace(options, stop=tuple(listed))
    limit = said.get("max_new_tokens", default.max_new_tokens)
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise ScantlingInputError(f"max_new_tokens is {limit!r}; at least 1 is needed")
    prompt = said["prompt"] if prepared is None else prepared(said["prompt"])
    return Request(prompt, limit, sampling, options)


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
        raise ScantlingInputError(f"prompt {line.index}: {error}") from None


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
    found: set[int] = set()
    for number, row in enumerate(whole.splitlines(), 1):
        try:
            said = json.loads(row)
            index, mark = said["index"], said["mark"]
        except (ValueError, TypeError, KeyError):
            raise ScantlingInputError(
                f"{out}, line {number}: not an output of this command; name another file"
            ) from None
        if index in found or not any(line.index == index and line.mark == mark for line in lines):
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
        ScantlingInputError: the output is not this input's, or a prompt cannot be done.
    """
    done = done_already(out, lines)
    left = [line for line in lines if line.index not in done]
    tokens = 0
    with _appending(out) as file:
        for count, (line, made) in enumerate(_made(model, left, limits), 1):
            _write(file, line, made)
            tokens += made.new_tokens
            if progress:
                progress(len(done) + count, len(lines), tokens)
    return len(left), len(done)


def _appending(out: Path) -> IO[str]:
    try:
        return out.open("a", encoding="utf-8", newline="\n")
    except OSError as error:
        raise ScantlingInputError(f"{out}: cannot be written: {error.strerror}") from None


def _made(model: Model, lines: list[Line], limits: Limits | None) -> Iterator[tuple[Line, Generation]]:
    """Each line with its text, in the order in which they end."""
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
            pending[_sent(engine, following).number] = following
        for handle in engine.step():
            line = pending.pop(handle.number)
            yield line, _of(line, handle)


def _sent(engine: Engine, line: Line) -> Handle:
    try:
        return engine.submit(line.request)
    except ScantlingInputError as error:
        raise ScantlingInputError(f"prompt {line.index}: {error}") from None


def _of(line: Line, handle: Handle) -> Generation:
    try:
        return handle.result()
    except ScantlingError as error:
        raise ScantlingInputError(f"prompt {line.index}: {error}") from None


def _write(file: IO[str], line: Line, made: Generation) -> None:
    row = {
        **_named(line),
        "text": made.text,
        "prompt_tokens": made.prompt_tokens,
        "new_tokens": made.new_tokens,
        "finish_reason": made.finish_reason,
        "mark": line.mark,
    }
    file.write(json.dumps(row, ensure_ascii=False) + "\n")
    file.flush()
    os.fsync(file.fileno())
