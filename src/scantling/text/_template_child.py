"""The child process of `scantling.text.template`: renders one template, under limits, and exits.

Run by path as `python -I -S _template_child.py FOLDER...`, with the folders that hold jinja2. A JSON request comes on
standard input ({template, scopes, chars, seconds, marks}); {"texts": [...]} or {"error": ..., "number": ...} goes to
standard output. A template that takes too long ends the process with status 1 and "Timeout" on standard error.
"""

from __future__ import annotations

import faulthandler
import json
import math
import sys
import traceback
from datetime import datetime
from typing import Any

if __name__ == "__main__":
    sys.path.extend(sys.argv[1:])

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError, UndefinedError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MEMORY_BYTES = 512 * 2**20
_SOURCE_NAME = "<template>"


class Refusal(TemplateError):
    """The template called `raise_exception`."""


class PlainNamespace(Namespace):
    """`namespace()` without underscore names, which would reach into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # The instance comes in `args`, so that a template may name an attribute `self`.
        own, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _refuse_underscore(name)
        Namespace.__init__(own, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words: its body stands between `marks`."""

    tags = {"generation"}  # noqa: RUF012
    marks = ("", "")

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        start, end = (nodes.Output([nodes.TemplateData(mark)]).set_lineno(line) for mark in self.marks)
        return [start, nodes.Scope(body).set_lineno(line), end]


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, but an unsafe attribute is an error at once, not an undefined value."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} is unsafe")


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold the underscore name {name!r}")


def _raise_exception(message: object) -> None:
    raise Refusal(str(message))


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment(marks: tuple[str, str]) -> Sandbox:
    tag = type("MarkedGenerationTag", (GenerationTag,), {"marks": marks})
    sandbox = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[tag, loopcontrols])
    sandbox.filters["tojson"] = _tojson
    del sandbox.globals["lipsum"]
    sandbox.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_make_dict, namespace=PlainNamespace
    )
    return sandbox


def _limit_resources(seconds: float) -> None:
    try:
        import resource
    except ModuleNotFoundError:
        return
    wanted = {
        resource.RLIMIT_AS: MEMORY_BYTES,
        resource.RLIMIT_CPU: math.ceil(seconds) + 1,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
    }
    for kind, amount in wanted.items():
        _, hard = resource.getrlimit(kind)
        amount = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
        try:
            resource.setrlimit(kind, (amount, hard))
        except (ValueError, OSError):
            # macOS knows RLIMIT_AS and refuses to set it; the wall clock still holds there.
            if sys.platform != "darwin":
                raise


def _render(template: Template, scope: dict[str, Any], chars: int) -> str:
    pieces: list[str] = []
    left = chars
    for piece in template.generate(scope):
        left -= len(piece)
        if left < 0:
            raise OverflowError(f"it wrote more than {chars:,} characters")
        pieces.append(piece)
    text = "".join(pieces)
    text.encode()
    return text


def _sentence(error: Exception) -> str:
    """What went wrong, to follow the words "the chat template"."""
    told = " ".join(str(error).split())[:300]
    if isinstance(error, TemplateSyntaxError):
        return f"has a syntax error on line {error.lineno}: {told}"
    if isinstance(error, UnicodeEncodeError):
        return "writes a lone surrogate, which no encoding can carry"
    if isinstance(error, MemoryError):
        return f"needs more memory than the {MEMORY_BYTES // 2**20} MiB it may use"
    if isinstance(error, RecursionError):
        return "calls itself too deeply"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == _SOURCE_NAME]
    at = f" on line {lines[-1]}" if lines else ""
    if isinstance(error, Refusal):
        return f"refuses this conversation: {told}"
    if isinstance(error, SecurityError):
        return f"is stopped by the sandbox{at}: {told}"
    if isinstance(error, UndefinedError):
        return f"uses something undefined{at}: {told}"
    if isinstance(error, OverflowError):
        return f"asks for too much{at}: {told}"
    return f"fails{at} with {type(error).__name__}: {told}"


def main() -> None:
    """Read the request, render, write the answer."""
    request = json.load(sys.stdin.buffer)
    seconds, scopes = request["seconds"], request["scopes"]
    _limit_resources(seconds * len(scopes))
    answer: dict[str, Any] = {"texts": []}
    try:
        for scope in scopes:
            faulthandler.dump_traceback_later(seconds, exit=True)
            if not answer["texts"]:
                template = _environment(tuple(request["marks"])).from_string(request["template"])
            answer["texts"].append(_render(template, scope, request["chars"]))
    except Exception as error:
        answer = {"error": _sentence(error), "number": len(answer["texts"])}
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.buffer.write(json.dumps(answer).encode())


if __name__ == "__main__":
    main()
