"""Heads: what is read from the stream at the end."""

from __future__ import annotations

from scantling.parts.heads.labels import Labels
from scantling.parts.heads.transform import Transform
from scantling.parts.heads.vectors import NoHead, TextVector
from scantling.parts.heads.vocabulary import Head

AnyHead = Head | Labels | TextVector | NoHead

__all__ = ["AnyHead", "Head", "Labels", "NoHead", "TextVector", "Transform"]
