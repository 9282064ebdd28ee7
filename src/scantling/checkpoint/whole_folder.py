"""Folders that appear whole or not at all: written beside their place, flushed to the disk, then put there by a rename.

A process that is killed leaves the old folder as it was, and beside it a hidden one named ``.NAME.saving-*``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from scantling.checkpoint.files import shown
from scantling.errors import ScantlingInputError
from scantling.units import bytes_text

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def check_target(target: Path, overwrite: bool, ours: Callable[[str], bool]) -> None:
    """Refuse a folder that saving would destroy.

    Args:
        overwrite: an existing folder may be replaced, as long as nothing else lies in it.
        ours: whether a file, by its path from the folder, is one that saving writes.

    Raises:
        ScantlingInputError: the target is a file, is not empty, or holds files of other kinds.
    """
    try:
        if not target.exists():
            if not (above := next(p for p in target.parents if p.exists())).is_dir():
                raise ScantlingInputError(f"{target}: cannot be made, as {above} is a file; choose another folder")
            return
        if not target.is_dir():
            raise ScantlingInputError(f"{target}: is a file; give the name of a folder that does not exist yet")
        if not any(target.iterdir()):
            return
        found = [p for p in sorted(target.rglob("*")) if p.is_symlink() or not p.is_dir()]
        others = [p for p in found if not ours(p.relative_to(target).as_posix())]
    except OSError as error:
        raise ScantlingInputError(f"{target}: cannot be read: {error.strerror}") from None
    if not overwrite:
        raise ScantlingInputError(
            f"{target}: exists and is not empty; choose another folder, or allow it to be replaced (overwrite)"
        )
    if others:
        name = others[0].relative_to(target).as_posix()
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise ScantlingInputError(
            f"{target}: holds {shown(name)}{more}, which would be lost, as saving does not write it; move it away first"
        )


def check_room(target: Path, needed: int) -> None:
    """Refuse to begin what the disk cannot hold.

    Raises:
        ScantlingInputError: fewer than `needed` bytes are free where the folder is to be.
    """
    place = next(p for p in (target, *target.parents) if p.is_dir())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise ScantlingInputError(
            f"{target}: the files need {bytes_text(needed)} and the disk has {bytes_text(free)} free; "
            "make room, or choose another disk or a smaller dtype"
        )


def leftovers(target: Path) -> list[str]:
    """Names of folders beside it that saves to the same place left behind when they were cut off."""
    return sorted(path.name for path in target.parent.glob(f".{target.name}.saving-*"))


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """An empty folder to write into, which takes the place of `target` when all has gone well.

    Raises:
        ScantlingInputError: the folder cannot be made or written; `target` is then what it was.
    """
    fresh: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_name(f".{target.name}.saving-{secrets.token_hex(4)}")
        beside.mkdir()
        fresh = beside
        yield fresh
        for folder in (*(p for p in fresh.rglob("*") if p.is_dir()), fresh):
            flush_folder(folder)
        put(fresh, target)
        flush_folder(target.parent)
    except OSError as error:
        raise ScantlingInputError(f"{target}: cannot be written: {error.strerror}") from None
    finally:
        # After the exchange of names this is the old folder.
        if fresh is not None and fresh.exists():
            shutil.rmtree(fresh, ignore_errors=True)


def put(fresh: Path, target: Path) -> None:
    """Give the fresh folder the target's name, and the fresh one's name to what was there."""
    if not target.exists() or not any(target.iterdir()):
        os.rename(fresh, target)
        return
    shutil.copymode(target, fresh)
    if _exchanged(fresh, target):
        return
    old = fresh.with_name(fresh.name + "-old")
    os.rename(target, old)
    try:
        os.rename(fresh, target)
    except OSError:
        os.rename(old, target)
        raise
    os.rename(old, fresh)


def _exchanged(one: Path, other: Path) -> bool:
    """Exchange two names in one step, where the system can."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))


def flush_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk, where the system can say so."""
    if os.name == "nt":
        return
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
