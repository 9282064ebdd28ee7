"""What the commands say about drafts, beams, shapes, caches, log-probabilities; a conversation."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import GOLDEN
from tests.test_cli import call
from tests.test_translate import write_tokenizer

import scantling as sc
from scantling.generate.batching import Engine, Limits
from scantling.generate.beam import Beams
from scantling.generate.chat import Conversation, templated
from scantling.generate.constrain import Shape
from scantling.generate.engine import Options, complete
from scantling.generate.request import Request
from scantling.generate.sample import Sampling

TEMPLATE = "{% for m in messages %}{{ m.content }} w3 {% endfor %}"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("talk") / "llama-gqa"
    shutil.copytree(GOLDEN / "tiny" / "llama-gqa", folder)
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def answer(capsys: pytest.CaptureFixture[str], tiny: Path, *args: str) -> Any:
    status, out, err = call(capsys, "generate", *args, "-m", str(tiny), "--json")
    assert status == 0, err
    return json.loads(out)


def test_drafts_are_reported(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = answer(capsys, tiny, "w5 w6", "--max-new-tokens", "20")
    for source in (("--draft-layers", "1"), ("--draft-lookup", "2"), ("--draft-model", str(tiny))):
        made = answer(capsys, tiny, "w5 w6", "--max-new-tokens", "20", *source)
        assert made["text"] == plain["text"]
        assert made["drafts"]["accepted"] <= made["drafts"]["drafted"]
    _, _, err = call(capsys, "generate", "w5", "-m", str(tiny), "--max-new-tokens", "30", "--draft-model", str(tiny))
    assert "tokens stayed (100%)" in err


def test_beams_write_the_best(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = answer(capsys, tiny, "w5 w6", "--beams", "3", "--max-new-tokens", "6")
    assert len(made["texts"]) == 3
    assert made["texts"][0] == made["text"] == sc.load(tiny).generate("w5 w6", 6, beams=Beams(3))
    assert made["cache_bytes"] == made["predicted"]["cache_bytes"] > 0
    one = answer(capsys, tiny, "w5 w6", "--max-new-tokens", "6")["predicted"]
    assert [made["predicted"][name] for name in ("cache_bytes", "decode_flops", "prefill_flops")] == [
        3 * one["cache_bytes"],
        3 * one["decode_flops"],
        one["prefill_flops"],
    ]
    status, out, err = call(capsys, "generate", "w5 w6", "-m", str(tiny), "--beams", "3", "--max-new-tokens", "6")
    assert (status, out) == (0, made["text"] + "\n")
    assert "ended by" in err


def test_translate_by_beams(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "t5"
    shutil.copytree(GOLDEN / "tiny" / "t5-v1_1", folder)
    write_tokenizer(folder)
    lm = sc.load(folder)
    args = ("translate", "w5 w9", "w7", "-m", str(folder), "--max-new-tokens", "6")
    _, out, _ = call(capsys, *args, "--beams", "3", "--length-penalty", "0.5", "--no-repeat-ngram", "2")
    wanted = [
        lm.generate(text, 6, beams=Beams(3, 0.5), sampling=Sampling(no_repeat_ngram=2)) for text in ("w5 w9", "w7")
    ]
    assert out.splitlines() == wanted
    status, _, err = call(capsys, *args, "--length-penalty", "2")
    assert status == 2
    assert "are for --beams N" in err


def test_best_of_and_log_probabilities(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("w5", "--max-new-tokens", "5", "--temperature", "1", "--seed", "3", "--logprobs", "2")
    best = answer(capsys, tiny, *args, "--best-of", "4")
    each = [answer(capsys, tiny, *args[:-4], "--seed", str(3 + i), "--logprobs", "2") for i in range(4)]
    mean = lambda one: sum(t["logprob"] for t in one["logprobs"]) / len(one["logprobs"])  # noqa: E731
    assert best["text"] == max(each, key=mean)["text"]
    assert len(best["texts"]) == 4
    assert all(len(token["top"]) == 2 for token in best["logprobs"])
    assert " ".join(token["token"] for token in best["logprobs"]) == best["text"]
    assert all(one["token"] == f"w{one['id']}" for token in best["logprobs"] for one in token["top"] if one["id"] > 1)


@pytest.mark.parametrize("kind", ["full", "ring"])
@pytest.mark.parametrize("numbers", ["plain", "int8"])
def test_kinds_of_cache_take_what_is_predicted(
    tiny: Path, capsys: pytest.CaptureFixture[str], kind: str, numbers: str
) -> None:
    args = ("w5 w6 w7", "--cache", kind, "--cache-numbers", numbers, "--prefill-chunk", "2")
    made = answer(capsys, tiny, *args)
    assert made["cache_bytes"] == made["predicted"]["cache_bytes"]


def test_candidates_of_a_contrastive_search_are_in_the_account(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = answer(capsys, tiny, "w5 w6", "--max-new-tokens", "6", "--engine", "torch")
    made = answer(capsys, tiny, "w5 w6", "--max-new-tokens", "6", "--contrastive", "5")
    assert made["cache_bytes"] == made["predicted"]["cache_bytes"] == 5 * one["cache_bytes"]
    assert made["predicted"]["decode_flops"] == 5 * one["predicted"]["decode_flops"]
    _, _, err = call(capsys, "generate", "w5 w6", "-m", str(tiny), "--max-new-tokens", "6", "--contrastive", "5")
    assert "per step of 5 rows predicted" in err


def test_candidates_for_a_target_are_in_the_account(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "t5"
    shutil.copytree(GOLDEN / "tiny" / "t5", folder)
    write_tokenizer(folder)
    made = answer(capsys, folder, "w5 w6 w7", "--max-new-tokens", "6", "--contrastive", "5")
    # 3 layers of keys and values, 5 heads of 10 in float32: the start, 6 tokens, 3 words of the source and its end.
    assert made["cache_bytes"] == made["predicted"]["cache_bytes"] == 5 * 3 * 2 * 5 * 10 * 4 * (7 + 4)


def test_a_full_context_is_named(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = call(capsys, "generate", "w5 " * 58, "-m", str(tiny), "--max-new-tokens", "20")
    assert status == 0
    assert "ended by length: the context of 64 is full" in err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--beams", "0"), "beams is 0"),
        (("--beams", "2", "--best-of", "2"), "beams and best_of are given"),
        (("--beams", "2", "--stop", "x"), "stop and beams are given"),
        (("--beams", "2", "--temperature", "1"), "beam search draws nothing"),
        (("--early-stopping",), "are for --beams N"),
        (("--best-of", "2"), "temperature 0 gives one text"),
        (("--cache", "round"), "unknown kind of cache 'round'"),
        (("--cache-numbers", "int3"), "unknown kind of numbers in a cache 'int3'"),
        (("--prefill-chunk", "0"), "prefill chunk is 0"),
        (("--draft-layers", "9"), "from 1 to 1 is needed"),
        (("--draft-layers", "1", "--draft-lookup", "1"), "name one"),
        (("--draft-lookup", "1", "--draft-rule", "x"), "unknown rule of acceptance"),
        (("--logit-bias", "x"), "--logit-bias 'x': a token id and a number"),
        (("--logit-bias", "900=1"), "logit_bias names token 900"),
        (("--logprobs", "-1", "--json"), "logprobs is -1"),
        (("--logprobs", "2"), "--logprobs goes with --json"),
        (("--rows", "2"), "--rows is for --prompts FILE"),
        (("--draft-count", "2"), "--draft-count is for drafts: name who makes them"),
        (("--draft-rule", "residual"), "--draft-rule is for drafts"),
        (("--regex", "a", "--json-schema", "pyproject.toml"), "and not both"),
        (("--json-schema", "no-such.json"), "no-such.json: cannot be read"),
        (("--regex", "a"), "llguidance cannot follow a text of this tokenizer"),
    ],
)
def test_one_sentence_for_every_wrong_setting(
    args: tuple[str, ...], words: str, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = call(capsys, "generate", "w5 w6", "-m", str(tiny), "--max-new-tokens", "3", *args)
    assert (status, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


def test_a_prompt_from_standard_input(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = answer(capsys, tiny, "w5 w6", "--max-new-tokens", "4")
    for text in ("w5 w6", "w5 w6\n", "w5 w6\r\n"):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        assert answer(capsys, tiny, "-", "--max-new-tokens", "4")["text"] == wanted["text"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"w5 \xff"), encoding="utf-8"))
    status, out, err = call(capsys, "generate", "-", "-m", str(tiny))
    assert (status, out, err) == (2, "", "error: standard input is not utf-8 at byte 3\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"w5 \xff"), encoding="utf-8"))
    status, out, err = call(capsys, "chat", "-m", str(tiny))
    assert (status, out) == (2, "")
    assert "error: standard input is not utf-8" in err


def test_a_message_behind_a_system_prompt(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = answer(capsys, tiny, "w5", "--chat", "--system", "w9", "--max-new-tokens", "4")
    assert made["text"] == sc.load(tiny).generate("w9 w3 w5 w3 ", 4)
    status, _, err = call(capsys, "generate", "w5", "--system", "w9", "-m", str(tiny))
    assert (status, "--system is for --chat" in err) == (2, True)


class TestShapes:
    def test_a_regular_expression_is_matched_whole(self, smollm: Any) -> None:
        shape = Shape(regex=r"[0-9]{4}-[0-9]{2}")
        done = complete(smollm, "The date is ", 20, Sampling(), Options(shape=shape))
        import re

        assert re.fullmatch(r"[0-9]{4}-[0-9]{2}", done.text)
        assert done.finish_reason == "stop"
        # Nothing more may come, so no step is spent on the end.
        assert done.ids[-1] not in smollm.eos_ids

    def test_a_schema_is_followed_whatever_is_drawn(self, smollm: Any) -> None:
        schema = {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"enum": [1, 22]}},
            "required": ["name", "age"],
            "additionalProperties": False,
        }
        options = Options(shape=Shape(json_schema=schema))
        for seed in range(3):
            done = complete(smollm, "Someone as JSON: ", 60, Sampling(temperature=1.5, seed=seed), options)
            found = json.loads(done.text)
            assert set(found) == {"name", "age"}
            assert found["age"] in (1, 22)
            assert len(found["name"]) <= 5
            assert done.finish_reason == "stop"

    def test_a_text_that_is_cut_before_it_matches_is_named(self, capsys: pytest.CaptureFixture[str]) -> None:
        for limit, cut in (("2", True), ("9", False)):
            args = ("generate", "The year is ", "--regex", "[0-9]{4}", "--max-new-tokens", limit)
            status, out, err = call(capsys, *args)
            assert (status, "note: cut after 2 tokens, before" in err) == (0, cut)
            assert len(out.strip()) == (2 if cut else 4)

    def test_shapes_in_a_batch(self, smollm: Any) -> None:
        made = smollm.generate(["One ", "Another "], 8, options=Options(shape=Shape(regex="(yes|no)!")))
        assert set(made) <= {"yes!", "no!"}

    def test_an_expression_that_is_none(self, smollm: Any) -> None:
        with pytest.raises(sc.ScantlingInputError, match="the regular expression cannot be followed"):
            complete(smollm, "a", 3, Sampling(), Options(shape=Shape(regex="[")))

    @pytest.mark.parametrize(
        ("regex", "why"), [(r"[^\s\S]", "no text matches it"), ("(a{1000}){1000}", "too many expressions")]
    )
    def test_what_the_library_gives_up_is_no_whole_text(self, smollm: Any, regex: str, why: str) -> None:
        hopeless = Options(shape=Shape(regex=regex))
        with pytest.raises(sc.ScantlingInputError, match=f"the regular expression cannot be followed: .*{why}"):
            complete(smollm, "a", 3, Sampling(), hopeless)
        engine = Engine(smollm, Limits(rows=2, positions=64))
        good, bad = engine.submit(Request("Hello", 2)), engine.submit(Request("a", 3, options=hopeless))
        engine.run()
        assert good.text == smollm.generate("Hello", 2)
        assert (bad.finish_reason, bad.text) == ("error", "")
        with pytest.raises(sc.ScantlingInputError, match=why):
            bad.result()

    @pytest.mark.parametrize("schema", ["{", '{"type": "nonsense"}', {"type": object()}, '{"a":' * 50_000])
    def test_a_schema_that_is_none(self, smollm: Any, schema: Any) -> None:
        with pytest.raises(sc.ScantlingInputError, match=r"^the JSON schema (is no|has|cannot be followed: Inv)"):
            complete(smollm, "a", 3, Sampling(), Options(shape=Shape(json_schema=schema)))

    def test_without_a_tokenizer_or_with_drafts(self) -> None:
        from scantling.generate.speculative import Drafting

        lm = sc.load(GOLDEN / "tiny" / "llama-gqa")
        with pytest.raises(sc.ScantlingInputError, match="needs a model with a tokenizer"):
            lm.generate([1, 2], 3, options=Options(shape=Shape(regex="a")))
        with pytest.raises(sc.ScantlingInputError, match="leave the drafts out"):
            Options(shape=Shape(regex="a"), drafting=Drafting(lookup=2))


class TestChat:
    def test_a_conversation_is_the_template_of_all_its_messages(self, tiny: Path) -> None:
        lm = sc.load(tiny)
        talk = Conversation(lm, max_new_tokens=6, options=Options(ignore_eos=True))
        pieces: list[str] = []
        first = talk.say("w5 w6", pieces.append)
        assert first.text == "".join(pieces)
        second = talk.say("w7 w8")
        messages = [
            {"role": "user", "content": "w5 w6"},
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": "w7 w8"},
        ]
        wanted = complete(lm, templated(lm, messages), 6, Sampling(), Options(ignore_eos=True))
        assert second.text == wanted.text
        assert second.prompt_tokens == wanted.prompt_tokens
        assert talk.messages == [*messages, {"role": "assistant", "content": second.text}]
        talk.reset()
        assert talk.say("w5 w6").text == first.text

    def test_what_was_said_is_not_read_again(self, tiny: Path) -> None:
        talk = Conversation(
            sc.load(tiny), "w20 w21 w22 w23 w24 w25 w26 w27 w28 w29 w30 w31 w32 w33 w34", max_new_tokens=3
        )
        talk.say("w5")
        assert talk._engine.shared == 0
        talk.say("w6")
        assert talk._engine.shared == 16

    def test_a_message_that_does_not_fit_was_not_said(self, tiny: Path) -> None:
        talk = Conversation(sc.load(tiny), max_new_tokens=8, positions=32)
        with pytest.raises(sc.ScantlingInputError, match="and 32 fit: begin anew"):
            talk.say("w5 " * 40)
        with pytest.raises(sc.ScantlingInputError, match="the message is empty"):
            talk.say(" ")
        assert talk.messages == []
        assert talk.say("w5").new_tokens > 0

    def test_lines_from_standard_input(
        self, tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def said(text: str, *args: str) -> tuple[int, str, str]:
            monkeypatch.setattr("sys.stdin", io.StringIO(text))
            return call(capsys, "chat", "-m", str(tiny), "--max-new-tokens", "4", *args)

        status, out, err = said("w5 w6\n\nw7\n/reset\nw5 w6\n/exit\nw9\n")
        answers = out.splitlines()
        assert (status, len(answers)) == (0, 3)
        assert answers[0] == answers[2]
        assert "the conversation begins anew" in err
        _, out, _ = said("w5 w6\nw7", "--json")
        rows = [json.loads(line) for line in out.splitlines()]
        assert [row["text"] for row in rows] == answers[:2]
        assert rows[1]["prompt_tokens"] > rows[0]["prompt_tokens"]
        _, out, _ = said("w5 w6\n", "--system", "w50 w51")
        assert out.splitlines() != answers[:1]
        status, _, err = said("/what\n")
        assert status == 2
        assert "no command '/what'; known: /reset, /exit" in err

    @pytest.mark.parametrize("terminal", [True, False])
    def test_an_answer_that_is_stopped(
        self, terminal: bool, tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Ctrl-C within an answer: at a terminal the next message is answered as if it were the first."""

        class Typed(io.StringIO):
            def isatty(self) -> bool:
                return terminal

        from scantling.cli import chat

        def once(piece: str) -> None:
            monkeypatch.setattr(chat, "_write", write)
            raise KeyboardInterrupt

        write = chat._write
        monkeypatch.setattr("sys.stdin", Typed("w5 w6\nw9 w8\n"))
        monkeypatch.setattr(chat, "_write", once)
        status, out, err = call(capsys, "chat", "-m", str(tiny), "--max-new-tokens", "4")
        if not terminal:
            assert (status, out) == (130, "")
            assert "interrupted" in err
            return
        wanted = Conversation(sc.load(tiny), max_new_tokens=4).say("w9 w8").text
        assert (status, out) == (0, wanted + "\n")
        assert "stopped; the message and its answer are forgotten" in err

    def test_a_model_without_a_template(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = tmp_path / "plain"
        shutil.copytree(GOLDEN / "tiny" / "llama-gqa", folder)
        write_tokenizer(folder)
        status, _, err = call(capsys, "chat", "-m", str(folder))
        assert status == 2
        assert "needs a chat template, and the model has none" in err
