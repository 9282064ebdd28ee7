"""Every objective trains: what was drawn at random becomes better than knowing only how often each token comes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cases.small import LLAMA
from tests.data_room.made import corpus as of_ids
from tests.train.test_run import go, losses, settings
from tests.train.trigram import Trigram, texts_of

import scantling as sc
from scantling.cards.read import from_dict
from scantling.cli.main import _run
from scantling.data import Corpus, MaskedLM, Sources, byte_tokenizer, prepare
from scantling.train.settings import objective
from scantling.train.watch import read_metrics

ENCODER: dict[str, Any] = {
    **LLAMA,
    "family": "encoder",
    "d_model": 64,
    "vocab_size": 320,
    "attention": {"kind": "multi_head", "n_heads": 4},
    "head": {"kind": "lm"},
    "tied": True,
}
BOTH: dict[str, Any] = {
    **LLAMA,
    "family": "encoder-decoder",
    "vocab_size": 400,
    "position": {"kind": "relative", "buckets": 8, "max_distance": 32},
    "tied": True,
}


def unigram(corpus: Corpus) -> float:
    """Nats a token of the training text under its own frequencies: the least without any context."""
    counts = Counter(int(i) for n in range(len(corpus.train)) for i in corpus.train.ids(n))
    shares = np.array(list(counts.values())) / sum(counts.values())
    return float(-(shares * np.log(shares)).sum())


def periodic(kind_marks: Any, period: int = 7, documents: int = 60, first: int = 10) -> Corpus:
    """Texts that count through a period from any place: each token follows from its neighbours."""
    texts = [[first + (n + i) % period for i in range(40)] for n in range(documents)]
    return of_ids(texts, kind_marks, held_out=0.1, vocab_size=320)


PLAN: dict[str, Any] = {
    "steps": 60,
    "batch": 8,
    "tokens": 32,
    "accumulation": 1,
    "save_every": 0,
    "optimizer__lr": 1e-2,
}
LONGER = {**PLAN, "steps": 150, "optimizer__lr": 3e-3}


def test_masked_words_are_found_from_both_sides(tmp_path: Path) -> None:
    from tests.data_room.made import ENCODER as MARKS

    data = periodic(MARKS)
    plan = settings(**LONGER, objective="masked", evaluation__samples=0)
    summary = go(sc.new(from_dict(ENCODER, "encoder")), data, plan, tmp_path)
    assert summary.loss < 0.5 * unigram(data)
    assert summary.bits_per_byte is None


def test_words_are_masked_whole_where_the_card_says_so() -> None:
    lm = sc.new(from_dict(ENCODER, "encoder"))
    assert objective(lm, settings(objective="masked", whole_words=True)) == MaskedLM(whole_words=True)
    assert objective(lm, settings(objective="masked")) == MaskedLM()
    with pytest.raises(sc.ScantlingInputError, match="whole_words goes with the objective masked, not with causal"):
        objective(lm, settings(objective="causal", whole_words=True))


def test_a_prefix_is_read_both_ways_and_the_rest_is_learned(tmp_path: Path) -> None:
    from tests.data_room.made import FRAMED

    data = periodic(FRAMED)
    card = {**LLAMA, "vocab_size": 320, "attention": {**LLAMA["attention"], "prefix": True}}
    plan = settings(**PLAN, objective="prefix", boundary=None, evaluation__samples=0)
    assert go(sc.new(from_dict(card, "prefix")), data, plan, tmp_path).loss < 0.5 * unigram(data)


def test_spans_are_filled_in(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"abcdefgh {n % 10} ijklmnop.\n" for n in range(400)))
    other = tmp_path / "other.txt"
    other.write_text("".join(f"abcdefgh {n % 10} ijklmnop.\n" for n in range(50)))
    tokenizer = byte_tokenizer("seq2seq", sentinels=100)
    data = prepare([str(text), str(other)], tokenizer, tmp_path / "c", workers=1, held_out=0.3)
    lm = sc.new(from_dict(BOTH, "both"))
    plan = settings(**PLAN, objective="spans", boundary="concatenated", evaluation__samples=0)
    go(lm, data, plan, tmp_path / "run")
    first, *_, last = [loss for _, loss, *_ in losses(tmp_path / "run")]
    assert last < 0.6 * first


def test_a_target_is_learned_from_its_source(tmp_path: Path) -> None:
    """The target is the source's letter: without the source it costs ln 6, and its end nothing."""
    pairs = tmp_path / "pairs.tsv"
    draw = np.random.default_rng(0)
    letters = [(str(draw.choice(list("abcdef"))), n) for n in range(300)]
    pairs.write_text("".join(f"{letter * 4}{n}\t{letter.upper()}\n" for letter, n in letters))
    data = prepare(Sources((str(pairs),), "pairs"), byte_tokenizer("seq2seq"), tmp_path / "c", workers=1)
    lm = sc.new(from_dict(BOTH, "both"))
    plan = settings(**{**LONGER, "tokens": 16}, boundary=None, label_smoothing=0.1, evaluation__samples=0)
    summary = go(lm, data, plan, tmp_path / "run")
    assert summary.loss < 0.5 * np.log(6) / 2
    held = [r for r in read_metrics(tmp_path / "run") if r["kind"] == "evaluation"]
    assert held[-1]["bits_per_byte"] is None


def test_only_what_the_assistant_says_is_learned(tmp_path: Path) -> None:
    """Of conversations the assistant's tokens are judged: fewer than all."""
    chats = tmp_path / "chats.jsonl"
    lines = []
    for n in range(40):
        turns = [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"{n} is {n}."}]
        lines.append(json.dumps({"messages": turns}))
    chats.write_text("\n".join(lines))
    template = (
        "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    tokenizer = byte_tokenizer()
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name, text in tokenizer.files().items():
        (folder / name).write_text(text)
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    from scantling.data import read_tokenizer

    data = prepare(Sources((str(chats),), "chat"), read_tokenizer(folder), tmp_path / "c", workers=1)
    lm = sc.new(from_dict({**LLAMA, "vocab_size": 320}, "chat"))
    go(lm, data, settings(**{**PLAN, "steps": 2}, boundary="padded", evaluation__samples=0), tmp_path / "run")
    judged = [tokens for *_, tokens in losses(tmp_path / "run")]
    spoken = sum(int(data.train.spoken(n).sum()) for n in range(len(data.train)))
    assert 0 < max(judged) < 8 * 32
    assert spoken < data.train.tokens / 2


def test_a_trigram_of_random_bytes_needs_eight_bits() -> None:
    draw = np.random.default_rng(0)
    texts = [draw.integers(0, 256, 20_000).astype(np.uint8) for _ in range(10)]
    assert Trigram(texts).bits_per_byte(texts[:1]) == pytest.approx(8.0, abs=0.05)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_small_preset_beats_a_trigram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`train tiny` with a sixth of its updates needs fewer bits a byte than a trigram of the same text."""
    from scantling.data import open_corpus

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _run(["train", "tiny", "--steps", "100", "--out", str(tmp_path / "run"), "--plain"]) == 0
    (folder,) = [path.parent for path in (tmp_path / "scantling" / "data").glob("*/manifest.json")]
    data = open_corpus(folder)
    held = [r for r in read_metrics(tmp_path / "run") if r["kind"] == "evaluation"][-1]
    baseline = Trigram(texts_of(data, data.train)).bits_per_byte(texts_of(data, data.held_out, 32768))
    assert held["bits_per_byte"] < baseline
