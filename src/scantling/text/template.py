"""Render a chat template: the one place where a stranger's Jinja source runs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scantling.errors import ScantlingError, ScantlingInputError, need

MAX_SOURCE_BYTES = 256 * 2**10
MAX_CHARS = 4 * 131_072
WALL_SECONDS = 2.0

_START_SECONDS = 10.0
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})
_RESERVED_CALLS = frozenset({"raise_exception", "strftime_now", "range", "dict", "namespace", "cycler", "joiner"})


def render(
    template: str,
    messages: Sequence[Mapping[str, object]],
    *,
    add_generation_prompt: bool = True,
    bos_token: str = "",
    eos_token: str = "",
    tools: Sequence[Mapping[str, object]] | None = None,
    variables: Mapping[str, object] | None = None,
    max_chars: int = MAX_CHARS,
    seconds: float = WALL_SECONDS,
) -> str:
    """The prompt that a chat template makes of a conversation, as transformers' `apply_chat_template` writes it.

    The template runs in Jinja's immutable sandbox, in a child process of its own that may use 512 MiB (where the
    platform has `resource`) and `seconds` of time, and that is killed beyond them. It sees the messages, the tools,
    the flags given here, and the functions that transformers gives to templates (`raise_exception`, `strftime_now`,
    `namespace`, `tojson`, the tags `generation`, `break` and `continue`). Keys of a message that are None are left out.

    Args:
        template: Jinja source, at most 256 KiB.
        messages: at least one; each has a `role` and a `content`, which is text or a list of parts with a `type`;
            `content` may be absent or None beside `tool_calls`.
        add_generation_prompt: ask the template to open the assistant's turn.
        bos_token: text of the start token; templates that write it make the tokenizer's own BOS superfluous.
        eos_token: text of the end token.
        tools: JSON descriptions of the tools, passed on as they are.
        variables: further names for the template, such as `enable_thinking`; JSON values only.
        max_chars: the longest prompt allowed, in characters.
        seconds: wall-clock time for compiling and rendering; starting the child is not counted.

    Raises:
        ScantlingInputError: the arguments are malformed, or the template has a syntax error, refuses the conversation,
            reaches out of the sandbox, fails, or wants too much time, memory or text.
        MissingExtra: jinja2 is not installed.
    """
    talk = Talk(messages, add_generation_prompt, bos_token, eos_token, tools, variables or {})
    answer = _answer(template, [talk], max_chars, seconds)
    if "error" in answer:
        raise ScantlingInputError(f"the chat template {answer['error']}")
    text: str = answer["texts"][0]
    return text


@dataclass(frozen=True)
class Talk:
    """One conversation to be rendered; the fields are those of `render`."""

    messages: Sequence[Mapping[str, object]]
    add_generation_prompt: bool = True
    bos_token: str = ""
    eos_token: str = ""
    tools: Sequence[Mapping[str, object]] | None = None
    variables: Mapping[str, object] = field(default_factory=dict)


class BadTalk(ScantlingInputError):
    """One of several conversations cannot be rendered: `number` says which."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


def render_many(
    template: str, talks: Sequence[Talk], *, marks: tuple[str, str] = ("", ""), seconds: float = WALL_SECONDS
) -> list[str]:
    """Render many conversations with one template, in one child process.

    Args:
        marks: text that is written before and after what the tag `generation` holds.
        seconds: for each conversation.

    Raises:
        BadTalk: as for `render`.
    """
    if not talks:
        return []
    answer = _answer(template, talks, MAX_CHARS, seconds, marks)
    if "error" in answer:
        raise BadTalk(f"the chat template {answer['error']}", answer["number"])
    texts: list[str] = answer["texts"]
    return texts


def _answer(
    template: str, talks: Sequence[Talk], max_chars: int, seconds: float, marks: tuple[str, str] = ("", "")
) -> dict[str, Any]:
    """What the child says."""
    _check_source(template)
    scopes = []
    for number, talk in enumerate(talks):
        try:
            scopes.append(_scope(talk))
        except ScantlingInputError as error:
            raise BadTalk(str(error), number) from None
    request = {"template": template, "scopes": scopes, "chars": max_chars, "seconds": seconds, "marks": marks}
    return {"number": 0, **_run_child(_encode(request), seconds, seconds * len(talks))}


def _scope(talk: Talk) -> dict[str, Any]:
    """The names that a template sees."""
    _check_messages(talk.messages)
    if talk.tools is not None and not all(isinstance(tool, Mapping) for tool in talk.tools):
        raise ScantlingInputError("tools must be a list of JSON objects")
    names = dict(talk.variables)
    _check_names(names)
    return {
        "documents": None,
        **names,
        "messages": [{key: value for key, value in message.items() if value is not None} for message in talk.messages],
        "tools": talk.tools,
        "add_generation_prompt": talk.add_generation_prompt,
        "bos_token": talk.bos_token,
        "eos_token": talk.eos_token,
    }


def _check_source(template: str) -> None:
    if not isinstance(template, str):
        raise ScantlingInputError(f"a chat template must be text, not {type(template).__name__}")
    size = len(template.encode(errors="surrogatepass"))
    if size > MAX_SOURCE_BYTES:
        raise ScantlingInputError(f"the chat template has {size:,} bytes, more than the {MAX_SOURCE_BYTES:,} allowed")


def _check_messages(messages: object) -> None:
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise ScantlingInputError("messages must be a list of at least one {role, content}")
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ScantlingInputError(f"messages[{place}] must be a {{role, content}}, not {type(message).__name__}")
        if not isinstance(message.get("role"), str) or not message["role"]:
            told = repr(message.get("role"))[:80]
            raise ScantlingInputError(f"messages[{place}].role must be text such as 'user', not {told}")
        _check_content(message, place)


def _check_content(message: Mapping[str, object], place: int) -> None:
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return
    if not isinstance(content, list | tuple):
        raise ScantlingInputError(
            f"messages[{place}].content must be text or a list of parts, not {type(content).__name__}"
        )
    for index, part in enumerate(content):
        if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
            raise ScantlingInputError(f"messages[{place}].content[{index}] must be an object with a 'type'")
        if part["type"] == "text" and not isinstance(part.get("text"), str):
            raise ScantlingInputError(f"messages[{place}].content[{index}].text must be text")


def _check_names(names: Mapping[str, object]) -> None:
    for name in names:
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
            raise ScantlingInputError(f"{name!r} is no name for a template variable")
        if name in _RESERVED | _RESERVED_CALLS:
            raise ScantlingInputError(f"the template variable {name!r} is set by Scantling and cannot be replaced")


def _encode(request: Mapping[str, object]) -> bytes:
    try:
        return json.dumps(request, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise ScantlingInputError(
            f"the template or a message has a lone surrogate U+{ord(error.object[error.start]):04X}"
        ) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise ScantlingInputError(f"what a template is given must be plain JSON: {error}") from None


def _run_child(request: bytes, seconds: float, total: float) -> dict[str, Any]:
    need("jinja2", "render a chat template")
    if not sys.executable:
        raise ScantlingError("this Python does not know its own executable, so no child process can render a template")
    child = Path(__file__).with_name("_template_child.py")
    command = [sys.executable, "-I", "-S", str(child), *_library_folders()]
    kept = {name: os.environ[name] for name in ("SYSTEMROOT", "TZ", "LD_LIBRARY_PATH") if name in os.environ}
    late = f"did not finish within {seconds:g} seconds"
    try:
        done = subprocess.run(
            command, input=request, capture_output=True, timeout=_START_SECONDS + total, env=kept, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": late}
    if done.returncode == 0:
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer
    if b"Timeout (" in done.stderr:
        return {"error": late}
    told = " ".join(done.stderr.decode(errors="replace").split())[-300:]
    return {"error": f"ended its process with status {done.returncode}: {told or 'no message'}"}


def _library_folders() -> list[str]:
    """Where jinja2 and its one dependency lie; the child looks nowhere else besides the standard library."""
    found = [importlib.util.find_spec(name) for name in ("jinja2", "markupsafe")]
    folders = [str(Path(spec.origin).parent.parent) for spec in found if spec is not None and spec.origin]
    return list(dict.fromkeys(folders))
