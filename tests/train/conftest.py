"""A small corpus of real text in bytes, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from scantling.data import Corpus, byte_tokenizer, prepare
from scantling.data.sources import stdlib_files


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Twelve short files of the standard library: some tens of thousands of bytes."""
    files = sorted(stdlib_files(), key=lambda path: (path.stat().st_size, path.name))
    chosen = [str(path) for path in files if path.stat().st_size > 1500][:12]
    folder: Path = tmp_path_factory.mktemp("corpus")
    return prepare(chosen, byte_tokenizer(), folder / "corpus", held_out=0.2, workers=1)
