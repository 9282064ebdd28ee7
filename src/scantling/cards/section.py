"""What sections of a card are made of: the mapping itself, and numbers with their bounds."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

Size: TypeAlias = Annotated[int, Meta(ge=1, le=2**32)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**32)]
Width: TypeAlias = Annotated[int, Meta(ge=1, le=2**20)]
Layers: TypeAlias = Annotated[int, Meta(ge=0, le=1024)]
Rows: TypeAlias = Annotated[int, Meta(ge=1, le=2**24)]
Positive: TypeAlias = Annotated[float, Meta(gt=0, le=1e12)]
Amount: TypeAlias = Annotated[float, Meta(ge=0, le=1e12)]
Chance: TypeAlias = Annotated[float, Meta(ge=0, lt=1)]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mapping of the card."""
