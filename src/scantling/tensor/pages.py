"""Memory that the C library keeps within a piece of work, in large pages, instead of asking the system for each piece.

A pass over many tokens takes and gives back hundreds of tensors of megabytes. By default most of them are mapped anew,
and the system clears them page by page of 4 KiB: a tenth of the time of a small model's update, and more of that of a
prompt in float32.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from threading import Lock

import torch

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4
"""What glibc's malloc.h calls M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD and M_MMAP_MAX."""
_AFTERWARDS = {_TRIM_THRESHOLD: 2**26, _TOP_PAD: 128 * 1024, _MMAP_THRESHOLD: 2**25, _MMAP_MAX: 65536}
"""What these grow to by themselves in a program that takes and gives back large pieces; once set, they do not grow."""
_KEEPING = {_TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 2**26, _MMAP_MAX: 0}
_HUGE = 2 * 2**20

MANY_TOKENS = 64
"""From so many on the tensors of a pass are of the size that is mapped anew."""
OF_A_PASS = 2**26
"""Bytes of the heap that a pass without gradients goes through."""


class _Depth:
    """How many pieces of work are under way, in all threads, and whether their pages are kept."""

    def __init__(self) -> None:
        self.lock, self.count, self.kept = Lock(), 0, False


_DEPTH = _Depth()


def for_pass(device: torch.device, tokens: int) -> AbstractContextManager[object]:
    """`kept_pages` for a pass without gradients over so many tokens, all rows together, where that pays."""
    return kept_pages(OF_A_PASS) if device.type == "cpu" and tokens >= MANY_TOKENS else nullcontext()


@contextmanager
def kept_pages(nbytes: int) -> Iterator[bool]:
    """Inside, tensors come from one heap that does not shrink, its next `nbytes` in large pages where there are any.

    Nothing is held that is not used: a page comes when it is first written. Afterwards the heap shrinks again; inside
    another such piece of work, or beside one, when the last of them ends.

    Yields:
        Whether the C library can be told so (glibc); with another nothing changes.
    """
    library = _glibc()
    if library is None:
        yield False
        return
    with _DEPTH.lock:
        if not _DEPTH.count:
            _DEPTH.kept = all(library.mallopt(key, value) for key, value in _KEEPING.items())
            if _DEPTH.kept:
                _prefer_large(library, nbytes)
        _DEPTH.count += 1
    try:
        yield _DEPTH.kept
    finally:
        with _DEPTH.lock:
            _DEPTH.count -= 1
            if not _DEPTH.count:
                for key, value in _AFTERWARDS.items():
                    library.mallopt(key, value)
                library.malloc_trim(0)


@cache
def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        library = ctypes.CDLL(None)
        for name in ("gnu_get_libc_version", "mallopt", "malloc", "free", "madvise", "malloc_trim"):
            getattr(library, name)
    except (OSError, AttributeError):
        return None
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.restype, library.free.argtypes = None, [ctypes.c_void_p]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.malloc_trim.argtypes = [ctypes.c_size_t]
    return library


def _prefer_large(library: ctypes.CDLL, nbytes: int) -> None:
    """Mark the heap's next bytes; what is taken here is given back at once, and the mark stays."""
    taken = library.malloc(nbytes + 2 * _HUGE)
    if taken:
        library.madvise(-(-taken // _HUGE) * _HUGE, nbytes // _HUGE * _HUGE, mmap.MADV_HUGEPAGE)
        library.free(taken)
