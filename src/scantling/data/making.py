"""Sources to a corpus: tokenised once, in parallel, kept whole or not at all, and used again while nothing changes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from scantling.checkpoint.whole_folder import flush_folder
from scantling.data.corpus import DEFAULT_HELD_OUT, FORMAT, MANIFEST, Corpus, Manifest, open_corpus
from scantling.data.pool import Crew, Pool
from scantling.data.reading import Part, parts_of
from scantling.data.shards import ShardRecord, token_dtype
from scantling.data.sources import Source, Sources, find_sources
from scantling.data.vocabulary import fingerprint, marks_of
from scantling.data.worker import Task
from scantling.errors import ScantlingInputError
from scantling.text.tokenizer import Tokenizer

SMALLEST_SHARD, LARGEST_SHARD = 2**20, 2**26
"""Bytes of sources for one shard; between them it is a 64th of all."""


@dataclass(frozen=True)
class Progress:
    """How far tokenising is: shards and tokens done, and shards in all."""

    done: int
    shards: int
    tokens: int


Report = Callable[[Progress], None]


def cache_folder() -> Path:
    """Where corpora are kept unless another place is named: `$XDG_CACHE_HOME/scantling/data`, by default ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "scantling" / "data"


def prepare(
    sources: Sources | Sequence[str],
    tokenizer: Tokenizer,
    out: str | os.PathLike[str] | None = None,
    *,
    held_out: float = DEFAULT_HELD_OUT,
    workers: int | None = None,
    progress: Report | None = None,
    verify: bool = True,
) -> Corpus:
    """Tokenise sources into a folder, or open the folder where that was done before.

    The folder appears whole or not at all. What a killed run had finished is used by the next one; two runs at once
    wait for each other (where the system has `fcntl`), so every rank of a node may call this.

    Args:
        sources: what to read; names alone are texts.
        tokenizer: of the model that is to be trained.
        out: the folder; None is one in `cache_folder`, named after the hash of sources and tokenizer.
        held_out: share of the documents that is never trained on.
        workers: processes; None is one per CPU that may be used.
        progress: called after each shard.
        verify: compare all shards with their hashes, which reads them once; one process of a node may do so for all.

    Raises:
        ScantlingInputError: bad sources, a folder made of something else or damaged, or a disk that is full.
    """
    sources = sources if isinstance(sources, Sources) else Sources(tuple(sources))
    found, notes = find_sources(sources)
    made_of = {
        "sources": [{"name": s.name, "form": s.form, "sha256": s.sha256} for s in found],
        "tokenizer": fingerprint(tokenizer),
        "options": sources.options,
    }
    key = _key(made_of)
    folder = cache_folder() / key[:32] if out is None else Path(out)
    with _locked(folder) as held:
        if (folder / MANIFEST).exists():
            _check_same(folder, key, made_of)
        else:
            _check_empty(folder)
            plan = _Plan(sources, found, tokenizer, made_of, key, tuple(notes))
            _make(folder, plan, Crew(_processes(workers), held), progress)
    corpus = open_corpus(folder, held_out=held_out, verify=verify)
    if not len(corpus.train):
        raise ScantlingInputError("the sources have no text: at least one token is needed")
    return corpus


@dataclass(frozen=True)
class _Plan:
    """All that is to be done."""

    sources: Sources
    found: Sequence[Source]
    tokenizer: Tokenizer
    made_of: Mapping[str, Any]
    key: str
    notes: tuple[str, ...]

    def tasks(self) -> list[list[Part]]:
        """Parts for each shard: consecutive ones that are about a 64th of all together, from 1 to 64 MiB."""
        total = sum(source.size for source in self.found if source.form not in ("parquet", "dataset"))
        wanted = min(max(total // 64, SMALLEST_SHARD), LARGEST_SHARD)
        tasks: list[list[Part]] = []
        size = wanted
        for source in self.found:
            for part in parts_of(source, wanted):
                if size >= wanted:
                    tasks.append([])
                    size = 0
                tasks[-1].append(part)
                size += wanted if part.form in ("parquet", "dataset") else part.end - part.start
        return tasks


def _key(made_of: Mapping[str, Any]) -> str:
    """The hash of what decides the tokens: names of files do not."""
    contents = [[source["form"], source["sha256"]] for source in made_of["sources"]]
    decides = [FORMAT, contents, made_of["tokenizer"], made_of["options"]]
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


def _processes(workers: int | None) -> int:
    if workers is None:
        allowed = getattr(os, "sched_getaffinity", None)
        return len(allowed(0)) if allowed else os.cpu_count() or 1
    if workers < 1:
        raise ScantlingInputError(f"workers are {workers}; at least 1 is needed")
    return workers


def _check_same(folder: Path, key: str, made_of: Mapping[str, Any]) -> None:
    """Refuse a folder that was made of something else, and say of what."""
    manifest = Manifest.read(folder / MANIFEST)
    if manifest.key == key:
        return
    raise ScantlingInputError(
        f"{folder}: was made of other data ({_difference(manifest.made_of, made_of)}); delete it or name another folder"
    )


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    if old.get("tokenizer") != new["tokenizer"]:
        return "another tokenizer"
    if old.get("options") != new["options"]:
        changed = [name for name, value in new["options"].items() if old.get("options", {}).get(name) != value]
        return f"another choice of {', '.join(changed)}"
    before, now = ({s["name"]: s["sha256"] for s in made["sources"]} for made in (old, new))
    for name in [*before, *now]:
        if name not in now:
            return f"{name} is not among the sources now"
        if name not in before:
            return f"{name} is new"
        if before[name] != now[name]:
            return f"{name} has changed"
    return "the files were in another order"


def _check_empty(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ScantlingInputError(f"{folder}: exists and is no tokenised data; name a folder that does not exist yet")


def _make(folder: Path, plan: _Plan, crew: Crew, progress: Report | None) -> None:
    working = folder.with_name(f".{folder.name}.preparing")
    try:
        working.mkdir(parents=True, exist_ok=True)
        _begin(working, plan.key)
        for name, text in plan.tokenizer.files().items():
            (working / name).write_text(text, encoding="utf-8")
        shards = _encode(working, plan, crew, progress)
        manifest = Manifest(
            key=plan.key,
            kind=plan.sources.kind,
            made_of=plan.made_of,
            vocab_size=plan.tokenizer.vocab_size,
            dtype=token_dtype(plan.tokenizer.vocab_size),
            marks=marks_of(plan.tokenizer),
            shards=tuple(shards),
            notes=plan.notes,
        )
        _write(working / MANIFEST, manifest.text())
        for path in (*working.glob("*.done"), working / "key"):
            path.unlink()
        flush_folder(working)
        if folder.exists():
            folder.rmdir()
        os.rename(working, folder)
        flush_folder(folder.parent)
    except ScantlingInputError:
        shutil.rmtree(working, ignore_errors=True)
        raise
    except OSError as error:
        shutil.rmtree(working, ignore_errors=True)
        raise ScantlingInputError(f"{folder}: cannot be written: {error.strerror or error}") from None


def _begin(working: Path, key: str) -> None:
    """Keep what an earlier run for the same key had finished, and nothing else."""
    mark = working / "key"
    if not mark.exists() or mark.read_text() != key:
        for path in working.iterdir():
            path.unlink()
        _write(mark, key)


@dataclass(frozen=True)
class _Done:
    """A shard that is finished, and the hash of the task that it answers."""

    task: str
    shard: ShardRecord


def _encode(working: Path, plan: _Plan, crew: Crew, progress: Report | None) -> list[ShardRecord]:
    dtype = token_dtype(plan.tokenizer.vocab_size)
    tasks = [Task(f"{number:05}", tuple(parts), plan.sources, dtype) for number, parts in enumerate(plan.tasks())]
    hashes = {task.name: hashlib.sha256(msgspec.json.encode(task)).hexdigest() for task in tasks}
    records: dict[str, ShardRecord] = {}
    for path in working.glob("*.done"):
        done = msgspec.json.decode(path.read_bytes(), type=_Done)
        if hashes.get(done.shard.name) == done.task:
            records[done.shard.name] = done.shard
    left = [task for task in tasks if task.name not in records]
    with Pool(working, plan.tokenizer, crew, len(left)) as pool:
        for reply in pool.answers(left):
            if reply.error is not None:
                raise ScantlingInputError(reply.error)
            if reply.shard is None:
                raise OSError(None, reply.disk)
            shard = reply.shard
            _write(working / f"{shard.name}.done", msgspec.json.encode(_Done(hashes[shard.name], shard)).decode())
            records[shard.name] = shard
            if progress is not None:
                progress(Progress(len(records), len(tasks), sum(record.tokens for record in records.values())))
    return [records[name] for name in sorted(records)]


def _write(path: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


@contextmanager
def _locked(folder: Path) -> Iterator[tuple[int, ...]]:
    """Hold the lock of a folder, which the system gives back when all processes with these descriptors have ended."""
    try:
        import fcntl
    except ModuleNotFoundError:
        yield ()
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = folder.with_name(f".{folder.name}.lock").open("w")
    except OSError as error:
        raise ScantlingInputError(f"{folder}: cannot be written: {error.strerror}") from None
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield (file.fileno(),)
