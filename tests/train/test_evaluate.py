"""Scores of held-out text against single log-probabilities: each token once, means over tokens."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.train.small import fresh

import scantling as sc
from scantling.cli.main import _run
from scantling.data import Corpus, byte_tokenizer
from scantling.train.evaluate import Score, Windows, score, score_documents, score_text, start_of, windows_for


def one_by_one(lm: sc.Model, ids: list[int], size: int, stride: int, start: int | None) -> tuple[float, int]:
    """Every token's log-probability by a pass of its own, in the window where it is new."""
    head = [] if start is None else [start]
    room, total, count = size - len(head), 0.0, 0
    for j in range(0 if head else 1, len(ids)):
        # The first window reaches `room` tokens, each later one `stride` more.
        number = max(0, math.ceil((j + 1 - room) / stride))
        before = head + ids[number * stride : j]
        total -= float(lm.logits([before])[0, -1].log_softmax(-1)[ids[j]])
        count += 1
    return total, count


@pytest.mark.parametrize(("size", "stride"), [(10, 5), (8, 3), (10, 9), (4, 1), (64, 32)])
@pytest.mark.parametrize("start", [None, 7])
def test_every_token_is_judged_once_in_its_window(size: int, stride: int, start: int | None) -> None:
    lm = fresh()
    ids = torch.randint(64, (20,), generator=torch.Generator().manual_seed(3)).tolist()
    found = score(lm, ids, Windows(size, stride, start))
    wanted, count = one_by_one(lm, ids, size, stride, start)
    assert found.tokens == count == (19 if start is None else 20)
    assert found.nll == pytest.approx(wanted, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(wanted / count), rel=1e-5)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 60), st.integers(2, 20), st.data(), st.booleans())
def test_windows_judge_each_token_exactly_once(length: int, size: int, data: Any, started: bool) -> None:
    stride = data.draw(st.integers(1, size - 1))
    windows = Windows(size, stride, 99 if started else None)
    judged = []
    for ids, labels in windows.cut(list(range(length))):
        assert len(ids) <= size
        assert not started or ids[0] == 99
        for place, label in enumerate(labels):
            if label != -100:
                judged.append(int(label))
                # What is before it in the window is the token before it in the text, or the start token.
                assert ids[place] == (99 if started and place == 0 else label - 1)
    assert judged == list(range(0 if started else 1, length))


def test_half_windows_judge_about_half() -> None:
    """4,096 tokens in windows of 512: 256 of each, against 4,095 by default."""
    ids = list(range(4096))

    def judged(windows: Windows) -> int:
        return sum(int((labels != -100).sum()) for _, labels in windows.cut(ids))

    assert judged(Windows(512, 256, half=True)) == 2048
    assert judged(Windows(512, 256)) == 4095


def test_scores_add_up_over_tokens() -> None:
    """Sums 2 over 1 token and 90 over 9: 9.2, not the mean of the means, 6."""
    total = Score(2.0, 1, 4.0) + Score(90.0, 9, 6.0)
    assert total.loss == 9.2
    assert total.bits_per_byte == pytest.approx(92 / math.log(2) / 10)
    assert (total + Score(0.0, 0, None)).bits_per_byte is None
    assert Score(1e6, 1).perplexity == math.inf


def test_a_start_token_of_the_tokenizer_is_not_doubled() -> None:
    lm = fresh(vocab_size=320)
    lm.tokenizer = byte_tokenizer()
    begin = lm.tokenizer.bos_id
    assert begin is not None
    assert lm.tokenizer.encode("abcdefghij")[0] == begin
    found = score_text(lm, "abcdefghij", windows_for(lm, 5, 10, begin))
    plain = lm.tokenizer.encode("abcdefghij", add_special=False)
    assert found.tokens == 10
    assert found.nll == pytest.approx(one_by_one(lm, plain, 10, 5, begin)[0], rel=1e-5)
    assert found.bytes == 10
    assert found.bits_per_byte == pytest.approx(found.nll / math.log(2) / 10)


def test_bytes_are_those_of_the_judged_text(corpus: Corpus) -> None:
    """A new model of bytes needs about log2 of its vocabulary for each."""
    lm = fresh(vocab_size=320)
    lm.tokenizer = corpus.tokenizer
    found = score_documents(lm, corpus.held_out, windows_for(lm, start=start_of(corpus)))
    assert found.tokens == corpus.held_out.tokens == round(found.bytes or 0)
    assert found.bits_per_byte == pytest.approx(math.log2(320), abs=0.2)
    bare = score_documents(lm, corpus.held_out, windows_for(lm))
    assert bare.tokens == round(bare.bytes or 0) == corpus.held_out.tokens - len(corpus.held_out)
    few = score_documents(lm, corpus.held_out, windows_for(lm), limit=100)
    assert (few.tokens, round(few.bytes or 0)) == (99, 99)


@pytest.mark.parametrize(("size", "stride"), [(1, 1), (10, 10), (10, 0)])
def test_windows_out_of_range(size: int, stride: int) -> None:
    with pytest.raises(sc.ScantlingInputError, match="a stride of at least 1 and below the window"):
        Windows(size, stride)


def test_refusals() -> None:
    lm = fresh()
    with pytest.raises(sc.ScantlingInputError, match="longer than the context of small, 64"):
        windows_for(lm, size=65)
    with pytest.raises(sc.ScantlingInputError, match="no token is judged"):
        score(lm, [5], Windows(8, 4))
    with pytest.raises(sc.ScantlingInputError, match="has no tokenizer"):
        score_text(lm, "abc", Windows(8, 4))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    lm = fresh(vocab_size=320)
    lm.tokenizer = byte_tokenizer()
    sc.save(lm, tmp_path / "model")
    text = "The quick brown fox jumps over the lazy dog. " * 3
    (tmp_path / "text.txt").write_text(text)
    command = ["eval", str(tmp_path / "model"), "--data", str(tmp_path / "text.txt"), "--json"]
    assert _run(command) == 0
    found = json.loads(capsys.readouterr().out)
    wanted = score_text(lm, text, windows_for(lm, start=lm.tokenizer.bos_id))
    assert found["tokens"] == len(text) == found["bytes"]
    assert found["loss"] == pytest.approx(wanted.loss, rel=1e-6)
    assert (found["window"], found["stride"]) == (64, 32)
    assert _run([*command, "--no-start", "--half", "--window", "32"]) == 0
    assert json.loads(capsys.readouterr().out)["judged"] == "second halves of windows"
    assert _run([*command[:-1]]) == 0
    assert "nats per token" in capsys.readouterr().out
