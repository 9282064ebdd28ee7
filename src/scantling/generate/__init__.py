"""Prompt to text: prefill once, decode with an exact cache, choose tokens, stream; many at once, with drafts, by beams.

The names here are loaded when they are used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scantling.generate.batching import Engine, Limits
    from scantling.generate.beam import Beams
    from scantling.generate.chat import Conversation
    from scantling.generate.constrain import Shape
    from scantling.generate.contrastive import Contrastive
    from scantling.generate.keeping import Keeping
    from scantling.generate.request import Handle, Request
    from scantling.generate.sampling import Sampling
    from scantling.generate.session import Session
    from scantling.generate.settings import Generation, Options
    from scantling.generate.speculative import Drafting
    from scantling.generate.text import complete

_HOME = {
    "Beams": "beam",
    "Contrastive": "contrastive",
    "Conversation": "chat",
    "Drafting": "speculative",
    "Engine": "batching",
    "Generation": "settings",
    "Handle": "request",
    "Keeping": "keeping",
    "Limits": "batching",
    "Options": "settings",
    "Request": "request",
    "Sampling": "sampling",
    "Session": "session",
    "Shape": "constrain",
    "complete": "text",
}

__all__ = [
    "Beams",
    "Contrastive",
    "Conversation",
    "Drafting",
    "Engine",
    "Generation",
    "Handle",
    "Keeping",
    "Limits",
    "Options",
    "Request",
    "Sampling",
    "Session",
    "Shape",
    "complete",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'scantling.generate' has no attribute {name!r}")
    return getattr(import_module(f"scantling.generate.{_HOME[name]}"), name)
