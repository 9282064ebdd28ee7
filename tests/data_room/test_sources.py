"""What is read of files, folders, tables and datasets, and how bad ones are told."""

from __future__ import annotations

import json
import os
import sysconfig
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scantling.data import reading
from scantling.data.reading import Chat, Pair, Text, parts_of, read
from scantling.data.sources import Sources, find_sources, stdlib_files
from scantling.errors import ScantlingInputError


def documents(*paths: Path | str, size: int = 2**20, **options: Any) -> list[Any]:
    """Texts, (source, target) or messages of the sources."""
    sources = Sources(tuple(map(str, paths)), **options)
    found: list[Any] = []
    for source in find_sources(sources)[0]:
        for part in parts_of(source, size):
            for document in read(part, sources):
                if isinstance(document, Text):
                    found.append("".join(document.blocks))
                elif isinstance(document, Pair):
                    found.append((document.source, document.target))
                elif isinstance(document, Chat):
                    found.append(document.messages)
    return found


def written(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


class TestForms:
    def test_text_files_and_folders(self, tmp_path: Path) -> None:
        written(tmp_path / "b.txt", "two\r\n")
        written(tmp_path / "a" / "x.py", "öne")
        written(tmp_path / "c.jsonl", '{"text": "three"}\n\n{"text": "four", "n": 1}\n')
        written(tmp_path / ".hidden", "no")
        written(tmp_path / "__pycache__" / "x.txt", "no")
        written(tmp_path / "picture.png", b"\x89PNG\x00\x00")
        written(tmp_path / "empty.txt", "")
        assert documents(tmp_path) == ["öne", "two\r\n", "three", "four"]
        assert documents(tmp_path / "b.txt", tmp_path / "a") == ["two\r\n", "öne"]
        _, notes = find_sources(Sources((str(tmp_path),)))
        assert notes == [f"{tmp_path}: left out as binary: picture.png", f"{tmp_path}: left out as empty: empty.txt"]

    def test_a_byte_order_mark_is_no_text(self, tmp_path: Path) -> None:
        assert documents(written(tmp_path / "a.txt", b"\xef\xbb\xbfabc")) == ["abc"]
        assert documents(written(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "x"}')) == ["x"]

    def test_documents_of_a_file_with_a_separator(self, tmp_path: Path) -> None:
        path = written(tmp_path / "a.txt", "one<|end|>two\n<|end|>three")
        assert documents(path, separator="<|end|>") == ["one", "two\n", "three"]
        assert documents(path) == ["one<|end|>two\n<|end|>three"]

    def test_parquet(self, tmp_path: Path) -> None:
        table = pa.table({"text": [f"row {n}" for n in range(10)], "n": list(range(10))})
        pq.write_table(table, tmp_path / "a.parquet", row_group_size=4)
        assert documents(tmp_path / "a.parquet") == [f"row {n}" for n in range(10)]
        nested = pa.table({"translation": [{"en": "a", "de": "b"}]})
        pq.write_table(nested, tmp_path / "b.parquet")
        fields = ("translation.en", "translation.de")
        assert documents(tmp_path / "b.parquet", kind="pairs", fields=fields) == [("a", "b")]

    def test_datasets(self, tmp_path: Path) -> None:
        rows = datasets.Dataset.from_dict({"text": ["x", "y", "z"]})
        rows.save_to_disk(str(tmp_path / "one"))
        datasets.DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk(str(tmp_path / "two"))
        assert documents(tmp_path / "one") == ["x", "y", "z"]
        assert documents(tmp_path / "two", split="test") == ["x"]
        with pytest.raises(ScantlingInputError, match="has no split 'valid'; it has train, test"):
            documents(tmp_path / "two", split="valid")

    def test_pairs(self, tmp_path: Path) -> None:
        tsv = written(tmp_path / "a.tsv", "one\teins\ntwo words\tzwei Wörter\n")
        assert documents(tsv, kind="pairs") == [("one", "eins"), ("two words", "zwei Wörter")]
        jsonl = written(tmp_path / "a.jsonl", '{"source": "a", "target": "b"}\n')
        assert documents(jsonl, kind="pairs") == [("a", "b")]
        assert documents(tsv) == ["one\teins\ntwo words\tzwei Wörter\n"], "as text it is text"

    def test_conversations(self, tmp_path: Path) -> None:
        path = written(tmp_path / "a.jsonl", json.dumps({"messages": TALK}) + "\n")
        assert documents(path, kind="chat") == [TALK]
        assert documents(written(tmp_path / "b.jsonl", json.dumps({"talk": TALK})), kind="chat", fields=("talk",)) == [
            TALK
        ]

    def test_the_standard_library_is_always_there(self) -> None:
        root = Path(sysconfig.get_paths()["stdlib"])
        found = [path.relative_to(root).parts for path in stdlib_files()]
        assert {("json", "decoder.py"), ("argparse.py",)} <= set(found)
        assert found == sorted(found)
        assert not any({"test", "tests", "site-packages"} & set(parts) for parts in found)
        sources, notes = find_sources(Sources())
        assert len(sources) == len(found)
        assert "standard library" in notes[0]
        text = documents()[found.index(("json", "decoder.py"))]
        assert text == (root / "json" / "decoder.py").read_text(encoding="utf-8")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), max_size=20), st.integers(1, 200))
def test_a_file_cut_into_ranges_of_bytes_gives_every_line_once(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], size: int
) -> None:
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines) or "\n")
    assert documents(path, size=size) == lines


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from("\n\n\nab "), max_size=200))
def test_blocks_of_a_text_are_the_text_and_begin_at_lines(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "BLOCK_CHARS", 16)
        path = tmp_path_factory.mktemp("blocks") / "a.txt"
        path.write_bytes(text.encode() or b" ")
        sources = Sources((str(path),))
        (source,) = find_sources(sources)[0]
        (part,) = parts_of(source, 1)
        (document,) = read(part, sources)
        assert isinstance(document, Text)
        blocks = list(document.blocks)
    assert "".join(blocks) == (text.removeprefix("\ufeff") or " " * (not text))
    for before, block in pairwise(blocks):
        assert before[-1] == "\n"
        assert before[-2].isalnum()
        assert block[0].isalpha()


class TestBadInput:
    @pytest.mark.parametrize(
        ("name", "content", "options", "message"),
        [
            ("a.txt", "", {}, r"a\.txt: is empty \(0 bytes\)"),
            ("a.txt", b"ab\xff", {}, r"a\.txt: byte 2 \(0xff\) is no UTF-8; .*--encoding-errors replace"),
            ("a.txt", b"x" * 3_000_000 + b"\xc3(", {}, r"byte 3,000,000 \(0xc3\)"),
            ("a.txt", b"abc\xe2\x82", {}, r"byte 3 \(0xe2\)"),
            ("a.txt", b"a\x00b", {}, "a binary file, not text"),
            ("a.gz", b"\x1f\x8b\x08abc", {}, "gzip archive; unpack it first"),
            ("a.txt", "hi".encode("utf-16"), {}, "UTF-16 text; convert it to UTF-8"),
            ("a.jsonl", '{"text": "x"}\n{"txt": "y"}\n', {}, r"line 2: there is no field 'text'; it has txt \(--field"),
            ("a.jsonl", '\n\n{"text": 5}\n', {}, "line 3: field 'text' is int, not text"),
            ("a.jsonl", '{"text": "x"}\n{"text": \n', {}, r"line 2 is no JSON: Expecting value"),
            ("a.jsonl", "[1]\n", {}, "line 1: there is no field 'text'; it has no fields, but list"),
            ("a.jsonl", '{"a": {"b": 1}}\n', {"fields": ("a.c",)}, "line 1: there is no field 'a.c'; it has b"),
            ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}\n', {}, r"byte 24 \(0xff\) is no UTF-8"),
            ("a.jsonl", '{"text": "\\ud800"}\n', {}, "line 1: has half of a surrogate pair"),
            ("a.jsonl", '{"messages": []}\n', {"kind": "chat"}, "line 1: field 'messages' is no list of messages"),
            ("a.jsonl", '{"messages": "x"}\n', {"kind": "chat"}, "is no list of messages"),
            ("a.tsv", "a\tb\nc\n", {"kind": "pairs"}, "line 2 is no pair: a source, one tab and a target"),
            ("a.tsv", "a\tb\tc\n", {"kind": "pairs"}, "line 1 is no pair"),
            (
                "a.jsonl",
                '{"source": " ", "target": "b"}',
                {"kind": "pairs"},
                "line 1: the source or the target is empty",
            ),
            ("a.txt", "hello", {"kind": "chat"}, r"conversations are read from \.jsonl"),
            ("a.parquet", b"PAR1 no", {}, "is no Parquet file"),
        ],
    )
    def test_a_bad_file_is_told_with_its_place(
        self, tmp_path: Path, name: str, content: str | bytes, options: dict[str, Any], message: str
    ) -> None:
        path = written(tmp_path / name, content)
        with pytest.raises(ScantlingInputError, match=message) as caught:
            documents(path, **options)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_bytes_can_be_replaced_instead(self, tmp_path: Path) -> None:
        assert documents(written(tmp_path / "a.txt", b"ab\xffc"), encoding_errors="replace") == ["ab\ufffdc"]
        path = written(tmp_path / "a.jsonl", b'{"text": "\xff\\ud800"}\n')
        assert documents(path, encoding_errors="replace") == ["\ufffd\ufffd"]

    def test_columns_that_are_not_there(self, tmp_path: Path) -> None:
        pq.write_table(pa.table({"txt": ["a"], "other": [1]}), tmp_path / "a.parquet")
        with pytest.raises(ScantlingInputError, match="no column 'text'; it has txt, other; did you mean 'txt'"):
            documents(tmp_path / "a.parquet")
        with pytest.raises(ScantlingInputError, match="row 0: field 'other' is int, not text"):
            documents(tmp_path / "a.parquet", fields=("other",))

    def test_a_file_that_cannot_be_opened(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path, plain = written(tmp_path / "a.txt", "x"), Path.open

        def refuse(self: Path, *rest: Any) -> Any:
            if self == path:
                raise PermissionError(13, "Permission denied")
            return plain(self, *rest)

        monkeypatch.setattr(Path, "open", refuse)
        with pytest.raises(ScantlingInputError, match=r"a\.txt: cannot be read: Permission denied"):
            documents(path)

    @pytest.mark.skipif(os.name == "nt", reason="no pipes with names")
    def test_a_pipe_is_not_waited_for(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(ScantlingInputError, match="is not a regular file"):
            documents(tmp_path / "pipe")

    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(ScantlingInputError, match=r"no such file or folder \(a dataset on the hub is named OWNER"):
            documents(tmp_path / "missing.txt")
        (tmp_path / "folder").mkdir()
        with pytest.raises(ScantlingInputError, match="there is no text in"):
            documents(tmp_path / "folder")

    def test_a_name_on_the_hub_that_cannot_be_loaded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def absent(name: str, split: str) -> None:
            raise ConnectionError(f"cannot reach {name}\nand more")

        monkeypatch.setattr(datasets, "load_dataset", absent)
        with pytest.raises(
            ScantlingInputError, match="no such file, and as a dataset on the hub it cannot be loaded: c"
        ):
            documents("owner/name")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"kind": "talk"}, "kind of data 'talk': use one of text, pairs, chat"),
            ({"kind": "pairs", "fields": ("a",)}, r"pairs has 2 field\(s\), and the fields named are a"),
            ({"encoding_errors": "ignore"}, "use strict or replace"),
            ({"separator": ""}, "separator of documents is empty"),
            ({"kind": "chat", "paths": ()}, "data of kind chat is needed"),
        ],
    )
    def test_options_that_mean_nothing(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ScantlingInputError, match=message):
            Sources(**{"paths": ("x",), **options})
