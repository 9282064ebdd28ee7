"""Writing GGUF for `scantling convert`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from scantling.errors import ScantlingInputError

if TYPE_CHECKING:
    from scantling.model import Model

_OF_WEIGHTS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


def check_gguf(path: Path, overwrite: bool) -> None:
    """Refuse a destination before anything is read: it must end in .gguf and be new.

    Args:
        overwrite: makes no difference; one file is removed more safely by hand.
    """
    if path.suffix != ".gguf":
        raise ScantlingInputError(f"{path}: a GGUF file must be named .gguf, or it is not recognised as one")
    if path.exists() or path.is_symlink():
        raise ScantlingInputError(f"{path} exists; a GGUF file is never replaced, so remove it or name another")


def gguf_kind(dtype: str) -> str:
    """The name that GGUF has for a dtype.

    Raises:
        ScantlingInputError: it is none that can be written.
    """
    from scantling.checkpoint.gguf_write import DTYPES

    kind = _OF_WEIGHTS.get(dtype, dtype)
    if kind not in DTYPES:
        raise ScantlingInputError(f"dtype is {dtype!r}; a GGUF file is written as {', '.join(DTYPES)}")
    return kind


def to_gguf(
    lm: Model, path: Path, max_shard_bytes: int = 0, overwrite: bool = False, dtype: str | None = None
) -> dict[str, Any]:
    """Write one GGUF file.

    Args:
        max_shard_bytes: not used, there is one file.
        dtype: f32, f16, bf16, q8_0, q4_0, or our names of the first three; None keeps that of the loaded weights.

    Returns:
        path, model_type (the architecture), dtype, files (name and bytes), notes.
    """
    from scantling.checkpoint.gguf import read_gguf
    from scantling.checkpoint.gguf_write import write_gguf

    check_gguf(path, overwrite)
    stored = dtype or str(lm.dtype).removeprefix("torch.")
    kind = gguf_kind(stored)
    notes = write_gguf(lm, path, kind)
    return {
        "path": str(path),
        "model_type": str(read_gguf(path).metadata["general.architecture"]),
        "dtype": kind,
        "files": [{"name": path.name, "bytes": path.stat().st_size}],
        "notes": list(notes),
    }
