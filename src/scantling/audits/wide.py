"""A subject in float64, where it can be cast."""

from __future__ import annotations

from scantling.audits.protocol import Subject


def cast(subject: Subject, dtype: str) -> Subject | None:
    """The subject in another dtype; None where it cannot be cast."""
    if subject.facts.dtype == dtype:
        return subject
    if subject.can.cast is None:
        return None
    try:
        return subject.can.cast(dtype)
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return None


def wide(subject: Subject) -> Subject:
    """The subject in float64, or as it is where it cannot be cast."""
    return cast(subject, "float64") or subject
