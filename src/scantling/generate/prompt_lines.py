"""A file of prompts, a line of JSON each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NoReturn

from scantling.errors import ScantlingInputError
from scantling.generate.request import Request
from scantling.generate.room import check_limit
from scantling.generate.sampling import Sampling

OF_SAMPLING = tuple(field.name for field in fields(Sampling))
OF_LINE = ("prompt", "id", "max_new_tokens", "stop", *OF_SAMPLING)


@dataclass(frozen=True)
class Line:
    """One prompt of a file.

    Attributes:
        index: its number, from 0; empty lines have none.
        place: the file and the line, counted from 1.
        mark: what it and its settings are known by.
        id: what the file calls it, or None.
    """

    index: int
    place: str
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
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ScantlingInputError(f"{path}: cannot be read: it is not UTF-8 at byte {error.start}") from None
    except OSError as error:
        raise ScantlingInputError(f"{path}: cannot be read: {error.strerror}") from None
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ScantlingInputError(f"{path}: no prompt: a line of JSON for each is needed")
    found = []
    for index, (number, line) in enumerate(lines):
        place = f"{path}, line {number}"
        said = _said(place, line)
        try:
            request = _request(said, default, prepared)
        except ScantlingInputError as error:
            raise ScantlingInputError(f"{place}: {error}") from None
        found.append(Line(index, place, _mark(model_name, request), request, said.get("id")))
    return found


def _mark(model_name: str, request: Request) -> str:
    options = request.options
    settings = (request.prompt, request.max_new_tokens, request.sampling, options.stop, options.shape)
    said = repr((model_name, settings, options.ignore_eos))
    return hashlib.sha256(said.encode(errors="surrogatepass")).hexdigest()[:16]


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")


def _said(place: str, text: str) -> dict[str, Any]:
    try:
        said = json.loads(text, parse_constant=_no_constant)
        json.dumps(said, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ScantlingInputError(f"{place}: no JSON: half of a surrogate pair is no character") from None
    except RecursionError:
        raise ScantlingInputError(f"{place}: brackets nested too deeply; a prompt has none") from None
    except ValueError as error:
        raise ScantlingInputError(f"{place}: no JSON: {error}") from None
    said = {"prompt": said} if isinstance(said, str) else said
    if not isinstance(said, dict) or not isinstance(said.get("prompt"), str):
        raise ScantlingInputError(f'{place}: a JSON string, or an object such as {{"prompt": "..."}}, is needed')
    if unknown := set(said) - set(OF_LINE):
        raise ScantlingInputError(f"{place}: unknown key {min(unknown)!r}; known are {', '.join(OF_LINE)}")
    return said


def _request(said: Mapping[str, Any], default: Request, prepared: Callable[[str], str] | None) -> Request:
    of_sampling = {name: said[name] for name in OF_SAMPLING if name in said}
    if "logit_bias" in of_sampling:
        of_sampling["logit_bias"] = _bias(of_sampling["logit_bias"])
    sampling: Sampling = replace(default.sampling, **of_sampling)
    options = default.options
    if "stop" in said:
        stop = said["stop"]
        listed = [stop] if isinstance(stop, str) else stop
        if not isinstance(listed, list) or not all(isinstance(one, str) and one for one in listed):
            raise ScantlingInputError(f"stop is {stop!r}; a string or a list of strings is needed, none empty")
        options = replace(options, stop=tuple(listed))
    limit = said.get("max_new_tokens", default.max_new_tokens)
    check_limit(limit)
    prompt = said["prompt"] if prepared is None else prepared(said["prompt"])
    return Request(prompt, limit, sampling, options)


def _bias(given: Any) -> Any:
    """With whole numbers for the keys, which are text in JSON."""
    if not isinstance(given, dict):
        return given
    return {int(key) if key.isascii() and key.isdigit() else key: value for key, value in given.items()}
