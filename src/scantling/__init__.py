"""Scantling: one card describes a Transformer; from it come its parts, exact numbers, shapes, model and text."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scantling.assembly import assemble
    from scantling.cards import Card
    from scantling.checkpoint.find import card_of as card
    from scantling.errors import ScantlingError, ScantlingInputError
    from scantling.inspection import Inspection, inspect
    from scantling.loading import from_card as new
    from scantling.loading import load, load_packed
    from scantling.model import Model
    from scantling.parts.part import Part, Step, Workload
    from scantling.saving import save
    from scantling.subjects import audit

__version__ = "0.1.0"

_HOME = {
    "Card": "scantling.cards",
    "Inspection": "scantling.inspection",
    "Model": "scantling.model",
    "Part": "scantling.parts.part",
    "ScantlingError": "scantling.errors",
    "ScantlingInputError": "scantling.errors",
    "Step": "scantling.parts.part",
    "Workload": "scantling.parts.part",
    "assemble": "scantling.assembly",
    "audit": "scantling.subjects",
    "card": "scantling.checkpoint.find:card_of",
    "inspect": "scantling.inspection",
    "load": "scantling.loading",
    "load_packed": "scantling.loading",
    "new": "scantling.loading:from_card",
    "save": "scantling.saving",
}

__all__ = [
    "Card",
    "Inspection",
    "Model",
    "Part",
    "ScantlingError",
    "ScantlingInputError",
    "Step",
    "Workload",
    "assemble",
    "audit",
    "card",
    "inspect",
    "load",
    "load_packed",
    "new",
    "save",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'scantling' has no attribute {name!r}")
    module, _, inner = _HOME[name].partition(":")
    value = getattr(import_module(module), inner or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
