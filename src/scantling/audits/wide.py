"""A subject in another dtype, where it can be cast and runs there."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch

from scantling.audits.draw import feed, ids
from scantling.audits.protocol import Subject

_CASTS: WeakKeyDictionary[Subject, dict[str, Subject | None]] = WeakKeyDictionary()


def cast(subject: Subject, dtype: str) -> Subject | None:
    """The subject in another dtype; None where it cannot be cast, or does not run."""
    if subject.facts.dtype == dtype:
        return subject
    known = _CASTS.setdefault(subject, {})
    if dtype not in known:
        known[dtype] = _cast(subject, dtype)
    return known[dtype]


def _cast(subject: Subject, dtype: str) -> Subject | None:
    if subject.can.cast is None:
        return None
    try:
        twin = subject.can.cast(dtype)
        with torch.no_grad():
            twin.run(feed(twin, ids(twin.facts, 1, 2)))
    except Exception:
        return None
    return twin


def wide(subject: Subject) -> Subject:
    """The subject in float64, or as it is where it cannot be cast."""
    return cast(subject, "float64") or subject
