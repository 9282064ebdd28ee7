"""The sha256 of the files of a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from scantling.checkpoint.files import open_regular
from scantling.checkpoint.inspect.gather import Gathered

Progress = Callable[[str, int, int], None]
"""Called with a file's name, the bytes read of all files, and how many there are."""
_CHUNK = 4 * 2**20


def checksums(gathered: Gathered, progress: Progress | None) -> dict[str, str]:
    """By file name; reads all of every file."""
    total, done, out = sum(file.nbytes for file in gathered.files), 0, {}
    for file in gathered.files:
        path, digest = file.path, hashlib.sha256()
        stream, _ = open_regular(path)
        with stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
                done += len(chunk)
                if progress is not None:
                    progress(path.name, done, total)
        out[path.name] = digest.hexdigest()
    return out
