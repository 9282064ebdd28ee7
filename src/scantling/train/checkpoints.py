"""Checkpoints that are whole or not there: a kill at any instant leaves the newest complete one usable.

Each is written as ``.tmp-step-N-PID``, flushed to the disk with the SHA-256 of every file in a manifest that is written
last, renamed to ``step-N``, and only then named by ``latest``; old ones go after that.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from scantling.checkpoint.safetensors_write import flush
from scantling.checkpoint.whole_folder import flush_folder, put
from scantling.errors import ScantlingInputError

MANIFEST = "manifest.json"
LATEST = "latest"
_BLOCK = 2**20


@dataclass(frozen=True)
class Found:
    """The newest checkpoint that is whole.

    Attributes:
        skipped: a sentence for each newer one that is not.
    """

    folder: Path
    step: int
    skipped: tuple[str, ...]


def steps(run: Path) -> list[int]:
    """Steps of the checkpoints of a run, whole or not, in ascending order."""
    if not run.is_dir():
        return []
    names = (path.name.removeprefix("step-") for path in run.glob("step-*") if path.is_dir())
    return sorted(int(name) for name in names if name.isdecimal())


def folder_of(run: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return run / f"step-{step}"


def newest(run: Path) -> Found | None:
    """The newest checkpoint whose manifest verifies, or None where there is no checkpoint at all.

    Raises:
        ScantlingInputError: there are checkpoints and none of them is whole.
    """
    skipped: list[str] = []
    for step in reversed(steps(run)):
        folder = folder_of(run, step)
        fault = fault_of(folder)
        if fault is None:
            return Found(folder, step, tuple(skipped))
        skipped.append(f"{folder} is skipped: {fault}")
    if skipped:
        raise ScantlingInputError(f"{run}: no checkpoint is whole; {'; '.join(skipped)}")
    return None


def fault_of(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None: every file of the manifest is there, of its size and its hash."""
    try:
        listed = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        for name, entry in listed.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != entry["bytes"]:
                return f"{name} has {path.stat().st_size} bytes and the manifest says {entry['bytes']}"
            if _sha256(path) != entry["sha256"]:
                return f"{name} is not what was written (SHA-256)"
        if unlisted := [name for name in _files(folder) if name not in listed and name != MANIFEST]:
            return f"{unlisted[0]} is not in the manifest"
    except FileNotFoundError:
        return f"it has no {MANIFEST}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {MANIFEST} cannot be read ({type(error).__name__})"
    return None


def save(run: Path, step: int, write: Callable[[Path], None], keep: int, best: int | None = None) -> Path:
    """Write the checkpoint of a step; it appears whole or not at all.

    Args:
        write: fills a folder of a given name, which does not exist yet, and flushes its files.
        keep: this many newest ones stay, and `best`; older ones go.

    Raises:
        ScantlingInputError: it cannot be written (the disk is full, say); the older ones are then as they were.
    """
    fresh = run / f".tmp-step-{step}-{os.getpid()}"
    target = folder_of(run, step)
    try:
        run.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(fresh, ignore_errors=True)
        write(fresh)
        _write_manifest(fresh, step)
        put(fresh, target)
        flush_folder(run)
        _point(run, target.name)
        _purge(run, keep, {step, best})
    except ScantlingInputError as error:
        text = str(error).replace(str(fresh), str(target))
        raise ScantlingInputError(f"{text}; the older checkpoints are as they were") from None
    except OSError as error:
        raise ScantlingInputError(
            f"{target}: the checkpoint cannot be written: {error.strerror or error}; the older ones are as they were"
        ) from None
    finally:
        # After an exchange of names this is the checkpoint that was replaced.
        shutil.rmtree(fresh, ignore_errors=True)
    return target


def clean(run: Path) -> None:
    """Remove what a process that was killed left behind; the run must be `held`."""
    for pattern in (".tmp-step-*", "..tmp-step-*", ".old-step-*", f".{LATEST}-*"):
        for path in run.glob(pattern):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


@contextmanager
def held(run: Path) -> Iterator[None]:
    """Keep other processes from training into the same folder; the system lets go when the process ends.

    Raises:
        ScantlingInputError: another process does, or the folder cannot be made.
    """
    try:
        run.mkdir(parents=True, exist_ok=True)
        lock = (run / ".lock").open("a")
    except OSError as error:
        raise ScantlingInputError(f"{run}: cannot be written: {error.strerror}") from None
    with lock:
        try:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            pass
        except BlockingIOError:
            raise ScantlingInputError(
                f"{run}: another process trains into this folder; wait for it, or choose another folder"
            ) from None
        yield


def _write_manifest(folder: Path, step: int) -> None:
    files = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": _sha256(folder / name)} for name in _files(folder)
    }
    for path in (*(p for p in folder.rglob("*") if p.is_dir()), folder):
        flush_folder(path)
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, "files": files}, indent=1) + "\n")
        flush(file)
    flush_folder(folder)


def _files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _point(run: Path, name: str) -> None:
    """Let `latest` name it. It is for people: `newest` looks at the checkpoints themselves."""
    fresh = run / f".{LATEST}-{os.getpid()}"
    fresh.unlink(missing_ok=True)
    try:
        fresh.symlink_to(name, target_is_directory=True)
    except (OSError, NotImplementedError):
        return
    fresh.replace(run / LATEST)


def _purge(run: Path, keep: int, kept: set[int | None]) -> None:
    for step in steps(run)[: -max(1, keep)]:
        if step not in kept:
            # Renamed first, so that one that is half removed does not look like a damaged checkpoint.
            old = folder_of(run, step).rename(run / f".old-step-{step}-{os.getpid()}")
            shutil.rmtree(old, ignore_errors=True)
