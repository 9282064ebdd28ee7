"""A corpus on the disk: whole or not at all, the same however it was made, and used again only while it is right."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from scantling.data import (
    Corpus,
    Progress,
    Sources,
    byte_tokenizer,
    open_corpus,
    pool,
    prepare,
    shards,
    train_tokenizer,
)
from scantling.data import cache_folder as cache
from scantling.data.making import _difference
from scantling.data.worker import Task, answer
from scantling.errors import ScantlingInputError
from scantling.text.tokenizer import Tokenizer

BYTES = byte_tokenizer()
LICENCE = (Path(__file__).parents[1] / "data" / "cpython-license.txt").read_text()


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder of 40 files of a few lines each."""
    folder = tmp_path / "texts"
    folder.mkdir()
    lines = [line for line in LICENCE.splitlines() if line]
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(f"{number}\n" + "\n".join(lines[number * 3 : number * 3 + 5]))
    return folder


def made(texts: Path, out: Path, **options: Any) -> Corpus:
    return prepare([str(texts)], BYTES, out, **{"workers": 1, **options})


def all_texts(data: Corpus) -> set[str]:
    return {BYTES.decode(half.ids(n).tolist()) for half in (data.train, data.held_out) for n in range(len(half))}


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def left(folder: Path) -> list[str]:
    """What lies in a folder but the locks, which stay."""
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


class TestWhatIsMade:
    def test_every_document_is_there_as_its_bytes(self, texts: Path, tmp_path: Path) -> None:
        data = made(texts, tmp_path / "out")
        assert all_texts(data) == {path.read_text() for path in texts.iterdir()}
        assert data.train.bytes + data.held_out.bytes == sum(path.stat().st_size for path in texts.iterdir())
        assert data.train.tokens == data.train.bytes, "a byte is a token"

    def test_the_manifest_says_what_was_made_of_what(self, texts: Path, tmp_path: Path) -> None:
        import hashlib

        data = made(texts, tmp_path / "out")
        told = json.loads((tmp_path / "out" / "manifest.json").read_text())
        assert told["counts"] == {
            "documents": 40,
            "empty": 0,
            "tokens": data.manifest.tokens,
            "bytes": data.manifest.tokens,
        }
        assert told["dtype"] == "uint16"
        assert told["vocab_size"] == 259
        first = told["made_of"]["sources"][0]
        assert first["sha256"] == hashlib.sha256((texts / "00.txt").read_bytes()).hexdigest()
        for shard in told["shards"]:
            for ending, digest in shard["sha256"].items():
                content = (tmp_path / "out" / f"{shard['name']}{ending}").read_bytes()
                assert hashlib.sha256(content).hexdigest() == digest
        assert told["marks"]["before"] == [BYTES.bos_id]
        assert told["marks"]["eos"] == BYTES.ends[0]

    def test_ids_that_need_more_than_16_bits(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("ab" * 20)
        document = shards.Encoded(np.array([70_000, 5], np.uint32), 0, 2, 7)
        record = shards.write_shard(tmp_path, "00000", [document], shards.token_dtype(70_001))
        shard = shards.open_shard(tmp_path, record, "uint32", 70_001)
        assert shard.ids.tolist() == [70_000, 5]
        assert shards.token_dtype(65_536) == "uint16"
        with pytest.raises(ScantlingInputError, match="has id 70000, and the vocabulary has 70000 tokens"):
            shards.open_shard(tmp_path, record, "uint32", 70_000)

    def test_the_tokenizer_lies_beside_and_opens(self, texts: Path, tmp_path: Path) -> None:
        tokenizer = train_tokenizer([LICENCE], 400)
        data = prepare([str(texts)], tokenizer, tmp_path / "out", workers=1)
        assert Tokenizer.from_folder(tmp_path / "out").encode("as is") == tokenizer.encode("as is")
        assert data.tokenizer.decode(data.train.ids(0).tolist()) in {path.read_text() for path in texts.iterdir()}

    def test_documents_without_a_token_are_counted_and_left_out(self, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl"
        path.write_text('{"text": "a"}\n{"text": ""}\n{"text": "b"}\n')
        data = prepare([str(path)], BYTES, tmp_path / "out", held_out=0.0)
        assert len(data.train) == 2
        assert data.manifest.shards[0].empty == 1
        path.write_text('{"text": ""}\n')
        with pytest.raises(ScantlingInputError, match="the sources have no text: at least one token"):
            prepare([str(path)], BYTES, tmp_path / "none")

    def test_a_text_of_several_blocks_is_one_document(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        tokenizer = train_tokenizer([LICENCE], 600)
        (tmp_path / "a.txt").write_text(LICENCE)
        whole = prepare([str(tmp_path / "a.txt")], tokenizer, tmp_path / "one", held_out=0.0)
        monkeypatch.setattr("scantling.data.reading.BLOCK_CHARS", 512)
        cut = prepare([str(tmp_path / "a.txt")], tokenizer, tmp_path / "two", held_out=0.0, workers=1)
        assert whole.train.ids(0).tolist() == cut.train.ids(0).tolist() == tokenizer.encode(LICENCE, add_special=False)


class TestParallel:
    def test_any_number_of_workers_makes_the_same_files(
        self, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _small_shards(monkeypatch)
        progress: list[Progress] = []
        made(texts, tmp_path / "one")
        made(texts, tmp_path / "three", workers=3, progress=progress.append)
        assert files(tmp_path / "one") == files(tmp_path / "three")
        assert len(files(tmp_path / "one")) > 20
        assert [p.done for p in progress] == list(range(1, progress[-1].shards + 1))
        assert progress[-1].tokens == open_corpus(tmp_path / "one").manifest.tokens

    def test_without_child_processes_this_one_does_it(
        self, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        _small_shards(monkeypatch)

        def none(*rest: Any, **more: Any) -> None:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

        monkeypatch.setattr(pool.subprocess, "Popen", none)
        assert len(all_texts(made(texts, tmp_path / "out", workers=4))) == 40
        assert "note: no more processes can be started (Resource temporarily unavailable)" in capsys.readouterr().err

    def test_a_child_that_dies_is_told(self, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        _small_shards(monkeypatch)
        monkeypatch.setattr(pool.sys, "executable", "/bin/true")
        with pytest.raises(Exception, match="a process that tokenises died"):
            made(texts, tmp_path / "out", workers=2)
        assert left(tmp_path) == [".out.preparing", "texts"], "what is done is used by the next run"
        monkeypatch.undo()
        assert len(all_texts(made(texts, tmp_path / "out"))) == 40
        assert left(tmp_path) == ["out", "texts"]

    def test_bad_input_in_a_child_is_told_as_in_this_process(
        self, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _small_shards(monkeypatch)
        (texts / "20.txt").write_bytes(b"ab\xff")
        for workers in (1, 2):
            with pytest.raises(ScantlingInputError, match=r"20\.txt: byte 2 \(0xff\) is no UTF-8"):
                made(texts, tmp_path / "out", workers=workers)
        assert left(tmp_path) == ["texts"]

    def test_an_interruption_ends_the_children_and_keeps_what_is_done(
        self, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _small_shards(monkeypatch)
        started: list[subprocess.Popen[bytes]] = []
        plain = subprocess.Popen

        def noted(*rest: Any, **more: Any) -> Any:
            started.append(plain(*rest, **more))
            return started[-1]

        def interrupt(progress: Progress) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(pool.subprocess, "Popen", noted)
        with pytest.raises(KeyboardInterrupt):
            made(texts, tmp_path / "out", workers=2, progress=interrupt)
        assert len(started) == 2
        assert all(child.poll() is not None for child in started)
        assert list((tmp_path / ".out.preparing").glob("*.done"))
        monkeypatch.undo()
        assert len(all_texts(made(texts, tmp_path / "out"))) == 40

    def test_workers_are_at_least_one(self, texts: Path, tmp_path: Path) -> None:
        with pytest.raises(ScantlingInputError, match="workers are 0"):
            made(texts, tmp_path / "out", workers=0)


def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scantling.data.making.SMALLEST_SHARD", 2**10)


class TestUsedAgain:
    def test_the_same_is_not_made_again(self, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        first = made(texts, tmp_path / "out")

        def never(*rest: Any) -> None:
            raise AssertionError

        monkeypatch.setattr("scantling.data.making._make", never)
        again = made(texts, tmp_path / "out")
        assert again.train.ids(3).tolist() == first.train.ids(3).tolist()
        assert again.train.identity == first.train.identity

    def test_a_folder_of_the_cache_is_named_after_what_it_is_made_of(
        self, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        one = prepare([str(texts)], BYTES, workers=1)
        assert one.folder.parent == cache() == tmp_path / "cache" / "scantling" / "data"
        moved = texts.rename(tmp_path / "moved")
        assert prepare([str(moved)], BYTES, workers=1).folder == one.folder, "names of files do not count"
        (moved / "05.txt").write_text("other")
        assert prepare([str(moved)], BYTES, workers=1).folder != one.folder
        assert prepare([str(moved)], byte_tokenizer("seq2seq"), workers=1).folder != one.folder
        monkeypatch.delenv("XDG_CACHE_HOME")
        assert cache() == Path.home() / ".cache" / "scantling" / "data"

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ("changed", r"05\.txt has changed"),
            ("removed", r"05\.txt is not among the sources now"),
            ("added", r"50\.txt is new"),
            ("tokenizer", "another tokenizer"),
            ("options", "another choice of separator"),
        ],
    )
    def test_a_folder_of_other_data_is_refused_and_kept(
        self, texts: Path, tmp_path: Path, change: str, message: str
    ) -> None:
        made(texts, tmp_path / "out")
        before = files(tmp_path / "out")
        sources, tokenizer = Sources((str(texts),)), BYTES
        if change == "changed":
            (texts / "05.txt").write_text("other")
        elif change == "removed":
            (texts / "05.txt").unlink()
        elif change == "added":
            (texts / "50.txt").write_text("new")
        elif change == "tokenizer":
            tokenizer = byte_tokenizer("seq2seq")
        else:
            sources = replace(sources, separator="\n\n")
        with pytest.raises(ScantlingInputError, match=f"was made of other data .*{message}.*; delete it or name"):
            prepare(sources, tokenizer, tmp_path / "out", workers=1)
        assert files(tmp_path / "out") == before

    def test_the_order_of_files_counts(self) -> None:
        one = {"tokenizer": "t", "options": {}, "sources": [{"name": n, "sha256": n} for n in "ab"]}
        assert _difference(one, {**one, "sources": one["sources"][::-1]}) == "the files were in another order"

    def test_a_folder_with_something_else_is_left_alone(self, texts: Path, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.txt").write_text("mine")
        with pytest.raises(ScantlingInputError, match="exists and is no tokenised data"):
            made(texts, tmp_path / "out")
        assert left(tmp_path / "out") == ["thesis.txt"]
        (tmp_path / "file").write_text("mine")
        with pytest.raises(ScantlingInputError, match="exists and is no tokenised data"):
            made(texts, tmp_path / "file")


class TestDamage:
    @pytest.fixture
    def out(self, texts: Path, tmp_path: Path) -> Path:
        return made(texts, tmp_path / "out").folder

    @pytest.mark.parametrize("ending", [".bin", ".docs"])
    def test_a_shard_that_is_cut_off(self, out: Path, texts: Path, ending: str) -> None:
        path = out / f"00000{ending}"
        path.write_bytes(path.read_bytes()[:-3])
        with pytest.raises(ScantlingInputError, match=rf"00000\{ending}: has [\d,]+ bytes, not [\d,]+: it is cut off"):
            made(texts, out)
        with pytest.raises(ScantlingInputError, match="cut off"):
            open_corpus(out, verify=False)

    @pytest.mark.parametrize("ending", [".bin", ".docs"])
    def test_a_shard_with_one_other_byte(self, out: Path, texts: Path, ending: str) -> None:
        path = out / f"00000{ending}"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        with pytest.raises(ScantlingInputError, match="its bytes are not those that were written; delete the folder"):
            made(texts, out)

    def test_a_shard_that_is_gone(self, out: Path) -> None:
        (out / "00000.bin").unlink()
        with pytest.raises(ScantlingInputError, match=r"00000\.bin: cannot be read: No such file"):
            open_corpus(out)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("{}", "is no manifest of tokenised data .*delete its folder"),
            ("[", "is no manifest"),
            (None, "cannot be read: No such file"),
        ],
    )
    def test_a_manifest_that_is_none(self, out: Path, content: str | None, message: str) -> None:
        path = out / "manifest.json"
        if content is None:
            path.unlink()
        else:
            path.write_text(content)
        with pytest.raises(ScantlingInputError, match=message):
            open_corpus(out)

    def test_a_manifest_with_an_id_that_no_token_has(self, out: Path) -> None:
        path = out / "manifest.json"
        told = json.loads(path.read_text())
        path.write_text(json.dumps(told | {"marks": {**told["marks"], "eos": 10**6}}))
        with pytest.raises(
            ScantlingInputError, match=r"names the id 1000000, and its vocabulary has 2.. tokens; delete"
        ):
            open_corpus(out)

    def test_a_manifest_of_another_format(self, out: Path) -> None:
        path = out / "manifest.json"
        path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
        with pytest.raises(ScantlingInputError, match="is of format 2, not 1"):
            open_corpus(out)


class TestNothingHalfWritten:
    @pytest.mark.parametrize("where", ["shard", "rename", "manifest", "folder"])
    def test_a_full_disk(self, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
        _small_shards(monkeypatch)
        fsync, rename, mkdir = os.fsync, os.replace, Path.mkdir
        calls = iter(range(10_000))

        def full(*rest: Any, **more: Any) -> Any:
            raise OSError(errno.ENOSPC, "No space left on device")

        def full_later(number: int) -> None:
            full() if next(calls) == 17 else fsync(number)

        if where == "shard":
            monkeypatch.setattr(os, "fsync", full_later)
        elif where == "rename":
            monkeypatch.setattr(os, "rename", full)
        elif where == "manifest":
            monkeypatch.setattr(
                os, "replace", lambda a, b: full() if str(b).endswith("manifest.json") else rename(a, b)
            )
        else:
            monkeypatch.setattr(
                Path, "mkdir", lambda self, **more: full() if "preparing" in self.name else mkdir(self, **more)
            )
        with pytest.raises(ScantlingInputError, match="out: cannot be written: No space left on device"):
            made(texts, tmp_path / "out")
        monkeypatch.undo()
        assert left(tmp_path) == ["texts"]
        assert len(all_texts(made(texts, tmp_path / "out"))) == 40

    def test_a_full_disk_in_a_child(self, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        _small_shards(monkeypatch)
        code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)); import signal; "
        code += "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); from scantling.data.worker import main; main()"
        monkeypatch.setattr(pool, "CODE", code)
        with pytest.raises(ScantlingInputError, match="out: cannot be written: File too large"):
            made(texts, tmp_path / "out", workers=2)
        assert left(tmp_path) == ["texts"]

    def test_what_a_killed_run_had_finished_is_used(
        self, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Killed by SIGKILL after some shards; the next run makes the rest, and the result is the usual one."""
        _small_shards(monkeypatch)
        made(texts, tmp_path / "whole")
        code = f"""
import os, signal
from scantling.data import byte_tokenizer, prepare
import scantling.data.making
scantling.data.making.SMALLEST_SHARD = 2**10
def kill(progress):
    if progress.done == 4:
        os.kill(os.getpid(), signal.SIGKILL)
prepare([{str(texts)!r}], byte_tokenizer(), {str(tmp_path / "out")!r}, workers=1, progress=kill)
"""
        done = subprocess.run([sys.executable, "-c", code])
        assert done.returncode == -signal.SIGKILL
        assert not (tmp_path / "out").exists()
        working = tmp_path / ".out.preparing"
        assert len(list(working.glob("*.done"))) == 4
        (working / "00007.bin.part").write_bytes(b"half")
        asked: list[str] = []
        plain = answer

        def counted(folder: Path, tokenizer: Tokenizer, task: Task) -> Any:
            asked.append(task.name)
            return plain(folder, tokenizer, task)

        monkeypatch.setattr(pool, "answer", counted)
        made(texts, tmp_path / "out")
        assert asked == [f"{n:05}" for n in range(4, 4 + len(asked))]
        assert files(tmp_path / "out") == files(tmp_path / "whole")
        assert left(tmp_path) == ["out", "texts", "whole"]

    @pytest.mark.slow
    def test_kills_at_any_instant_lose_and_spoil_nothing(self, texts: Path, tmp_path: Path) -> None:
        """Parents killed while two children write; the next run may begin before the orphans have ended."""
        rng = random.Random(0)
        for number in range(40, 140):
            (texts / f"{number}.txt").write_text(" ".join(str(rng.random()) for _ in range(2000)))
        code = """
import importlib, sys
importlib.import_module("scantling.data.making").SMALLEST_SHARD = 2**16
from scantling.data import byte_tokenizer, prepare
prepare([sys.argv[1]], byte_tokenizer(), sys.argv[2], workers=2)
"""

        told = (tmp_path / "told").open("w")

        def started(out: str) -> subprocess.Popen[bytes]:
            return subprocess.Popen([sys.executable, "-c", code, str(texts), str(tmp_path / out)], stderr=told)

        begin = time.monotonic()
        assert started("whole").wait() == 0
        usual = time.monotonic() - begin
        kills, number, run = 0, 0, None
        while kills < 10:
            number += run is None
            run = started(f"out{number}")
            try:
                run.wait(rng.uniform(0.3, 0.9) * usual)
            except subprocess.TimeoutExpired:
                run.kill()
                run.wait()
                kills += 1
                continue
            assert run.returncode == 0
            assert files(tmp_path / f"out{number}") == files(tmp_path / "whole")
            run = None
        assert started(f"out{number}").wait() == 0
        assert files(tmp_path / f"out{number}") == files(tmp_path / "whole")
        told.close()
        assert (tmp_path / "told").read_text() == ""

    def test_what_a_killed_run_of_other_data_had_finished_is_not(
        self, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        working = tmp_path / ".out.preparing"
        working.mkdir()
        (working / "key").write_text("other")
        stale = shards.write_shard(working, "00000", [shards.Encoded(np.array([1]), 0, 1, 1)], "uint16")
        (working / "00000.done").write_bytes(msgspec.json.encode({"task": "", "shard": stale}))
        assert len(all_texts(made(texts, tmp_path / "out"))) == 40


class TestAtOnce:
    def test_a_second_run_waits_and_finds_it_done(self, texts: Path, tmp_path: Path) -> None:
        code = f"""
from scantling.data import byte_tokenizer, prepare
shown = []
data = prepare([{str(texts)!r}], byte_tokenizer(), {str(tmp_path / "out")!r}, workers=1, progress=shown.append)
print(len(shown), data.manifest.key)
"""
        runs = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
        told = [run.communicate()[0].split() for run in runs]
        assert [run.returncode for run in runs] == [0, 0, 0]
        assert sorted(count for count, _ in told) == ["0", "0", "1"]
        assert len({key for _, key in told}) == 1


class TestHeldOut:
    def test_the_same_documents_whatever_stands_around_them(self, texts: Path, tmp_path: Path) -> None:
        data = made(texts, tmp_path / "out", held_out=0.3)
        held = {BYTES.decode(data.held_out.ids(n).tolist()) for n in range(len(data.held_out))}
        assert 3 <= len(held) <= 21, "40 draws of 0.3, within 3 standard deviations"
        for number in range(20):
            (texts / f"{number:02}.txt").unlink()
        copy = texts / "copy.txt"
        copy.write_text(sorted(held & {path.read_text() for path in texts.iterdir()})[0])
        fewer = made(texts, tmp_path / "fewer", held_out=0.3)
        now = [BYTES.decode(fewer.held_out.ids(n).tolist()) for n in range(len(fewer.held_out))]
        assert set(now) == held & {path.read_text() for path in texts.iterdir()}
        assert now.count(copy.read_text()) == 2, "a copy falls on the same side"

    def test_the_same_documents_whatever_the_tokenizer(self, texts: Path, tmp_path: Path) -> None:
        tokenizer = train_tokenizer([LICENCE], 500)
        data = prepare([str(texts)], tokenizer, tmp_path / "out", held_out=0.3, workers=1)
        held = {tokenizer.decode(data.held_out.ids(n).tolist()) for n in range(len(data.held_out))}
        other = made(texts, tmp_path / "other", held_out=0.3)
        assert held == {BYTES.decode(other.held_out.ids(n).tolist()) for n in range(len(other.held_out))}

    def test_a_half_is_never_empty_where_there_are_two_documents(self, texts: Path, tmp_path: Path) -> None:
        made(texts, tmp_path / "out")
        for share, side in ((1e-9, "held_out"), (1 - 1e-9, "train")):
            data = open_corpus(tmp_path / "out", held_out=share)
            assert len(getattr(data, side)) == 1
            assert len(data.train) + len(data.held_out) == 40

    def test_of_one_document_the_end_is_held_out(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("0123456789" * 10)
        data = prepare([str(tmp_path / "a.txt")], BYTES, tmp_path / "out", held_out=0.1)
        assert BYTES.decode(data.train.ids(0).tolist()) == "0123456789" * 9
        assert BYTES.decode(data.held_out.ids(0).tolist()) == "0123456789"
        assert (data.train.bytes, data.held_out.bytes) == (90, 10)
        assert data.notes == ("the one document is cut: its end is held out",)
        (tmp_path / "b.txt").write_text("x")
        one = prepare([str(tmp_path / "b.txt")], BYTES, tmp_path / "one", held_out=0.1)
        assert (len(one.train), len(one.held_out)) == (1, 0)

    @pytest.mark.parametrize("share", [1.0, -0.1, float("nan")])
    def test_shares_that_are_none(self, texts: Path, tmp_path: Path, share: float) -> None:
        with pytest.raises(ScantlingInputError, match="must be at least 0 and below 1"):
            made(texts, tmp_path / "out", held_out=share)
