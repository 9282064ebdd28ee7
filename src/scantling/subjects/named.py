"""A MODEL of the command line as the subject of an audit, read by one library or by two."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from scantling.audits import Subject
from scantling.checkpoint.find import find
from scantling.errors import ScantlingInputError
from scantling.loading import from_card, load, tokenizer_of
from scantling.subjects.ours import ours
from scantling.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Loading:
    """How a model is loaded.

    Attributes:
        longest: tokens of real text that the probes may read.
    """

    dtype: str | None = None
    device: str = "cpu"
    revision: str | None = None
    longest: int = 320


Loader: TypeAlias = Callable[[str | None, Loading], Subject]


def named(model: str | None, library: str, against: str | None, loading: Loading) -> Subject:
    """A model that is named, and where asked the same as another library reads it beside it.

    Args:
        model: a preset or card gets initial weights; None is the default model.

    Raises:
        ScantlingInputError: no such model, or none that the library reads.
        MissingExtra: a library is not installed.
    """
    first = LOADERS[library](model, loading)
    return first if against is None else beside(first, LOADERS[against](model, loading))


def beside(first: Subject, second: Subject) -> Subject:
    """A subject with another implementation as its reference, in every dtype."""
    one, other = first.can.cast, second.can.cast
    if one is None or other is None:
        return replace(first, can=replace(first.can, reference=lambda: second, cast=None))

    @cache
    def both(dtype: str) -> Subject:
        return beside(one(dtype), other(dtype))

    return replace(first, can=replace(first.can, reference=lambda: second, cast=both))


def _scantling(model: str | None, loading: Loading) -> Subject:
    found = None if model is None else find(model, revision=loading.revision)
    if found is not None and found.kind in ("preset", "card"):
        lm = from_card(os.fspath(found.path), dtype=loading.dtype or "float32", device=loading.device)
        return ours(lm, f"{lm.card.name}, initial weights")
    lm = load(model, dtype=loading.dtype, device=loading.device, revision=loading.revision)
    return ours(lm, sample=_sample(lm.tokenizer, loading.longest))


def _transformers(model: str | None, loading: Loading) -> Subject:
    from scantling.subjects.theirs import load_theirs, theirs

    if model is None:
        raise ScantlingInputError("transformers reads a folder or a hub id: name one")
    found = find(model, revision=loading.revision)
    if found.kind in ("safetensors",):
        found = replace(found, kind="folder", path=found.path.parent)
    if found.kind != "folder":
        raise ScantlingInputError(f"{model!r} is a {found.kind}; transformers reads a folder or a hub id")
    folder = os.fspath(found.path)
    lm = load_theirs(folder, dtype=loading.dtype, device=loading.device)
    tokenizer = tokenizer_of(folder) if (Path(folder) / "tokenizer.json").exists() else None
    return theirs(lm, Path(folder).name, _sample(tokenizer, loading.longest), folder)


LOADERS: dict[str, Loader] = {"scantling": _scantling, "transformers": _transformers}


def _sample(tokenizer: Tokenizer | None, tokens: int) -> Tensor | None:
    """Ids of English prose that every Python carries: its own description of objects, values and types."""
    if tokenizer is None:
        return None
    from pydoc_data.topics import topics

    import torch

    ids: Any = tokenizer.encode(str(topics["objects"]))
    return torch.tensor([list(ids)[: tokens + 1]])
