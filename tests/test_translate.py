"""Encoder-decoders on the command line: translate, generate, sizes with a source."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tests.conftest import GOLDEN
from tests.test_cli import answer, answer_with_notes, call

import scantling as sc
from scantling.cards import presets

EOS = 1


def write_tokenizer(folder: Path) -> None:
    """Words w2 .. w130 for the ids of the tiny models; `</s>` ends a source, as T5's tokenizer does."""
    words = {"<pad>": 0, "</s>": EOS, **{f"w{i}": i for i in range(2, 131)}}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["<pad>", "</s>"])
    library.post_processor = tokenizers.processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", EOS)])
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("s2s") / "t5-v1_1"
    shutil.copytree(GOLDEN / "tiny" / "t5-v1_1", folder)
    write_tokenizer(folder)
    return folder


def wanted(folder: Path, ids: list[int], new: int) -> list[int]:
    """The likeliest token at every step, without a cache, by the original implementation."""
    transformers = pytest.importorskip("transformers")
    original = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
    target = torch.tensor([[original.config.decoder_start_token_id]])
    with torch.no_grad():
        for _ in range(new):
            logits = original(input_ids=torch.tensor([ids]), decoder_input_ids=target, use_cache=False).logits
            target = torch.cat([target, logits[:, -1:].argmax(-1)], 1)
            if int(target[0, -1]) == EOS:
                break
    return target[0, 1:].tolist()


def words(ids: list[int]) -> str:
    return " ".join(f"w{i}" for i in ids if i > EOS)


def test_translate_writes_what_the_original_writes(t5: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = wanted(t5, [5, 9, 11, EOS], 6)
    status, out, err = call(capsys, "translate", "w5 w9 w11", "-m", str(t5), "--max-new-tokens", "6")
    assert (status, out) == (0, words(expected) + "\n")
    assert ("cut after 6 tokens" in err) == (EOS not in expected)


def test_translate_in_json(t5: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("-m", str(t5), "--max-new-tokens", "5", "--json")
    status, out, _ = call(capsys, "translate", "w5 w9 w11", *options)
    one = json.loads(out)
    assert status == 0
    assert (one["text"], one["source_tokens"], one["new_tokens"]) == (words(wanted(t5, [5, 9, 11, EOS], 5)), 4, 5)
    _, out, _ = call(capsys, "translate", "w5 w9 w11", "w7", *options)
    two = json.loads(out)
    assert two["text"] == [one["text"], words(wanted(t5, [7, EOS], 5))]
    assert two["source_tokens"] == [4, 2]


def test_many_texts_are_decoded_together_and_come_in_their_order(t5: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sources = [" ".join(f"w{5 + i * k % 90}" for i in range(1 + k % 7)) for k in range(20)]
    status, out, _ = call(capsys, "translate", *sources, "-m", str(t5), "--max-new-tokens", "9")
    lm = sc.load(t5)
    assert (status, out.splitlines()) == (0, [lm.generate(source, 9) for source in sources])


def test_a_prefix_stands_before_every_text(t5: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("-m", str(t5), "--max-new-tokens", "5", "--json")
    _, whole, _ = call(capsys, "translate", "w3 w4 w7", "w3 w4 w8", *options)
    _, split, _ = call(capsys, "translate", "w7", "w8", "--prefix", "w3 w4 ", *options)
    assert json.loads(whole) == json.loads(split)


def test_generate_takes_the_prompt_as_source(t5: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = answer_with_notes(capsys, "generate", "w5 w9 w11", "-m", str(t5), "--max-new-tokens", "5")
    assert done["text"] == words(wanted(t5, [5, 9, 11, EOS], 5))
    assert (done["prompt_tokens"], done["new_tokens"]) == (4, 5)
    per_position = 2 * 4 * 2 * 5 * 10
    assert done["cache_bytes"] == done["predicted"]["cache_bytes"] == per_position * (5 + 4)
    status, _, err = call(capsys, "generate", "w5", "-m", str(t5), "--max-new-tokens", "3")
    assert status == 0
    assert "as predicted" in err


def test_a_text_gives_text_in_python(t5: Path) -> None:
    lm = sc.load(t5)
    assert lm.generate("w5 w9 w11", 5) == words(wanted(t5, [5, 9, 11, EOS], 5))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("hallo", "-m", "gpt2"), "translate needs an encoder-decoder, and gpt2 is of family decoder"),
        (("hallo", "-m", "t5-small"), "card without weights"),
        (("hallo", "-m", str(GOLDEN / "tiny" / "t5")), "no tokenizer"),
        (("hallo", "-m", "no-such-model"), "no model 'no-such-model'"),
        (("hallo",), "'--model'"),
        (("-m", "t5-small"), "TEXT..."),
        (("", "-m", str(GOLDEN / "tiny" / "t5")), "a text is empty"),
    ],
)
def test_one_sentence_for_every_wrong_input(
    args: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = call(capsys, "translate", *args)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_pair_of_vocabularies_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "marian"
    shutil.copytree(GOLDEN / "tiny" / "marian", folder)
    for name in ("source.spm", "target.spm", "vocab.json"):
        (folder / name).write_bytes(b"{}")
    status, _, err = call(capsys, "translate", "hallo", "-m", str(folder))
    assert status == 2
    assert "source.spm" in err
    assert "a pair of vocabularies cannot be read" in err
    assert sc.load(folder).generate([[5, 6, 7]], 2).shape[0] == 1


def test_a_source_longer_than_the_table_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "bart"
    shutil.copytree(GOLDEN / "tiny" / "bart", folder)
    write_tokenizer(folder)
    status, _, err = call(capsys, "translate", "w5 " * 64, "-m", str(folder))
    assert status == 2
    assert "the source has 65 tokens and the model has 64 learned positions" in err


def test_sizes_with_a_source(capsys: pytest.CaptureFixture[str]) -> None:
    f = answer(capsys, "flops", "t5-base", "--tokens", "114", "--source-tokens", "512")
    assert (f["tokens"], f["source_tokens"], f["forward_flops"]) == (114, 512, 141981401088)
    m = answer(capsys, "memory", "t5-base", "--tokens", "114", "--source-tokens", "512", "--cache-dtype", "fp16")
    assert m["kv_cache_bytes"] == 2 * 2 * 12 * 768 * (114 + 512)
    t = answer(capsys, "trace", "t5-base", "--tokens", "114", "--source-tokens", "512")
    assert t["total_flops"] == 141981401088
    assert answer(capsys, "flops", "t5-base", "--tokens", "9")["source_tokens"] == 9
    assert "source_tokens" not in answer(capsys, "flops", "gpt2")
    _, out, _ = call(capsys, "flops", "t5-base", "--tokens", "114", "--source-tokens", "512")
    assert out.startswith("t5-base, B 1, T 114, P 0, S 512 of the source: 142 GFLOP")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("flops", "gpt2", "--source-tokens", "5"), "--source-tokens: gpt2 is of family decoder and reads no source"),
        (("memory", "bart-base", "--source-tokens", "1025"), "a source of 1,025 is asked for"),
        (("trace", "opus-mt-en-de", "--tokens", "513"), "has 512 positions in a table"),
    ],
)
def test_sources_that_cannot_be(args: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = call(capsys, *args)
    assert status == 2
    assert message in err


def test_cards_list_both_stacks(capsys: pytest.CaptureFixture[str]) -> None:
    assert {"t5-small", "bart-base", "opus-mt-en-de", "transformer-base"} <= set(presets())
    _, out, _ = call(capsys, "cards")
    row: Any = next(line.split() for line in out.splitlines() if "transformer-base " in line)
    assert row == ["transformer-base", "63.046", "M", "6+6", "512", "8", "8", "2,048", "256", "37,000"]
