"""A file that is whole or not there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scantling.checkpoint.whole_folder import flush_folder
from scantling.errors import ScantlingInputError


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """A new file beside the target, which takes its name when the block ends well, and is removed otherwise.

    Raises:
        ScantlingInputError: it cannot be written, or somebody else has made the target by then.
    """
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    except OSError as error:
        raise ScantlingInputError(f"{target}: cannot be written: {error.strerror}") from None
    os.close(handle)
    part = Path(name)
    try:
        yield part
        part.chmod(0o666 & ~_umask())
        if target.exists():
            raise ScantlingInputError(f"{target} exists by now; nothing is overwritten, so name a new file")
        part.rename(target)
        flush_folder(target.parent)
    except OSError as error:
        raise ScantlingInputError(f"{target}: cannot be written: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
