"""Memory that the C library keeps between updates, in large pages, instead of asking the system for it each time.

An update takes and gives back hundreds of tensors of megabytes. By default each of them is mapped anew, and the system
clears it page by page of 4 KiB: a tenth of the time of a small model's update.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
"""What glibc's malloc.h calls M_TRIM_THRESHOLD, M_TOP_PAD and M_MMAP_MAX."""
_DEFAULTS = {_TRIM_THRESHOLD: 128 * 1024, _TOP_PAD: 128 * 1024, _MMAP_MAX: 65536}
_KEEPING = {_TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 2**26, _MMAP_MAX: 0}
_HUGE = 2 * 2**20


@contextmanager
def kept_pages(nbytes: int) -> Iterator[bool]:
    """Inside, tensors come from one heap that does not shrink, its next `nbytes` in large pages where there are any.

    Nothing is held that is not used: a page comes when it is first written. Afterwards the heap shrinks again.

    Yields:
        Whether the C library can be told so (glibc); with another nothing changes.
    """
    library = _glibc()
    kept = library is not None and all(library.mallopt(key, value) for key, value in _KEEPING.items())
    if library is None or not kept:
        yield False
        return
    try:
        _prefer_large(library, nbytes)
        yield True
    finally:
        for key, value in _DEFAULTS.items():
            library.mallopt(key, value)
        library.malloc_trim(0)


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
